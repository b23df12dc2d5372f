"""The checks that decide if a rank to check first is the cause. Pure."""

from collections.abc import Sequence

from hangwatch.model import Member
from hangwatch.stacks import activity_table
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.wording import clauses, stuck_on

SEQUENCE_NUMBERS = (
    "compare sequence numbers (flight recorder, NCCL RAS): which rank is a call behind, or in another branch or group?"
)
NUMBERS_BELOW = (
    "find the next call of each side (a branch, a step or a group differs); the sequence numbers in the evidence show "
    "which rank has joined which collective"
)
BEHIND_CALL = "check the file, peer, process or lock of its call (see the evidence)"
SECOND_DUMP = "take a second dump 10 s later and give both: they show if it moves"
SLOW_CALL = "check if that call returns: its file system or service, and state (D is blocked) and wchan of the rank"


def numbers(finding: Finding) -> str:
    """Return the hint to compare sequence numbers. The text depends on whether the evidence already contains them."""
    return NUMBERS_BELOW if finding.scene.has_numbers else SEQUENCE_NUMBERS


def look_at(finding: Finding) -> str:
    """Return the check that the table of activities gives for the activity of the suspects."""
    said = activity_table.find_activity(finding.suspects[0].activity).look_at
    return f"{said[:1].lower()}{said[1:]}".rstrip(".") if said else SLOW_CALL


def native_frames(members: Sequence[Member]) -> str:
    """Return the command that shows the native frames (below Python) of the first of these ranks."""
    pids = [member.id.pid for member in members if member.id.pid is not None]
    command = f"`hangwatch dump --native{f' --pid {pids[0]}' if pids else ''}`"
    if all(member.is_measured for member in members):
        return f"{command} shows its call below Python"
    again = f"{SECOND_DUMP}; " if all(member.rounds == 1 for member in members) else ""
    return f"{again}if it still runs, {command} on its host shows its call below Python"


def find_blocking_call(finding: Finding) -> str:
    """Return the step to find why the suspects sleep or block, or the command that shows native frames if unknown."""
    if finding.suspects[0].frames and clauses.describe_sleep(finding.suspects[0]):
        return stuck_on.look_at_line(finding.suspects[0], finding.members[0])
    untold = [member for member in finding.members if not any(call.has_object for call in member.kernel.calls)]
    return native_frames(untold) if untold else stuck_on.look_at(finding.members[0]) or BEHIND_CALL


def whether_it_waits(finding: Finding) -> str:
    """Return the check that shows if a rank still waits for the worker process that it has lost."""
    is_told = all(member.kernel.tells_object for member in finding.members)
    shown = "its call in the evidence" if is_told else "`hangwatch dump --native`"
    return f"check if it still waits for that worker: {shown}, and its log"
