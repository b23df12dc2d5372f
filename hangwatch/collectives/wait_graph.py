"""Pure: the wait-for graph of a job: the ranks that wait in each operation, and the ranks that they wait for.

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
    """An operation of a group in which ranks wait for others.

    `members` are the known ranks of the group; all its ranks if `is_whole`. The ranks in `waiting` have had the
    operation open for at least `seconds`. The ranks in `missing` have not joined. It is not known if the ranks in
    `unknown` have joined.
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
        """True if its group is the default group, which contains all ranks."""
        return (self.name, self.description) == DEFAULT_GROUP


class WaitGraph(NamedTuple):
    """The facts that the records of all ranks show. Without pending operations they show nothing.

    `waiting` ranks wait in an operation. `awaited` ranks have not joined an operation; each has its stance, in the
    order of ranks. `busy` are the awaited ranks that have an open operation themselves. `joined` ranks are known to
    have joined all operations in which others wait. `cycle` are ranks that wait for each other. `is_complete`: all
    members of all pending groups are known and have joined. `is_partial`: the records of a rank of the job were not
    read.
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
        """True if no pending operation is the first of its group: the ranks have communicated before."""
        return bool(self.pending) and all(one.number > 1 for one in self.pending)


def build(members: Iterable[Member], stance: Callable[[Member], Stance], world_size: int | None = None) -> WaitGraph:
    """Return the wait-for graph of these ranks. `world_size` is the number of ranks of the job, None if unknown.

    The graph is empty if two ranks have the same number. Members without a rank number are ignored.
    """
    by_rank = _by_rank(members)
    groups = find_groups(by_rank, world_size)
    if not groups:
        return WaitGraph()
    pending = tuple(operation for group in groups for operation in _pending(group))
    awaited = {rank for operation in pending for rank in operation.missing}
    unknown = frozenset[int]().union(*(group.unknown for group in groups))
    is_complete = not awaited and not unknown and all(group.is_whole for group in groups)
    return WaitGraph(
        pending=pending,
        waiting=frozenset(rank for group in groups for rank in group.waits),
        awaited={rank: stance(by_rank[rank]) for rank in sorted(awaited)},
        busy=frozenset(rank for rank in awaited if is_busy(by_rank[rank])),
        joined=frozenset(rank for group in groups for rank in _joined(group)) - awaited - unknown,
        cycle=_find_cycle(groups) if awaited else (),
        mismatch=find_other_operation(groups) or (find_other_order(groups) if is_complete else ()),
        is_complete=is_complete,
        is_partial=_is_partial(by_rank, groups, world_size),
    )


def is_busy(member: Member) -> bool:
    """True if the rank has an open operation, which other ranks may have to join, and is not stopped or frozen."""
    is_stopped = member.kernel.state in STOPPED_STATES or member.waits.frozen_cgroup is not None
    return _has_open(member) and not is_stopped


def _has_open(member: Member) -> bool:
    """True if an operation of a rank stays open for which its main thread may wait, or is open without a record.

    The main thread may also wait for an operation of another thread, except in a system call that no thread of its
    process ends.
    """
    return any(
        records.has_lost_open
        or any(one.stays_open and (one.by_main or not member.kernel.is_held_outside) for one in records.operations)
        for recorder in member.recorder.libraries
        for records in recorder.groups
    )


def _by_rank(members: Iterable[Member]) -> dict[int, Member]:
    """Return the members by rank; {} if a number occurs twice, which means two worlds in one job."""
    numbered = [(member.id.rank, member) for member in members if member.id.rank is not None]
    by_rank = dict(numbered)
    return by_rank if len(by_rank) == len(numbered) else {}


def _joined(group: ProcessGroup) -> set[int]:
    """Return the members with a known number, except a single waiting rank: others may not wait for its operation."""
    return group.newest.keys() - (group.waits.keys() if len(group.waits) == 1 else set())


def _is_partial(by_rank: Mapping[int, Member], groups: Iterable[ProcessGroup], world_size: int | None) -> bool:
    """True if the recorder of a rank of the job, or of a member of these groups, was not read."""
    read = {rank for rank, member in by_rank.items() if member.recorder.libraries}
    return len(read) < max(len(by_rank), world_size or 0) or any(not read.issuperset(group.members) for group in groups)


def _pending(group: ProcessGroup) -> Iterator[PendingOperation]:
    """Yield a pending operation for each number at which ranks wait: at most the seven lowest and the highest."""
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


def _find_cycle(groups: Sequence[ProcessGroup]) -> tuple[int, ...]:
    """Return ranks that wait for each other; () if there are none. Of several cycles, return that with the lowest rank.

    A rank waits for all members of a group that have a lower number. The members are sorted by number. Each place in
    that order is a node with an edge to the place before it, so the graph stays linear in size.
    """
    edges: dict[_Node, list[_Node]] = defaultdict(list)
    for index, group in enumerate(groups):
        ordered = sorted(group.newest, key=lambda rank: (group.newest[rank], rank))
        for place, rank in enumerate(ordered):
            edges[index, place] += [(_RANK, rank), *([(index, place - 1)] if place else [])]
        numbers = [group.newest[rank] for rank in ordered]
        for rank, wait in sorted(group.waits.items()):
            behind = bisect_left(numbers, wait.number)
            if rank in group.newest and behind:
                edges[_RANK, rank].append((index, behind - 1))
    components = (sorted(rank for kind, rank in part if kind == _RANK) for part in strongly_connected(edges))
    return min((tuple(ranks) for ranks in components if len(ranks) > 1), default=())


_Node = tuple[int, int]
_RANK = -1
