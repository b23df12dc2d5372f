"""Pure: find out if a job is idle for a reason other than a hang, by measurement. Names of functions do not decide."""

from __future__ import annotations

from hangwatch.model import BLOCKED_STATES, Group, Grouping, JobState, Member, Motion, Signature
from hangwatch.stacks import activity

_IDLE_UTILIZATION_RATIO = 0.05
_WAITS_FOR_NO_RANK = frozenset(
    {Signature.BLOCKED, Signature.POLLS, Signature.AWAITS_OUTSIDE, Signature.TRANSFERS, Signature.COMPUTES}
)
_WAITS_FOR_CLIENTS = frozenset({Signature.BLOCKED, Signature.POLLS, Signature.AWAITS_OUTSIDE})


def find_resting_state(grouping: Grouping) -> JobState | None:
    """Return the state of a job that is suspended or over; None for a job that must be judged.

    Suspended: every rank was stopped or frozen in every round. Over: a job of several ranks in which no live rank has a
    connection to another rank, and all GPUs are idle. A job looks the same before training begins; the grouping cannot
    tell the two apart.

    A job is not over if one of these is true:
    * A rank gave no stack: it is not known what it waits for.
    * A rank's connection to the store is refused: it waits for the rank that serves the store.
    * A rank waits for a lock file: its holder may be alive, or may have died without removing it.
    * A rank waits for others to join through a file (`init_method="file://..."`), which needs no connection.
    """
    members = grouping.members
    if members and all(member.signature is Signature.STOPPED for member in members):
        return JobState.SUSPENDED
    moving = sum(member.motion is Motion.MOVING for member in members)
    living = [member for member in members if member.signature is not Signature.GONE]
    if any(group.fault and not group.gone for group in grouping.groups):
        return None
    if any(is_refused(group, member) for group in grouping.groups for member in group.members):
        return None
    doing = [activity.find_activity(group.activity) for group in grouping.groups]
    if any(one.held_elsewhere or one.meets_at_store for one in doing):
        return None
    if living and (grouping.world_size or 0) > 1 and moving * 2 <= len(members) and all(map(_is_alone, living)):
        return JobState.OVER
    return None


def is_serving(grouping: Grouping) -> bool:
    """True if this is a service without requests, not a job that trains.

    Every rank waits for clients on a listening socket, or receives only from a process that does. Or the ranks wait
    behind their GPUs for a rank that itself waits for clients.
    """
    members = grouping.members
    waits = any(_awaits_clients(member) and member.waits.server == member.id.pid for member in members)
    behind = waits and all(_awaits_clients(one) or one.signature is Signature.BEHIND_GPU for one in members)
    return behind or (bool(members) and all(map(_awaits_clients, members)))


def is_refused(group: Group, member: Member) -> bool:
    """True if a rank tries to join the others at MASTER_ADDR, and each attempt to connect fails at once."""
    if member.waits.store is None or member.waits.store.socket != "retries":
        return False
    return any(activity.is_marked("at_master", frame.function, frame.file) for frame in group.frames)


def _awaits_clients(member: Member) -> bool:
    is_itself = member.waits.server == member.id.pid
    waits = member.waits.server is not None and (is_itself or member.waits.peers == 0)
    return waits and _is_idle(member) and member.signature in _WAITS_FOR_CLIENTS


def _is_idle(member: Member) -> bool:
    return member.gpu.utilization_ratio is None or member.gpu.utilization_ratio < _IDLE_UTILIZATION_RATIO


def _is_alone(member: Member) -> bool:
    """True if a rank has no connection to another rank and does something that needs no other rank.

    A rank in `D` does not count: the others may be waiting for it.
    """
    has_lock = member.waits.shares_lock or member.waits.file_lock is not None  # the lock may be another rank's
    waits = has_lock or member.kernel.state in BLOCKED_STATES or member.signature not in _WAITS_FOR_NO_RANK
    return member.waits.peers == 0 and _is_idle(member) and not waits and member.waiting is None
