"""Reasons other than a hang for which a job is idle. Measurements show them, not the names of functions. Pure."""

from collections.abc import Sequence
from itertools import chain

from hangwatch.model import BLOCKED_STATES, Group, Grouping, JobState, Member, Motion, Signature
from hangwatch.stacks import activity_table
from hangwatch.stacks import frames as stack_frames

_IDLE_CPU_RATIO = 0.05  # of one core
_FLOOR_RATIO = 0.1  # between the floor and the busy level of its own GPU
_WORKS = frozenset({Signature.TRANSFERS, Signature.COMPUTES})
_STANDS_STILL = frozenset({Signature.BLOCKED, Signature.POLLS})
_WAITS_FOR_CLIENTS = frozenset({Signature.BLOCKED, Signature.POLLS, Signature.AWAITS_OUTSIDE})
_RESTS: dict[JobState | None, str] = {JobState.SUSPENDED: "Suspended", JobState.OVER: "Over"}


def find_idle_kind(grouping: Grouping) -> str | None:
    """Return the kind of verdict on a job that is idle for another reason than a hang; None if it must be judged."""
    if is_serving(grouping):
        return "Serving"
    return _RESTS.get(find_resting_state(grouping)) or ("NoTask" if has_no_task(grouping) else None)


def find_resting_state(grouping: Grouping) -> JobState | None:
    """Return SUSPENDED or OVER if the job is suspended or over; None for a job that must be judged.

    A job is suspended if every rank was stopped or frozen in every round, or if a tracer such as gdb has stopped a
    rank.

    A job of several ranks is over if its ranks have worked together before (see `_have_worked_together`), at most half
    of them progress, and all of this is true for every rank with a process: it uses no connection to another rank, its
    main thread rests or works by itself, and its GPU is idle.

    A job is not over if one of these is true:
    * A rank has no stack, so its wait is unknown.
    * A rank's connection to the store is refused. The rank waits for another rank, which must serve the store.
    * A rank waits for a lock file. The process that holds the lock may be alive, or may have died without removing it.
    * A rank waits for others to join through a file (`init_method="file://..."`), which needs no connection.
    """
    members = grouping.members
    if members and all(member.signature is Signature.STOPPED for member in members):
        return JobState.SUSPENDED
    if any(member.waits.tracer is not None for member in members):
        return JobState.SUSPENDED
    if any(group.fault and not group.gone for group in grouping.groups):
        return None
    doing = [activity_table.find_activity(group.activity) for group in grouping.groups]
    if any(row.held_elsewhere or row.meets_at_store for row in doing):
        return None
    living = ((group, member) for group in grouping.groups for member in group.members if not _is_gone(member))
    is_over = (
        (grouping.world_size or 0) > 1
        and not all(map(_is_gone, members))
        and all(_needs_no_rank(group, member) for group, member in living)
        and sum(member.motion is Motion.MOVING for member in members) * 2 <= len(members)
        and all(map(_is_gone, chain.from_iterable(map(find_refused, grouping.groups))))
        and _have_worked_together(members)
    )
    return JobState.OVER if is_over else None


def _is_gone(member: Member) -> bool:
    return member.signature is Signature.GONE


def _have_worked_together(members: Sequence[Member]) -> bool:
    """True if the ranks of a job have worked together: a rank has ended, or ranks were connected to each other.

    An idle connection, an earlier scan or the collectives in a flight recorder show that ranks were connected. Ranks
    that always worked independently have none of these.
    """
    return any(
        _is_gone(member)
        or member.most_peers
        or member.waits.peers
        or any(library.groups for library in member.recorder.libraries)
        for member in members
    )


def is_serving(grouping: Grouping) -> bool:
    """True if the job is an inference server without requests, not a training job.

    One of these is true:
    * Every rank waits for clients on a listening socket, or receives only from a process that waits for clients.
    * One rank waits for clients. The others also wait for clients, or wait behind their GPUs for that rank.
    * A process of the job waits for clients, and every rank waits for that process, waits at a shared lock, or polls.
    """
    members = grouping.members
    servers = (member for member in members if member.waits.server is not None)
    waits = any(member.waits.server == member.id.pid and _awaits_clients(member) for member in servers)
    behind = waits and all(_awaits_clients(member) or member.signature is Signature.BEHIND_GPU for member in members)
    every = ((group, member) for group in grouping.groups for member in group.members)
    return behind or (
        bool(members) and all(_awaits_clients(member) or _waits_for_turn(group, member) for group, member in every)
    )


def has_no_task(grouping: Grouping) -> bool:
    """True if every rank is an idle worker of Ray: it waits for a task from its driver.

    Then another worker group of the Ray job may be working for any time. The main thread is in the loop that takes
    tasks, and no other thread is in a task. Measured too: it waits, its GPU and CPU are idle, and it uses no connection
    to another rank.
    """
    every = ((group, member) for group in grouping.groups for member in group.members)
    return bool(grouping.members) and all(_rests(member) and _takes_tasks(group) for group, member in every)


def _takes_tasks(group: Group) -> bool:
    if not group.frames or group.activity != activity_table.RPC_WAIT:
        return False
    loop, others = group.frames[0], [frame for stack in group.threads for frame in stack.frames]
    boots = [frame for frame in (loop, *others) if activity_table.has_mark("boot", [frame])]
    libraries = [stack_frames.short_path(frame.file).partition("/")[0] for frame in boots]
    return loop in boots and libraries.count(libraries[0]) == 1


def _rests(member: Member) -> bool:
    works = (member.usage.cpu_ratio or 0.0) > _IDLE_CPU_RATIO or bool(member.waits.active_peers)
    return member.signature in _WAITS_FOR_CLIENTS and _is_idle(member) and not works


def find_refused(group: Group) -> list[Member]:
    """Return the ranks that try to connect to the store at MASTER_ADDR while each attempt fails immediately."""
    if not activity_table.has_mark("at_master", group.frames):
        return []
    return [member for member in group.members if member.waits.store and member.waits.store.socket == "retries"]


def _awaits_clients(member: Member) -> bool:
    is_itself = member.waits.server == member.id.pid
    is_apart = not any(member.recorder.open_operations) if is_itself else member.waits.peers == 0
    return member.waits.server is not None and is_apart and _is_idle(member) and member.signature in _WAITS_FOR_CLIENTS


def _waits_for_turn(group: Group, member: Member) -> bool:
    """True if a rank waits at a lock shared by several ranks, or polls, while a process of its job waits for clients.

    False if the rank has connections to other ranks, or if its GPU or its CPU is in use.
    """
    waits = member.waits
    if waits.job_server is None or waits.peers != 0 or member.most_peers or group.waits_for in ("ranks", "gpu"):
        return False
    works = (member.usage.cpu_ratio or 0.0) > _IDLE_CPU_RATIO or (member.gpu.busy_power_ratio or 0.0) > _FLOOR_RATIO
    at_turn = member.signature is Signature.POLLS or (member.signature is Signature.BLOCKED and waits.shares_lock)
    return at_turn and _is_idle(member) and not works


def _is_idle(member: Member) -> bool:
    return member.gpu.utilization_ratio is None or member.gpu.is_idle


def _needs_no_rank(group: Group, member: Member) -> bool:
    """True if a rank works or rests and needs no other rank for it.

    A rank rests if its main thread sleeps, joins a thread, or waits in the shutdown of the interpreter. False for a
    rank in state `D`, because other ranks may be waiting for it.
    """
    has_lock = member.waits.shares_lock or member.waits.file_lock is not None  # the lock may be another rank's
    waits = has_lock or member.kernel.state in BLOCKED_STATES or member.waiting is not None
    if waits or not _is_idle(member) or not _is_unconnected(member):
        return False
    if member.signature in _WORKS:
        return True
    main = next((stack.frames for stack in group.threads if group.awaited and stack.name == "MainThread"), group.frames)
    joins = group.activity == activity_table.EXITING or activity_table.has_mark("joins", main)
    rests = member.kernel.rests == "sleep" or (member.kernel.rests == "thread" and joins)
    return rests and member.signature in _STANDS_STILL


def _is_unconnected(member: Member) -> bool:
    """True if a rank uses no connection to another rank.

    An idle connection is not in use: DDP leaves some when its process group is destroyed. Exceptions: idle connections
    do count if an operation is open, or if the rank polls and has no flight recorder that shows its operations.
    """
    waits = member.waits
    if waits.peers == 0:
        return True
    is_known = bool(member.recorder.libraries) or member.signature is not Signature.POLLS
    is_open = any(member.recorder.open_operations)
    return waits.peers is not None and waits.active_peers == 0 and is_known and not is_open
