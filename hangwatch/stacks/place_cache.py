"""A cache of the places of processes, by their stacks. Pure."""

from typing import Any, TypeVar

from hangwatch.model import Frame, ProcessDump, Thread, Value
from hangwatch.stacks import activity
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.process_activity import ProcessActivity, find_process_activity
from hangwatch.stacks.user_code import find_framework_caller, user_frames

_PartT = TypeVar("_PartT", bound=Value)
_Stack = tuple[tuple[Frame, ...], int | None]
_Thread = tuple[bool, bool, str | None, int | None, tuple[stack_frames.Place, ...]]


class PlaceCache:
    """A cache of the places of processes. Most ranks have the same stacks, so each stack is classified only once.

    It also stores equal parts of ranks once. The verdict then reads less memory.
    """

    def __init__(self, table: activity.Table) -> None:
        self.table = table
        self._parts: dict[Any, Any] = {}
        self._by_places: dict[tuple[_Thread, ...], ProcessActivity] = {}
        self._user_code: dict[_Stack, tuple[tuple[Frame, ...], Frame | None]] = {}

    def classify(self, dump: ProcessDump) -> ProcessActivity | None:
        """Return the place of a process in one round; None if the dump has no stack."""
        if not any(thread.frames for thread in dump.threads):
            return None
        places = tuple(
            [
                (one.is_main, one.trains, one.name, one.installed_frames, tuple([frame.place for frame in one.frames]))
                for one in dump.threads
            ]
        )
        place = self._by_places.get(places)
        if place is None:
            place = self._by_places[places] = find_process_activity(dump.threads, self.table)
        return place

    def share(self, part: _PartT) -> _PartT:
        """Return an equal part of an earlier rank; `part` if there is none."""
        shared: _PartT = self._parts.setdefault(part, part)
        return shared

    def user_code(self, thread: Thread) -> tuple[tuple[Frame, ...], Frame | None]:
        """Return the results of `user_frames` and `find_framework_caller` for a thread. They are cached."""
        stack = thread.frames, thread.installed_frames
        if stack not in self._user_code:
            self._user_code[stack] = user_frames(thread), find_framework_caller(thread)
        return self._user_code[stack]
