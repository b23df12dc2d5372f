"""The source lines at which named ranks are, and their working directories, for readers of the incident."""

import time
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from hangwatch import words
from hangwatch.model import Evidence, Frame, Group
from hangwatch.probes.base import procfs, pseudo_files
from hangwatch.probes.process import source_line
from hangwatch.stacks.user_code import innermost_user_frame, split_groups_by_line
from hangwatch.tables import secret_forms
from hangwatch.verdict.diagnosis import Diagnosis

_MOST_GROUPS = 4  # with source lines
_MOST_SECONDS = 4.0  # for source lines


def read(groups: Sequence[Group], uid: int | None) -> dict[Frame, str]:
    """Return the source line of the innermost frame of the program in each group, and in its awaited workers.

    `uid` is that of the job as the scan saw it; None if it has several, or other ids than the node.
    """
    lines: dict[Frame, str] = {}
    end = time.monotonic() + _MOST_SECONDS
    for pid, frame in _find_frames(groups[:_MOST_GROUPS]):
        if frame not in lines and time.monotonic() < end and (line := source_line.read(pid, frame, uid)):
            lines[frame] = line
    return lines


def add_evidence(look: Diagnosis) -> Diagnosis:
    """Return the diagnosis with the source lines and the working directory of named ranks as evidence.

    Metrics and pages do not show evidence. Without a single owner of the job, nothing is read.
    """
    named = look.verdict.named
    if look.uid is None or not named:
        return look
    parts = split_groups_by_line(look.grouping).groups
    groups = [group for group in parts if any(member.id in named for member in group.members)]
    texts = [f"{frame}: {secret_forms.mask(line)}" for frame, line in read(groups, look.uid).items()]
    directory = pseudo_files.read_link(procfs.PROC / str(named[0].pid) / "cwd")
    texts += [f"the working directory of {words.name_ranks(named[:1])} is {directory}"] if directory else []
    sources = (Evidence(kind="source", message=words.printable(text), ranks=named) for text in texts)
    return replace(look, verdict=replace(look.verdict, evidence=(*look.verdict.evidence, *sources)))


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
