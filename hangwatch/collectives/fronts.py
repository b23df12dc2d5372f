"""The front of each rank, by flight recorders of one moment: the operations that its GPU has not completed. Pure.

A program that uses NCCL enqueues operations ahead of its GPU. So the completed operations show for which ranks the
others wait. The *front* of a rank in a process group is its oldest open operation there. A rank waits in a front for
the members that have not enqueued it, and for the members that have an older open operation. It waits for no member
that has completed it. The *ends* of these waits are the ranks that wait for no other rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from hangwatch.collectives.cycles import strongly_connected
from hangwatch.model.flight_records import FlightRecord, Library, RankRecords

_Key = tuple[Library, str]
_Wait = tuple[Library, str, int, int | None]
_Ranges = tuple[tuple[int, int], ...]
_PEER = re.compile(r":(?:send|recv) \d{1,7}(?:->|<-)(\d{1,7})$")
_MOST_MEMBERS = 1 << 20
# No member can complete these before every member has launched them.
_PROVING = frozenset(
    {
        "all_reduce", "_all_gather_base", "all_gather", "all_gather_into_tensor", "_reduce_scatter_base",
        "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
    }
)  # fmt: skip


class Front(NamedTuple):
    """The oldest open operation of a rank in one group. `others` are the members of the group, or the peer."""

    record: FlightRecord
    library: Library
    members: tuple[int, ...]
    others: frozenset[int]

    def wait(self, rank: int) -> _Wait:
        """Return the key that is equal for all ranks which wait in the same operation."""
        number = self.record.p2p_seq if self.record.is_p2p else self.record.collective_seq
        return self.library, self.record.group_name, number, rank if self.record.is_p2p else None


class End(NamedTuple):
    """A rank for which others wait. `program`: it has not enqueued `front`, which is open on the ranks in `others`.

    `gpu`: it has not completed `front`, which the ranks in `others` have; they have completed `behind` operations more.
    `unrecorded`: others wait for it, and it has no flight recorder.
    """

    rank: int
    kind: Literal["program", "gpu", "unrecorded"]
    front: Front
    others: tuple[int, ...]
    behind: int = 0


class _Group(NamedTuple):
    """The operations of one rank in one group; `newest` is the number of its newest collective, 0 if unknown."""

    newest: int
    oldest_open: FlightRecord | None

    def has_completed(self, number: int) -> bool:
        """True if the rank has completed the collective. One group completes its operations in order."""
        return number <= self.newest and (self.oldest_open is None or number < self.oldest_open.collective_seq)


class _Job:
    """The groups and the fronts of all ranks.

    The fronts of a rank are sorted by the time of enqueueing. Sends come last, because pipelines send asynchronously.
    """

    def __init__(self, recorders: Mapping[int, Sequence[RankRecords]]) -> None:
        self.recorders = recorders
        self.groups: dict[tuple[int, _Key], _Group] = {}
        self.fronts: dict[int, list[Front]] = {}
        self.waiting: dict[_Wait, dict[int, Front]] = defaultdict(dict)
        self._missing: dict[_Wait, frozenset[int]] = {}
        self._awaited: dict[tuple[_Wait, bool], frozenset[int]] = {}
        self._completed: dict[_Wait, tuple[int, ...]] = {}
        self._members: dict[_Ranges, tuple[tuple[int, ...], frozenset[int]]] = {}
        for rank, of_rank in recorders.items():
            fronts = [front for recorder in of_rank for front in self._add(rank, recorder)]
            self.fronts[rank] = sorted(
                fronts,
                key=lambda front: (":send " in front.record.operation, front.record.created_unix_ns, front.record.id),
            )
            for front in fronts:
                self.waiting[front.wait(rank)][rank] = front

    def _add(self, rank: int, recorder: RankRecords) -> Iterator[Front]:
        listed = {members.name: members.ranks for members in recorder.members}
        by_group: dict[tuple[int, bool], list[FlightRecord]] = defaultdict(list)
        for record in recorder.records:
            if record.group_name and not record.is_coalesced_part:
                by_group[record.group_id, record.is_p2p].append(record)
        for (_, is_p2p), records in sorted(by_group.items()):
            opened = next((record for record in records if record.is_open), None)
            name = records[0].group_name
            if not is_p2p:
                self.groups[rank, (recorder.library, name)] = _Group(records[-1].collective_seq, opened)
            ranges = listed.get(name, ())
            if opened is None or not 0 < sum(last + 1 - first for first, last in ranges) <= _MOST_MEMBERS:
                continue
            if ranges not in self._members:
                listed_ranks = tuple(member for first, last in ranges for member in range(first, last + 1))
                self._members[ranges] = listed_ranks, frozenset(listed_ranks)
            members, others = self._members[ranges]
            peer = _PEER.search(opened.operation)
            if peer is None:
                yield Front(opened, recorder.library, members, others)
            elif int(peer[1]) < len(members):
                yield Front(opened, recorder.library, members, frozenset({members[int(peer[1])]}) - {rank})

    def group(self, member: int, front: Front) -> _Group | None:
        """Return the operations of a member in the group of a front; None if they are unknown.

        Without a record there, the flight recorder may have lost it. Then torch's own count tells the newest number, as
        ranks number alike the groups that they use alike.
        """
        if group := self.groups.get((member, (front.library, front.record.group_name))):
            return group
        recorders = self.recorders.get(member, ())
        statuses = (status for recorder in recorders for status in recorder.groups)
        count = (status.last_completed for status in statuses if status.group_id == front.record.group_id)
        is_lost = member not in self.recorders or any(recorder.is_wrapped for recorder in recorders)
        newest = next(count, None if is_lost else 0)
        return None if newest is None else _Group(newest, None)

    def find_missing(self, rank: int, front: Front) -> frozenset[int]:
        """Return the members that have not enqueued a front of a rank, by their flight recorders."""
        if front.record.is_p2p:
            return frozenset()
        key, number = front.wait(rank), front.record.collective_seq
        if key not in self._missing:
            groups = ((member, self.group(member, front)) for member in front.others)
            self._missing[key] = frozenset(member for member, group in groups if group and group.newest < number)
        return self._missing[key]

    def find_awaited(self, rank: int, front: Front) -> frozenset[int]:
        """Return the ranks with a flight recorder for which a rank waits in its front."""
        if front.record.is_p2p:
            return frozenset(peer for peer in front.others if peer in self.recorders)
        key = front.wait(rank), front.record.is_started
        if key not in self._awaited:
            behind = (member for member in front.others if self._is_behind(member, front))
            self._awaited[key] = self.find_missing(rank, front).union(behind)
        return self._awaited[key]

    def _is_behind(self, member: int, front: Front) -> bool:
        """True if a member has enqueued the operation of a front, and its GPU is in an older operation."""
        group = self.group(member, front)
        opened = group.oldest_open if group else None
        if group is None or opened is None or group.has_completed(front.record.collective_seq):
            return False
        is_later = front.record.is_started and not opened.is_started
        is_older = bool(self.fronts[member]) and self.fronts[member][0].record is not opened
        return is_older or is_later or opened.collective_seq < front.record.collective_seq

    def find_completed(self, rank: int, front: Front) -> tuple[int, ...]:
        """Return the members that have completed a front of a rank, which no member can complete alone."""
        if front.record.is_p2p or front.record.operation.rpartition(":")[2] not in _PROVING:
            return ()
        key, number = front.wait(rank), front.record.collective_seq
        if key not in self._completed:
            groups = ((member, self.group(member, front)) for member in front.members)
            self._completed[key] = tuple(member for member, group in groups if group and group.has_completed(number))
        return self._completed[key]


def find_ends(recorders: Mapping[int, Sequence[RankRecords]]) -> tuple[End, ...]:
    """Return the ranks for which all others wait, by their flight recorders, keyed by rank. () if none is certain."""
    job = _Job(recorders)
    edges: dict[Hashable, Sequence[Hashable]] = dict.fromkeys(recorders, ())
    behind_gpu = []
    for rank, fronts in job.fronts.items():
        if fronts and job.find_completed(rank, fronts[0]) and not job.find_missing(rank, fronts[0]):
            behind_gpu.append(rank)
        elif fronts and (awaited := job.find_awaited(rank, fronts[0])):
            operation = fronts[0].wait(rank), fronts[0].record.is_started  # a node, so that the graph stays linear
            edges[rank] = [operation]
            if operation not in edges:
                edges[operation] = sorted(awaited)
    programs = []
    for part in strongly_connected(edges):
        nodes = set(part)
        if any(other not in nodes for node in part for other in edges[node]):
            continue
        ranks = [node for node in part if isinstance(node, int)]
        # A rank that has only received asynchronously may be in its own code; the others of the cycle wait for it.
        receivers = [rank for rank in ranks if all(front.record.is_p2p for front in job.fronts[rank])]
        programs += receivers if len(receivers) == 1 else []
    ends = sorted((*(_behind_gpu(job, rank) for rank in behind_gpu), *_behind_program(job, programs)), key=_rank_of)
    unrecorded = tuple(_find_unrecorded(job, {end.rank for end in ends}))
    return (*ends, *(unrecorded if len(unrecorded) < len(recorders) else ()))


def _rank_of(end: End) -> int:
    return end.rank


def _behind_gpu(job: _Job, rank: int) -> End:
    front = job.fronts[rank][0]
    completed = job.find_completed(rank, front)
    groups = filter(None, (job.group(member, front) for member in completed))
    newest = max(group.oldest_open.collective_seq - 1 if group.oldest_open else group.newest for group in groups)
    return End(rank, "gpu", front, completed, newest - front.record.collective_seq + 1)


def _behind_program(job: _Job, programs: Sequence[int]) -> Iterator[End]:
    """Yield the ranks for which others wait, each with the smallest group in which they do."""
    waits: dict[int, list[_Wait]] = defaultdict(list)
    for wait, fronts in job.waiting.items():
        rank, front = next(iter(fronts.items()))
        for missing in job.find_missing(rank, front):
            waits[missing].append(wait)

    def order(wait: _Wait) -> tuple[int, int]:
        front = next(iter(job.waiting[wait].values()))
        return len(front.members), front.record.created_unix_ns

    for rank in programs:
        if waits[rank]:
            fronts = job.waiting[min(waits[rank], key=order)]
            yield End(rank, "program", next(iter(fronts.values())), tuple(sorted(fronts)))


def _find_unrecorded(job: _Job, ends: Collection[int]) -> Iterator[End]:
    """Yield the ranks without a flight recorder for which a rank waits, unless the other `ends` explain the wait.

    Such a rank may itself wait for an end that is in one of its groups. It is left out if an end is in each of its
    groups in which ranks wait.
    """
    reached: dict[int, _Wait] = {}
    is_explained: dict[int, list[bool]] = defaultdict(list)
    for wait, fronts in job.waiting.items():
        rank, front = next(iter(fronts.items()))
        unrecorded = [other for other in front.others if other not in job.recorders]
        if not front.record.is_p2p:
            explains = not front.others.isdisjoint(ends)
            for other in unrecorded:
                is_explained[other].append(explains)
        is_first = any(job.fronts[waiting][0] is front for waiting, front in fronts.items())
        if is_first and not job.find_awaited(rank, front) and not job.find_completed(rank, front):
            for other in unrecorded:
                reached.setdefault(other, wait)
    for rank, wait in sorted(reached.items()):
        if not is_explained[rank] or not all(is_explained[rank]):
            fronts = job.waiting[wait]
            yield End(rank, "unrecorded", next(iter(fronts.values())), tuple(sorted(fronts)))
