"""A cache of the places of processes, by their stacks. Pure."""

from typing import Any, TypeVar

from hangwatch.model import Frame, ProcessDump, Thread, Value
from hangwatch.stacks import activity
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.process_activity import ProcessActivity, find_process_activity
from hangwatch.stacks.user_code import find_framework_caller, user_frames

_PartT = TypeVar("_PartT", bound=Value)
_Stack = tuple[tuple[Frame, ...], int | None]
_Facts = tuple[bool, bool, str | None, int | None]  # is_main, trains, name and installed_frames of a thread
_Stacks = tuple[tuple[_Facts, tuple[Frame, ...]], ...]
_Places = tuple[tuple[_Facts, tuple[stack_frames.Place, ...]], ...]


class PlaceCache:
    """A cache of the places of processes. Most ranks have the same stacks, so each stack is classified only once.

    It also stores equal parts of ranks once. The verdict then reads less memory.
    """

    def __init__(self, table: activity.Table) -> None:
        self.table = table
        self._parts: dict[Any, Any] = {}
        self._by_stacks: dict[_Stacks, ProcessActivity] = {}
        self._by_places: dict[_Places, ProcessActivity] = {}
        self._user_code: dict[_Stack, tuple[tuple[Frame, ...], Frame | None]] = {}

    def classify(self, dump: ProcessDump) -> ProcessActivity | None:
        """Return the place of a process in one round; None if the dump has no stack."""
        if not any(thread.frames for thread in dump.threads):
            return None
        stacks = tuple(
            [((one.is_main, one.trains, one.name, one.installed_frames), one.frames) for one in dump.threads]
        )
        place = self._by_stacks.get(stacks)
        if place is None:
            places = tuple((facts, tuple([frame.place for frame in frames])) for facts, frames in stacks)
            place = self._by_places.get(places)
            if place is None:
                place = self._by_places[places] = find_process_activity(dump.threads, self.table)
            self._by_stacks[stacks] = place
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
