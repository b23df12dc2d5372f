"""The wait-for graph of a job: the ranks that wait in each operation, and the ranks for which they wait. Pure.

The graph states facts. `verdict.sequence_rules` decides what follows from them, and docs/verdicts.md explains the
rules. Only operations that are open in the first and in the last round of a capture count. A single reading of a
healthy job shows its ranks at different moments.

An open record does not prove a wait: an asynchronous operation is open while its rank computes. A rank without an open
record may wait, too: gloo does not record send, recv, monitored_barrier, new_group and waits for the store. So the
graph also contains the `Stance` of each awaited rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from hangwatch.collectives.cycles import strongly_connected
from hangwatch.collectives.mismatches import Sides, find_other_operation, find_other_order
from hangwatch.collectives.process_groups import DEFAULT_GROUP, ProcessGroup, find_groups
from hangwatch.model import STOPPED_STATES, Member
from hangwatch.model.flight_records import Library

Stance = Literal["elsewhere", "held", "waits", "unclear"]
"""The wait of a rank, as its stack and the kernel show it. It is also a label of a metric.

"waits": the rank waits for other ranks. "held": it waits for a lock, a file or a timer, and no known rank can end that
wait. "elsewhere": it waits for none of these. "unclear": none of these is certain.
"""

_MOST_NUMBERS = 8  # pending operations of one group


class PendingOperation(NamedTuple):
    """An operation of a process group in which ranks wait for other ranks.

    `members` are the known ranks of the group; all its ranks if `is_whole`. The ranks in `waiting` have had the
    operation open for at least `seconds`. The ranks in `missing` have not joined. The ranks in `unknown` may or may not
    have joined.
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


class WaitGraph(NamedTuple):
    """The facts that follow from the flight recorders of all ranks. Without pending operations nothing follows.

    Ranks in `waiting` wait in an operation. Ranks in `awaited` have not joined an operation; each comes with its
    stance. Ranks in `busy` are awaited, but have an open operation themselves. Ranks in `joined` are known to have
    joined all operations in which others wait. Ranks in `cycle` wait for each other. `is_complete` is true if all
    members of all pending groups are known and have joined. `is_partial` is true if the flight recorder of a rank was
    not read.
    """

    pending: tuple[PendingOperation, ...] = ()
    waiting: frozenset[int] = frozenset()
    awaited: Mapping[int, Stance] = MappingProxyType({})
    busy: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()
    cycle: tuple[int, ...] = ()
    mismatch: Sides = ()
    is_complete: bool = False
    is_partial: bool = False

    @property
    def have_communicated(self) -> bool:
        """True if the ranks have communicated before: no pending operation is the first of its group."""
        return bool(self.pending) and all(one.number > 1 for one in self.pending)


def build(members: Iterable[Member], stance: Callable[[Member], Stance], world_size: int | None = None) -> WaitGraph:
    """Return the wait-for graph of these ranks. `world_size` is the number of ranks of the job, None if unknown.

    The graph is empty if two members have the same rank number. Members without a rank number are ignored.
    """
    members = list(members)
    if not any(member.recorder.libraries for member in members):
        return WaitGraph()
    by_rank = _key_by_rank(members)
    groups = find_groups(by_rank, world_size)
    if not groups:
        return WaitGraph()
    pending = tuple(operation for group in groups for operation in _make_pending_operations(group))
    awaited = {rank for operation in pending for rank in operation.missing}
    unknown = frozenset[int]().union(*(group.unknown for group in groups))
    waiting = frozenset(rank for group in groups for rank in group.waits)
    is_complete = not awaited and not unknown and all(group.is_whole for group in groups)
    return WaitGraph(
        pending=pending,
        waiting=waiting,
        awaited={rank: stance(by_rank[rank]) for rank in sorted(awaited)},
        busy=frozenset(rank for rank in awaited if is_busy(by_rank[rank])),
        joined=frozenset(rank for group in groups for rank in _find_joined(group)) - awaited - unknown,
        cycle=_find_cycle(groups, waiting & awaited),
        is_complete=is_complete,
        is_partial=_is_partial(by_rank, groups, world_size),
        mismatch=find_other_operation(groups) or (find_other_order(groups) if is_complete else ()),
    )


def is_busy(member: Member) -> bool:
    """True if the rank has an open operation that other ranks may have to join. False if it is stopped or frozen."""
    is_stopped = member.kernel.state in STOPPED_STATES or member.waits.frozen_cgroup is not None
    return _has_open(member) and not is_stopped


def _has_open(member: Member) -> bool:
    """True if the rank has an operation for which its main thread may wait.

    Such an operation stays open, or has lost its record. The main thread may also wait for an operation of another
    thread, unless it is in a system call that no thread of its process can end.
    """
    return any(
        records.has_lost_open
        or any(one.stays_open and (one.by_main or not member.kernel.is_held_outside) for one in records.operations)
        for recorder in member.recorder.libraries
        for records in recorder.groups
    )


def _key_by_rank(members: Iterable[Member]) -> dict[int, Member]:
    """Return the members, keyed by rank. {} if two members have the same rank, because the job then has two worlds."""
    numbered = [(member.id.rank, member) for member in members if member.id.rank is not None]
    by_rank = dict(numbered)
    return by_rank if len(by_rank) == len(numbered) else {}


def _find_joined(group: ProcessGroup) -> set[int]:
    """Return the members of a group with a known newest collective. A rank that waits alone is left out.

    Other ranks may not wait for the operation of a rank that waits alone.
    """
    return group.newest.keys() - (group.waits.keys() if len(group.waits) == 1 else set())


def _is_partial(by_rank: Mapping[int, Member], groups: Iterable[ProcessGroup], world_size: int | None) -> bool:
    """True if the flight recorder of a rank of the job, or of a member of these groups, was not read."""
    read = {rank for rank, member in by_rank.items() if member.recorder.libraries}
    return len(read) < max(len(by_rank), world_size or 0) or any(not read.issuperset(group.members) for group in groups)


def _make_pending_operations(group: ProcessGroup) -> Iterator[PendingOperation]:
    """Yield a pending operation for each number at which ranks wait.

    Of many numbers, yield the seven lowest and the highest.
    """
    by_number: dict[int, list[int]] = defaultdict(list)
    for rank, wait in group.waits.items():
        by_number[wait.number].append(rank)
    numbers = sorted(by_number)
    for number in (*numbers[: _MOST_NUMBERS - 1], *numbers[_MOST_NUMBERS - 1 :][-1:]):
        waiting = sorted(by_number[number])
        waits = [group.waits[rank] for rank in waiting]
        yield PendingOperation(
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


def _find_cycle(groups: Sequence[ProcessGroup], ranks: frozenset[int]) -> tuple[int, ...]:
    """Return the ranks that wait for each other; () if there are none.

    Only `ranks` can be in a cycle: those that wait and are awaited. Of several cycles, return the one with the lowest
    rank. A rank waits for all members of a group that have a lower number. The members are sorted by number. Each
    position in that order is a node of the graph, with an edge to the position before it. So the size of the graph
    stays linear.
    """
    edges: dict[_Node, list[_Node]] = defaultdict(list)
    for index, group in enumerate(groups):
        members = (rank for rank in group.newest if rank in ranks)
        ordered = sorted(members, key=lambda rank: (group.newest[rank], rank))
        for place, rank in enumerate(ordered):
            edges[index, place] += [(_RANK, rank), *([(index, place - 1)] if place else [])]
        numbers = [group.newest[rank] for rank in ordered]
        for rank in sorted(ordered):
            behind = bisect_left(numbers, group.waits[rank].number) if rank in group.waits else 0
            if behind:
                edges[_RANK, rank].append((index, behind - 1))
    components = (sorted(rank for kind, rank in part if kind == _RANK) for part in strongly_connected(edges))
    return min((tuple(ranks) for ranks in components if len(ranks) > 1), default=())


_Node = tuple[int, int]
_RANK = -1
