"""The source lines of the frames that `hangwatch dump` shows first. They are printed and never stored."""

import time
from collections.abc import Iterator, Sequence

from hangwatch.model import Frame, Group, Grouping, Verdict
from hangwatch.probes.process import source_line
from hangwatch.report import phrases
from hangwatch.stacks.user_code import innermost_user_frame, split_groups_by_line

_MOST_GROUPS = 4
_MOST_SECONDS = 4.0


def read_source_lines(grouping: Grouping, verdict: Verdict, uid: int | None) -> dict[Frame, str]:
    """Return the source line of the innermost frame of the program, for the groups of suspects or for an only group.

    For a suspect that waits for a worker or thread, also the line of that worker or thread. `uid` is that of the job as
    the scan saw it; None if it has several, or other ids than the node.
    """
    parts = split_groups_by_line(grouping).groups
    odd = phrases.odd_groups(parts, verdict)
    shown = [group for group in parts if group.key in odd] or parts[: len(parts) == 1]
    lines: dict[Frame, str] = {}
    end = time.monotonic() + _MOST_SECONDS
    for pid, frame in _find_frames(shown[:_MOST_GROUPS]):
        if frame not in lines and time.monotonic() < end and (text := source_line.read(pid, frame, uid)):
            lines[frame] = text
    return lines


def _find_frames(groups: Sequence[Group]) -> Iterator[tuple[int, Frame]]:
    for group in groups:
        pid = group.members[0].id.pid
        if pid is None:
            continue
        if (frame := innermost_user_frame(group)) is not None:
            yield pid, frame
        for stack in (*group.workers, *group.threads):
            if stack.user_frame is not None:
                yield stack.pid or pid, stack.user_frame
