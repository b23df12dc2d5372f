"""The front of each rank: the operations in which it waits, and the ranks at which all waits end. Pure.

A program that uses NCCL enqueues operations ahead of its GPU. So the completed operations show for which ranks the
others wait. The *front* of a rank in a process group is its oldest open operation there. A rank waits in a front for
the members that have not enqueued it. With a GPU it waits in its oldest front only, also for members that have an
older open operation. It waits for no member that has completed it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeAlias

from hangwatch.collectives.process_groups import ProcessGroup, is_send
from hangwatch.model import EnqueuedOperation, list_by_key

_MOST_NUMBERS = 8  # pending operations of one group
_Node: TypeAlias = Hashable  # a rank, an operation as (index of its group, number, is it started), or:
# For one or more of the candidates, a rank waits in a group without another known member
_ANY_RANK = -(1 << 62)


class Front(NamedTuple):
    """The oldest open collective, send or recv of a rank in one group. `place` is the index of the group.

    `peer` is the rank at the other end of a send or recv, None if unknown.
    """

    place: int
    group: ProcessGroup
    operation: EnqueuedOperation
    peer: int | None = None


class Ends(NamedTuple):
    """The ends of all waits: see `WaitGraph`. `are_all` is false if ranks also wait in an operation that may go on.

    Ranks in `lone` wait without another rank of the cycle in their operations, which are all collectives.
    """

    programs: tuple[int, ...] = ()
    gpus: tuple[tuple[int, Front], ...] = ()
    unrecorded: tuple[int, ...] = ()
    cycle: tuple[int, ...] = ()
    lone: frozenset[int] = frozenset()
    are_all: bool = True


def show_numbers(numbers: Collection[int]) -> list[int]:
    """Return the numbers in order; of many numbers, the seven lowest and the highest."""
    ordered = sorted(numbers)
    return [*ordered[: _MOST_NUMBERS - 1], *ordered[_MOST_NUMBERS - 1 :][-1:]]


def find_ends(
    groups: Sequence[ProcessGroup], recorded: Set[int], busy: Set[int], stopped: Set[int], *, are_all: bool
) -> Ends:
    """Return the ends of all waits in these groups.

    Ranks in `recorded` have a flight recorder; `are_all` is true if these are all ranks of the job. Those in `busy`
    have an open operation. The records of ranks in `stopped` do not show what their GPUs have completed.
    """
    if not any(group.may_have_end for group in groups):
        return Ends()
    waits = _Waits(groups, recorded, candidates=recorded if are_all else frozenset())
    gpus = sorted((rank, front) for rank, front in waits.first.items() if waits.is_behind_gpu(rank))
    behind_gpu = {rank for rank, _ in gpus} - stopped
    edges = waits.find_edges(recorded, behind_gpu)
    idle = {node for ways in edges.values() for node in ways} - busy
    programs, cycles, ready = [], [], []
    for part in strongly_connected(edges):
        nodes = set(part)
        if any(other not in nodes for node in part for other in edges[node]):
            continue
        ranks = sorted(node for node in part if isinstance(node, int) and node != _ANY_RANK)
        # A rank that has only received asynchronously may be in its own code; the others of the cycle wait for it.
        is_alone = len(ranks) == 1
        alone = [rank for rank in ranks if (rank in idle if is_alone else rank not in waits.collective)]
        if len(alone) == 1:
            programs += alone
        elif len(ranks) > 1 and not (waits.collective.isdisjoint(ranks) and any(map(waits.awaits_unrecorded, ranks))):
            cycles.append(tuple(ranks))
        else:
            ready += [rank for rank in ranks if rank not in behind_gpu and any(waits.blocking(rank))]
    ends = {*programs, *behind_gpu}
    unrecorded = tuple(waits.find_unrecorded(ready, ends, edges))
    unrecorded = unrecorded if len(unrecorded) < len(recorded) else ()
    cycle = min(cycles, default=())
    company = list_by_key((node, rank) for rank in cycle for node in edges[rank])
    has_transfers = not all(isinstance(node, tuple) or node == _ANY_RANK for node in company)
    together = [cycle] if has_transfers else [ranks for ranks in company.values() if len(ranks) > 1]
    is_ready = not all(map(waits.awaits_unrecorded, ready))
    return Ends(
        programs=tuple(sorted(programs)),
        gpus=tuple((rank, front) for rank, front in gpus if rank in behind_gpu),
        unrecorded=unrecorded,
        cycle=cycle,
        lone=frozenset(cycle).difference(*together),
        are_all=not is_ready or not (ends or unrecorded),
    )


class _Waits:
    """The fronts in which each rank waits: `first` is the oldest of a GPU, `of_gloo` are all of gloo.

    `transfers` are the open sends and recvs of each rank. A rank that waits in a group without another known member
    waits for one or more of the `candidates`. If each of these waits for that rank, there is a cycle.
    """

    def __init__(self, groups: Sequence[ProcessGroup], recorded: Set[int], candidates: Set[int]) -> None:
        self.groups, self.recorded, self._candidates = groups, recorded, candidates
        self.of_gloo: dict[int, list[Front]] = defaultdict(list)
        self.transfers: dict[int, list[Front]] = defaultdict(list)
        self._numbers = [show_numbers({wait.number for wait in group.waits.values()}) for group in groups]
        self._unrecorded = [group.unknown - recorded for group in groups]
        oldest: dict[int, tuple[bool, float, int, int, Front]] = {}
        for place, group in enumerate(groups):
            collectives = ((rank, Front(place, group, wait)) for rank, wait in group.waits.items())
            transfers = (
                (rank, Front(place, group, *transfer)) for rank, pair in group.transfers.items() for transfer in pair
            )
            for rank, front in chain(collectives, transfers):
                operation = front.operation
                if not group.enqueues_ahead:
                    self.of_gloo[rank].append(front)
                    continue
                if operation.is_p2p:
                    self.transfers[rank].append(front)
                # Sends come last, because pipelines send asynchronously.
                order = is_send(operation), operation.created_unix_seconds, operation.order, place, front
                if rank not in oldest or order[:-1] < oldest[rank][:-1]:
                    oldest[rank] = order
        self.first = {rank: front for rank, (*_, front) in oldest.items()}

    def blocking(self, rank: int) -> Iterator[Front]:
        """Yield the fronts in which a rank may wait."""
        if rank in self.first:
            first = self.first[rank]
            batch = [one for one in self.transfers[rank] if one.operation.order == first.operation.order]
            yield from batch or (first,)
        yield from self.of_gloo.get(rank, ())

    @cached_property
    def collective(self) -> Set[int]:
        """The ranks that wait in a collective, not only in a send or recv."""
        return set[int]().union(*(group.waits for group in self.groups))

    def is_behind_gpu(self, rank: int) -> bool:
        """True if all members have enqueued the front of a rank, and others have completed it, or have started it.

        It does not count as not started while the GPU may be in a send that was enqueued before.
        """
        _, group, wait, _ = self.first[rank]
        if not group.is_proving(wait) or group.lowest_newest < wait.number:
            return False
        may_start = not wait.is_started and all(one.operation.order > wait.order for one in self.transfers[rank])
        return wait.number <= max(group.highest_completed, group.highest_started if may_start else -1)

    def find_edges(self, recorded: Set[int], behind_gpu: Set[int]) -> dict[_Node, Sequence[_Node]]:
        """Return the nodes for which each rank waits, and for each operation the ranks for which others wait in it."""
        edges: dict[_Node, Sequence[_Node]] = dict.fromkeys(sorted(recorded), ())
        for rank in (self.first.keys() | self.of_gloo.keys()) - behind_gpu:
            nodes = self._follow(rank, self.blocking(rank), edges)
            is_launched = all(isinstance(node, tuple) and _is_in(edges[node], rank) for node in nodes)
            edges[rank] = [*nodes, *self._follow(rank, self._earlier_sends(rank), edges)] if is_launched else nodes
        if any(_ANY_RANK in ways for ways in edges.values()):
            edges[_ANY_RANK] = tuple(self._candidates)
        return edges

    def _follow(self, rank: int, fronts: Iterable[Front], edges: dict[_Node, Sequence[_Node]]) -> list[_Node]:
        """Return the nodes for which a rank waits in these fronts. New operations are added to `edges`."""
        nodes: list[_Node] = []
        peers: dict[int, int] = {}
        for index, group, wait, peer in fronts:
            if wait.is_p2p:
                if peer is not None and self._awaits_peer(rank, wait, peer):
                    peers[peer] = group.count_transfers(peer) if peer not in self.first else -1
                continue
            numbers = self._numbers[index]
            number = numbers[bisect_right(numbers, wait.number) - 1]
            operation = index, number, wait.is_started
            if operation not in edges:
                edges[operation] = sorted(self._find_awaited(*operation))
            nodes += [operation] if edges[operation] else []
        # Of several ranks of a batch without an open operation, those with fewer batches have not enqueued this one.
        fewest = min((count for count in peers.values() if count >= 0), default=0)
        return nodes + [peer for peer, count in peers.items() if count <= fewest]

    def _earlier_sends(self, rank: int) -> Iterator[Front]:
        """Yield the sends before the front of a rank. If all have launched it, its GPU may still be in one of these."""
        return (one for one in self.transfers[rank] if one.operation.order < self.first[rank].operation.order)

    def _awaits_peer(self, rank: int, half: EnqueuedOperation, peer: int) -> bool:
        """True if a peer has not enqueued the other half of a transfer before the operation in which it waits."""
        is_launched = any(
            other.peer == rank
            and is_send(other.operation) != is_send(half)
            and other.operation.order < self.first[peer].operation.order
            for other in self.transfers[peer]
        )
        return peer in self.recorded and peer != rank and not is_launched

    def _find_awaited(self, index: int, number: int, is_started: bool) -> Set[int]:
        """Return the ranks with a flight recorder for which others wait in an operation, or `_ANY_RANK`."""
        group = self.groups[index]
        missing = {rank for rank, newest in group.newest.items() if newest < number}
        if not group.enqueues_ahead:
            return {_ANY_RANK} if len(group.members) == 1 and self._candidates else missing
        for rank, opened in group.waits.items():
            if opened.number <= number <= group.newest.get(rank, 0):
                is_later = is_started and not opened.is_started
                if self.first[rank].operation is not opened or is_later or opened.number < number:
                    missing.add(rank)
        return missing or {rank for rank in group.waits if self._follow(rank, self._earlier_sends(rank), {})}

    def list_unrecorded(self, rank: int) -> Iterator[Set[int]]:
        """Yield the ranks without a flight recorder for which a rank waits, for each of its fronts."""
        for front in chain(self.blocking(rank), self._earlier_sends(rank)):
            if not front.operation.is_p2p:
                yield self._unrecorded[front.place]
            elif front.peer is not None:
                yield {front.peer} - self.recorded

    def awaits_unrecorded(self, rank: int) -> bool:
        """True if a rank may wait for a rank without a flight recorder."""
        return any(self.list_unrecorded(rank))

    def find_unrecorded(
        self, ready: Sequence[int], ends: Set[int], edges: Mapping[_Node, Sequence[_Node]]
    ) -> Iterator[int]:
        """Yield the ranks without a flight recorder for which a rank waits, unless the other `ends` explain the wait.

        Such a rank may itself wait for a rank of one of its groups which leads to an end. So it is left out if that is
        a group in which ranks may wait for it, or if it exchanges messages with a rank that leads to an end and does
        not wait for it.
        """
        # The ranks of a group share one set.
        reached = set[int]().union(
            *{id(ranks): ranks for rank in ready for ranks in self.list_unrecorded(rank)}.values()
        )
        if not reached:
            return
        backward = list_by_key((other, node) for node, following in edges.items() for other in following)
        lead_to_end = {node for part in _walk(backward, sorted(ends)) for node in part}
        explained = (
            group.unknown for group in self.groups if group.waits and not lead_to_end.isdisjoint(group.members)
        )
        exchanges = (pair for group in self.groups for pair in group.list_exchanges())
        partners = list_by_key((peer, rank) for rank, peer in exchanges if peer in reached and rank in lead_to_end)
        for other in sorted(reached.difference(*explained)):
            await_it = (any(other in ranks for ranks in self.list_unrecorded(rank)) for rank in partners.get(other, ()))
            if all(await_it):
                yield other


def _is_in(ordered: Sequence[_Node], rank: int) -> bool:
    """True if the ranks for which others wait in an operation, which are in order, contain this rank."""
    at = bisect_right(ordered, rank)  # type: ignore[type-var]
    return at > 0 and ordered[at - 1] == rank


def strongly_connected(ways: Mapping[_Node, Sequence[_Node]]) -> Iterator[list[_Node]]:
    """Yield the strongly connected components of a graph, by Kosaraju's algorithm without recursion.

    `ways` maps each node to the nodes to which it has an edge. Each node is in exactly one component. The time grows
    linearly with the number of nodes and edges.
    """
    backward = list_by_key((other, node) for node, following in ways.items() for other in following)
    completed = [node for part in _walk(ways, ways) for node in part]
    yield from _walk(backward, reversed(completed))


def _walk(ways: Mapping[_Node, Sequence[_Node]], roots: Iterable[_Node]) -> Iterator[list[_Node]]:
    """Yield the nodes that each root reaches and no earlier root does, in the order in which the walk leaves them."""
    seen: set[_Node] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        path = [(root, iter(ways.get(root, ())))]
        part = []
        while path:
            node, further = path[-1]
            following = next((other for other in further if other not in seen), None)
            if following is None:
                part.append(node)
                path.pop()
            else:
                seen.add(following)
                path.append((following, iter(ways.get(following, ()))))
        yield part
