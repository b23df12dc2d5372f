"""Pure: what would settle if a rank to be checked first is the cause."""

from __future__ import annotations

from collections.abc import Sequence

from hangwatch.model import Member
from hangwatch.stacks import activity
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.wording import clauses

SEQUENCE_NUMBERS = "sequence numbers (flight recorder, NCCL RAS): who is a call behind, or took another branch or group"
NUMBERS_BELOW = (
    "which call comes next on each side (a branch, a step or a group differs); the sequence numbers in the evidence "
    "say who has come to which collective"
)
DIED = "whether the others wait for it: a job that goes on without a rank stands still at the next thing they share"
HUNG_TASK = "`dmesg -T | grep -A20 'blocked for more'`: where in the kernel it stands; `hangwatch check storage`"
BEHIND_CALL = "look at what is behind the call in which it stands, by the evidence: a file, a peer, a process, a lock"
ORDERS = "what it was told last: it has not joined, so no sequence number shows it"
LOOP = (
    "what was to come to that loop, or to end it (a service without requests is idle): it has not joined, so no "
    "sequence number shows it"
)
THREAD = "what that thread does, which may wait for another rank itself"
LOCK = "whether it can go on without them: a collective inside of a lock that each rank takes never ends"
SLOW_CALL = "whether that call returns: its file system or service, state D and wchan of these ranks"


def numbers(finding: Finding) -> str:
    """Return the hint on sequence numbers, which are in the evidence or still to be taken."""
    return NUMBERS_BELOW if finding.scene.has_numbers else SEQUENCE_NUMBERS


def look_at(finding: Finding) -> str:
    """Return the thing to look at for the activity of the suspects."""
    said = activity.find_activity(finding.suspects[0].activity).look_at
    return f"{said[:1].lower()}{said[1:]}".rstrip(".") if said else SLOW_CALL


def native_frames(finding: Finding) -> str:
    """Return the command that shows a call below Python."""
    return _native_frames(finding.members)


def _native_frames(members: Sequence[Member]) -> str:
    pids = [member.id.pid for member in members if member.id.pid is not None]
    return f"`hangwatch dump --native{f' --pid {pids[0]}' if pids else ''}` shows the call in which it stands"


def find_blocking_call(finding: Finding) -> str:
    """Return the command for native frames, unless the kernel already shows what blocks the call."""
    untold = [member for member in finding.members if not clauses.tells_what_holds(member)]
    return _native_frames(untold) if untold else BEHIND_CALL


def whether_it_waits(finding: Finding) -> str:
    """Return what shows if ranks still wait for a worker process that they have lost."""
    is_told = all(map(clauses.tells_call, finding.members))
    shown = "the call in which it stands" if is_told else "`hangwatch dump --native`"
    return f"whether it still waits for that worker: {shown}, and its log"
