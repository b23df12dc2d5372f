"""The lines of code at which a process was in each round, and the region that it did not leave. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hangwatch.model import CodeRegion, ProcessDump, Thread
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.process_activity import ProcessActivity

MOST_PLACES_OF_A_STAY = 3  # a polling loop has its condition, its pause, and maybe a counter
Line = tuple[str, str, int | None]


class RoundPlace(NamedTuple):
    """The place of a process in one round: the lines of its program, and the library lines called from there.

    `owns_gil` is None if unknown. `in_lock` is true if the thread waits for a lock, `at_loader` if it waits for the
    workers of its data loader. Both come from the table of activities. They only distinguish ranks that do not
    progress.
    """

    user_lines: tuple[Line, ...]
    library_lines: tuple[Line, ...]
    owns_gil: bool | None
    in_lock: bool = False
    at_loader: bool = False

    @classmethod
    def from_dump(cls, dump: ProcessDump, stand: ProcessActivity) -> RoundPlace:
        """Return the place of the thread that decides the activity of the process."""
        stood = cls.from_thread(stand.find_telling(dump))
        at_loader = stand.doing.row.work_is_in == "workers"
        return stood._replace(in_lock=stand.waits_for == "lock", at_loader=at_loader)

    @classmethod
    def from_thread(cls, thread: Thread | None) -> RoundPlace:
        """Return the place of one thread."""
        if thread is None:
            return cls((), (), None)
        cut = thread.installed_frames or 0
        return cls(_lines(thread, cut, None), _lines(thread, 0, cut), thread.owns_gil)


def find_region(places: Sequence[RoundPlace]) -> CodeRegion | None:
    """Return the region of code that a rank did not leave in any round; None if it was in too many places."""
    within = {(tuple(line[:2] for line in stood.user_lines[:1]), stood.user_lines[1:]) for stood in places}
    lines = {(stood.user_lines[:1], stood.library_lines) for stood in places}
    if len(within) > 1 or len(lines) > MOST_PLACES_OF_A_STAY:
        return None
    return CodeRegion(within=stack_frames.digest(within.pop()), places=tuple(sorted(map(stack_frames.digest, lines))))


def _lines(thread: Thread, begin: int, end: int | None) -> tuple[Line, ...]:
    return tuple((*frame.place, frame.line) for frame in stack_frames.python_frames(thread.frames[begin:end]))
