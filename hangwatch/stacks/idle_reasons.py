"""Pure: does a job stand still for a reason that is no hang? By measurement, whatever its functions are called."""

from __future__ import annotations

from hangwatch.model import BLOCKED_STATES, Group, Grouping, JobState, Member, Motion, Signature
from hangwatch.stacks import activity

_IDLE_UTILIZATION_RATIO = 0.05
_WAITS_FOR_NO_RANK = frozenset(
    {Signature.BLOCKED, Signature.POLLS, Signature.AWAITS_OUTSIDE, Signature.TRANSFERS, Signature.COMPUTES}
)
_WAITS_FOR_CLIENTS = frozenset({Signature.BLOCKED, Signature.POLLS, Signature.AWAITS_OUTSIDE})


def resting_state(grouping: Grouping) -> JobState | None:
    """The state of a job that is suspended or over; None for one that is judged as others are.

    Suspended: every rank was stopped or frozen in every round. Over: a job of several ranks in which nothing leads from
    one that lives to another one, all GPUs idle; so it is before training begins, which the grouping cannot tell. Of a
    rank that gave no stack nobody knows what it waits for; who is refused at the store waits for who is to serve it,
    and who waits for a lock file for the process that holds it, or has died and left it. Who waits for the others to
    join waits for them without any connection where the store is a file (`init_method="file://..."`).
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
    doing = [activity.known(group.activity) for group in grouping.groups]
    if any(one.held_elsewhere or one.meets_at_store for one in doing):
        return None
    if living and (grouping.world_size or 0) > 1 and moving * 2 <= len(members) and all(map(_is_alone, living)):
        return JobState.OVER
    return None


def is_serving(grouping: Grouping) -> bool:
    """Whether this is a service without requests, and not a job that trains.

    Every rank waits for clients on a socket that listens, or receives from nobody but a process that does; or the ranks
    stand behind their GPUs for one that itself waits for clients.
    """
    members = grouping.members
    waits = any(_awaits_clients(member) and member.waits.server == member.id.pid for member in members)
    behind = waits and all(_awaits_clients(one) or one.signature is Signature.BEHIND_GPU for one in members)
    return behind or (bool(members) and all(map(_awaits_clients, members)))


def is_refused(group: Group, member: Member) -> bool:
    """Whether a rank wants to meet the others at MASTER_ADDR, and each attempt to connect there fails at once."""
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
    """Nothing leads from it to another rank, and it does what needs none. In `D` it may be what others wait for."""
    has_lock = member.waits.shares_lock or member.waits.file_lock is not None  # that may be another rank's
    waits = has_lock or member.kernel.state in BLOCKED_STATES or member.signature not in _WAITS_FOR_NO_RANK
    return member.waits.peers == 0 and _is_idle(member) and not waits and member.waiting is None
