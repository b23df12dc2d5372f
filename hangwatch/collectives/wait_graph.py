"""The wait-for graph of a job: the ranks that wait in each operation, and the ranks for which they wait. Pure.

The graph states facts. `verdict.sequence_rules` decides what follows from them, and docs/verdicts.md explains the
rules. Only operations that are open in the first and in the last round of a capture count. A single reading of a
healthy job shows its ranks at different moments.

An open record does not prove a wait: an asynchronous operation is open while its rank computes. A rank without an open
record may wait, too: gloo does not record send, recv, monitored_barrier, new_group and waits for the store. So the
graph also contains the `Stance` of each awaited rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from hangwatch.collectives.fronts import Front, find_ends, show_numbers
from hangwatch.collectives.mismatches import Sides, find_other_operation, find_other_order
from hangwatch.collectives.process_groups import DEFAULT_GROUP, ProcessGroup, find_groups, is_send, process_key
from hangwatch.model import Member, list_by_key
from hangwatch.model.flight_records import Library

Stance = Literal["elsewhere", "held", "waits", "unclear"]
"""The wait of a rank, as its stack and the kernel show it. It is also a label of a metric.

"waits": the rank waits for other ranks. "held": it waits for a lock, a file or a timer, and no known rank can end that
wait. "elsewhere": it waits for none of these. "unclear": none of these is certain.
"""


class PendingOperation(NamedTuple):
    """An operation of a process group in which ranks wait for other ranks.

    `members` are the known ranks of the group; all its ranks if `is_whole`. The ranks in `waiting` have had the
    operation open for at least `seconds`. The ranks in `missing` have not joined. The ranks in `unknown` may or may not
    have joined. A send or recv has number 0, because each rank counts its own.
    """

    library: Library
    name: str
    description: str
    number: int
    operation: str
    seconds: float
    timeout_seconds: float | None
    members: tuple[int, ...]
    is_whole: bool
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    unknown: tuple[int, ...]

    @property
    def is_default(self) -> bool:
        """True if this is an operation of the default group, which contains all ranks."""
        return (self.name, self.description) == DEFAULT_GROUP


class GpuEnd(NamedTuple):
    """A rank that has not completed `operation`, which all ranks in `others` have: its GPU is behind.

    They have completed `behind` operations more. If `behind` is 0, they have only started it, and the rank has not.
    """

    rank: int
    operation: PendingOperation
    others: tuple[int, ...]
    behind: int


class WaitGraph(NamedTuple):
    """The facts that follow from the flight recorders of all ranks. Without pending operations nothing follows.

    Ranks in `waiting` wait in an operation. Ranks in `awaited` have not joined an operation; each comes with its
    stance. Ranks in `busy` are awaited, but have an open operation themselves. Ranks in `joined` are known to have
    joined all operations in which others wait. Ranks in `cycle` wait for each other, those in `lone` each in operations
    without another rank of the cycle. `is_complete` is true if all members of all pending groups are known and have
    joined. `is_partial` is true if the flight recorder of a rank of the job, or of a member of these groups, was not
    read.

    The waits end at ranks that wait for no rank: `programs` have not enqueued an operation in which others wait, `gpus`
    have not completed one, and for ranks in `unrecorded` others wait without knowing more. `is_settled` is true if all
    waits lead to these ends or to a cycle, and the records of all ranks may be of one moment. `threads` has the name of
    the thread that uses the groups in which others wait for a rank, unless a thread with an open operation does.
    """

    pending: tuple[PendingOperation, ...] = ()
    waiting: frozenset[int] = frozenset()
    awaited: Mapping[int, Stance] = MappingProxyType({})
    busy: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()
    cycle: tuple[int, ...] = ()
    lone: frozenset[int] = frozenset()
    programs: tuple[int, ...] = ()
    gpus: tuple[GpuEnd, ...] = ()
    unrecorded: tuple[int, ...] = ()
    is_settled: bool = True
    mismatches: tuple[Sides, ...] = ()
    is_complete: bool = False
    is_partial: bool = False
    threads: Mapping[int, str] = MappingProxyType({})

    @property
    def have_communicated(self) -> bool:
        """True if the ranks have communicated before: no pending operation is the first of its group."""
        return bool(self.pending) and all(one.number > 1 for one in self.pending)


def build(
    members: Iterable[Member], stance: Callable[[Member, str], Stance], world_size: int | None = None
) -> WaitGraph:
    """Return the wait-for graph of these processes. `world_size` is the number of ranks of the job, None if unknown.

    `stance` gets a process and the name of the thread that counts, "" for the main thread.

    A process is keyed as by `process_key`. The graph is empty if two processes have the same key.
    """
    members = list(members)
    if not any(member.recorder.libraries for member in members):
        return WaitGraph()
    # No member has a key if two members have the same key, because the job then has two worlds.
    keyed = [(key, member) for member in members if (key := process_key(member.id)) is not None]
    by_key = dict(keyed)
    by_rank = by_key if len(by_key) == len(keyed) else {}
    groups = find_groups(by_rank, world_size) if by_rank else []
    numbered = tuple(operation for group in groups for operation in _make_pending_operations(group))
    transfers = tuple(transfer for group in groups for transfer in _make_pending_transfers(group))
    if not (pending := numbered or transfers):
        return WaitGraph()
    recorded = {rank for rank, member in by_rank.items() if member.recorder.libraries}
    busy = frozenset(rank for rank in recorded if is_busy(by_rank[rank]))
    stopped = {rank for rank in recorded if by_rank[rank].is_stopped}
    ends = find_ends(groups, recorded, busy, stopped, are_all=len(recorded) == world_size)
    awaited = {rank for operation in pending for rank in operation.missing}
    only_in_transfers = {*ends.programs} - awaited
    pending += tuple(transfer for transfer in transfers if only_in_transfers.intersection(transfer.missing))
    awaited = {rank for operation in pending for rank in operation.missing}
    threads = {rank: name for rank, name in _find_threads(groups, by_rank) if rank in awaited}
    unknown = frozenset[int]().union(*(group.unknown for group in groups))
    is_complete = bool(numbered) and not awaited and not unknown and all(group.is_whole for group in groups)
    mismatches = tuple(sides for group in groups if (sides := find_other_operation(group)))
    order = find_other_order(groups) if is_complete and not mismatches else ()
    return WaitGraph(
        pending=pending,
        waiting=frozenset(rank for group in groups for rank in (group.waits if numbered else group.transfers)),
        awaited={rank: stance(by_rank[rank], threads.get(rank, "")) for rank in sorted(awaited)},
        busy=busy & (awaited - threads.keys()),
        joined=frozenset(rank for group in groups if numbered for rank in _find_joined(group)) - awaited - unknown,
        cycle=ends.cycle,
        lone=ends.lone,
        programs=ends.programs,
        gpus=tuple(sorted(_make_gpu_ends(ends.gpus))),
        unrecorded=ends.unrecorded,
        is_settled=ends.are_all and all(group.may_be_of_one_moment for group in groups),
        is_complete=is_complete,
        is_partial=len(recorded) < max(len(by_rank), world_size or 0)
        or any(not recorded.issuperset(group.members) for group in groups),
        mismatches=mismatches or ((order,) if order else ()),
        threads=threads,
    )


def _find_threads(groups: Sequence[ProcessGroup], by_rank: Mapping[int, Member]) -> Iterator[tuple[int, str]]:
    """Yield each rank with one thread that uses all groups in which others wait for the rank, and this thread's name.

    Ranks with an open operation of a thread are left out, because others may have to join that operation.
    """
    highest = [(group, max((wait.number for wait in group.waits.values()), default=0)) for group in groups]
    users = list_by_key(
        (rank, group.records[rank].thread if rank in group.records else "")
        for group, number in highest
        for rank, newest in group.newest.items()
        if newest < number
    )
    for rank, names in users.items():
        if set(names) == {names[0]} != {""} and all(one.by_main for one in by_rank[rank].recorder.open_operations):
            yield rank, names[0]


def is_busy(member: Member) -> bool:
    """True if the rank has an open operation that other ranks may have to join. False if it is stopped or frozen.

    Its main thread may wait for such an operation, which stays open, or has lost its record. It may also wait for an
    operation of another thread, unless it is in a system call that no thread of its process can end.
    """
    return not member.is_stopped and any(
        records.has_lost_open
        or any(one.stays_open and (one.by_main or not member.kernel.is_held_outside) for one in records.operations)
        for recorder in member.recorder.libraries
        for records in recorder.groups
    )


def _find_joined(group: ProcessGroup) -> set[int]:
    """Return the members with a known newest collective, except one that waits alone: others may not join that."""
    return group.newest.keys() - (group.waits.keys() if len(group.waits) == 1 else set())


def _make_pending_operations(group: ProcessGroup) -> Iterator[PendingOperation]:
    """Yield a pending operation for each number at which ranks wait. Of many numbers, yield a few."""
    by_number = list_by_key((wait.number, rank) for rank, wait in group.waits.items())
    for number in show_numbers(by_number):
        yield _make_pending(group, number, sorted(by_number[number]))


def _make_pending(group: ProcessGroup, number: int, waiting: Sequence[int]) -> PendingOperation:
    waits = [group.waits[rank] for rank in waiting]
    return PendingOperation(
        library=group.library,
        name=group.name,
        description=group.records[waiting[0]].description,
        number=number,
        operation=waits[0].operation,
        seconds=min(wait.open_seconds for wait in waits),
        timeout_seconds=waits[0].timeout_seconds,
        members=group.members,
        is_whole=group.is_whole,
        waiting=tuple(waiting),
        missing=tuple(rank for rank in group.members if group.newest.get(rank, number) < number),
        unknown=tuple(sorted(group.unknown)),
    )


def _make_pending_transfers(group: ProcessGroup) -> Iterator[PendingOperation]:
    """Yield each open send and recv. The rank at its other end is missing, unless the other half is open there."""
    halves = {(rank, end.peer, is_send(end.operation)) for rank, ends in group.transfers.items() for end in ends}
    for rank, pair in sorted(group.transfers.items()):
        for operation, peer in pair:
            is_alone = (peer, rank, not is_send(operation)) not in halves
            if peer is not None and peer != rank:
                yield PendingOperation(
                    library=group.library,
                    name=group.name,
                    description=group.records[rank].description,
                    number=0,
                    operation=operation.operation.partition(" ")[0],
                    seconds=operation.open_seconds,
                    timeout_seconds=operation.timeout_seconds,
                    members=tuple(sorted((rank, peer))),
                    is_whole=True,
                    waiting=(rank,),
                    missing=(peer,) if is_alone and peer in group.records else (),
                    unknown=(peer,) if is_alone and peer not in group.records else (),
                )


def _make_gpu_ends(gpus: Iterable[tuple[int, Front]]) -> Iterator[GpuEnd]:
    """Yield the ends. All ranks that are behind in one operation share it, so that the time grows linearly."""
    fronts = list_by_key(((front.place, front.operation.number), (rank, front.group)) for rank, front in gpus)
    for (_, number), each in fronts.items():
        group, ranks = each[0][1], [rank for rank, _ in each]
        behind = max(0, group.highest_completed + 1 - number)
        completed = [other for other in group.members if group.completed.get(other, -1) >= number]
        started = [other for other, wait in group.waits.items() if wait.number == number and wait.is_started]
        pending, others = _make_pending(group, number, ranks), tuple(completed if behind else sorted(started))
        yield from (GpuEnd(rank, pending, others, behind) for rank in ranks)
