"""Pure: sequence numbers -> who waits for whom. The rules in words: docs/verdicts.md; what a record is: `rank_records`.

A rank *has come* to (group, number) if it has a record there with that number or a higher one; it *has not come* if
what its recorder holds reaches back before the first peer's record of it, and holds none; else that is *not known*.
Only operations that are open in the first and in the last round of a look count: one look at a healthy job is a torn
cut.

An open record is no wait (an asynchronous operation is open while its rank computes), and no open record is no freedom
(gloo records no send, recv, monitored_barrier, new_group and no wait for the store). So of the ranks that are awaited
only who has no open record, and by stack and kernel waits for nobody, is named.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from hangwatch.collectives.cycles import strongly_connected
from hangwatch.model import STOPPED_STATES, Enqueued, GroupRecords, Member, Recorded
from hangwatch.model.flight_records import Library

Kind = Literal["not_come", "circle", "mismatch", "everybody", "still_open", "not_reached", "unknown"]
Stance = Literal["elsewhere", "held", "waits", "unclear"]
"""What stack and kernel say of a rank: in no wait at all; in one for a lock, a file or a time, which nobody is known to
end; in one for other ranks; or none of that is sure."""

_MOST_DIFFERENT_CLOCKS_SECONDS = 60.0
DEFAULT_GROUP = "0", "default_pg"  # torch/distributed/distributed_c10d.py
_MOST_SAID = 8
_MOST_ORDERED = 8
_MOST_MEMBERS = 1 << 20

GroupKey = tuple[Library, str]


class Meeting(NamedTuple):
    """One operation of one group, in which ranks wait for others.

    `members` are the ranks of the group as far as they are known, all of them where `is_whole`. `waiting` have had it
    open for `seconds` at least, `missing` have not come, of `unseen` it is not known.
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
    unseen: tuple[int, ...]

    @property
    def is_default(self) -> bool:
        """Whether it is of the group of all ranks."""
        return (self.name, self.description) == DEFAULT_GROUP


class Answer(NamedTuple):
    """Who waits for whom. `named` and `first_look` are ranks, `circle` those that wait for each other.

    `meetings` are what is waited for, what concerns the ranks that are said first. `came` are the ranks that are known
    to have come to all that others wait for, `partly`: ranks of the job were not read. `differs` is what the ranks did
    in place of the same, with the ranks. `by_counts`: NCCL's own counts say so (`launched`), and no record of a flight
    recorder.
    """

    kind: Kind
    named: tuple[int, ...] = ()
    first_look: tuple[int, ...] = ()
    circle: tuple[int, ...] = ()
    meetings: tuple[Meeting, ...] = ()
    came: frozenset[int] = frozenset()
    partly: bool = False
    differs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    by_counts: bool = False

    @property
    def have_met(self) -> bool:
        """True if the ranks that wait have met before: what they wait in is nowhere the first of its group."""
        return bool(self.meetings) and all(one.number > 1 for one in self.meetings)


def waits_in(records: GroupRecords) -> Enqueued | None:
    """What a rank waits in in one group: its oldest collective that stays open, for the later ones stand behind it."""
    oldest: Enqueued | None = None
    for one in records.operations:
        if one.stays_open and not one.is_p2p and (oldest is None or one.number < oldest.number):
            oldest = one
    return oldest


def is_busy(member: Member) -> bool:
    """Whether it has an operation of any kind open, for which others may have to come; never whom the kernel holds."""
    return _has_open(member) and not _is_stopped(member)


class _Seat(NamedTuple):
    """One rank in one group."""

    rank: int
    node: str | None
    records: GroupRecords
    recorder: Recorded


class _Group(NamedTuple):
    """One group: the seats of those that have a record in it, who waits in what, who else is in it, read or not."""

    key: GroupKey
    seats: Mapping[int, _Seat]
    waiters: Mapping[int, Enqueued]
    members: tuple[int, ...]
    is_whole: bool

    def description(self) -> str:
        """What it is called, with its name."""
        seat = next(iter(self.seats.values()))
        return f"{seat.records.description or 'group'} ({self.key[1]})"


class _Come(NamedTuple):
    """How far the members of one group have come: the number of the newest record; and of whom it is not known."""

    numbers: Mapping[int, int]
    unknown: frozenset[int]


def judge(members: Iterable[Member], stance: Callable[[Member], Stance], world_size: int | None = None) -> Answer:
    """Who waits for whom, by what each rank has recorded; `world_size` is how many ranks the job has, where known.

    Nothing is known where two ranks bear the same number, and of ranks without one.
    """
    by_rank = _by_rank(members)
    if by_rank is None:
        return Answer("unknown")
    waited_in = [group for group in _groups(by_rank, world_size) if group.waiters]
    if not waited_in:
        return Answer("unknown")
    come = [_how_far(group, by_rank) for group in waited_in]
    meetings = tuple(meeting for group, far in zip(waited_in, come, strict=True) for meeting in _meetings(group, far))
    awaited = {rank for meeting in meetings for rank in meeting.missing}
    not_known = {rank for far in come for rank in far.unknown}
    met = (far.numbers.keys() - _only_one(group) for group, far in zip(waited_in, come, strict=True))
    came = frozenset(itertools.chain.from_iterable(met)) - awaited - not_known
    unread = _unread(by_rank, waited_in, world_size)
    base = Answer("unknown", meetings=meetings, came=came, partly=unread)
    if (differs := _other_operation(waited_in)) is not None:
        return _mismatch(base, differs)
    if awaited:
        return _awaited(base, waited_in, come, {rank: by_rank[rank] for rank in awaited}, stance)
    if not_known or not all(group.is_whole for group in waited_in):
        return base
    if (differs := _other_order(waited_in)) is not None:
        return _mismatch(base, differs)
    return base._replace(kind="everybody")


def _only_one(group: _Group) -> set[int]:
    """The rank that alone waits in a group: what it has open says nothing of what others wait for."""
    waiters = group.waiters
    return set(waiters) if len(waiters) == 1 else set()


def _by_rank(members: Iterable[Member]) -> dict[int, Member] | None:
    """The members by rank; None where a number is there twice: two worlds in one job."""
    found: dict[int, Member] = {}
    for member in members:
        if member.id.rank is None:
            continue
        if member.id.rank in found:
            return None
        found[member.id.rank] = member
    return found


# --- groups and how far their members have come ----------------------------------------------------------------------


def _groups(by_rank: Mapping[int, Member], world_size: int | None) -> list[_Group]:
    seats: dict[GroupKey, dict[int, _Seat]] = defaultdict(dict)
    for rank, member in by_rank.items():
        for recorder in member.recorded:
            for records in recorder.groups:
                seats[records.library, records.name][rank] = _Seat(rank, member.id.node, records, recorder)
    return [_group(key, found, by_rank, world_size) for key, found in sorted(seats.items())]


def _group(key: GroupKey, seats: dict[int, _Seat], by_rank: Mapping[int, Member], world_size: int | None) -> _Group:
    """A group with its members: all ranks in the default group, else those that NCCL lists, else who was seen in it."""
    waiters = {rank: one for rank, seat in seats.items() if (one := waits_in(seat.records)) is not None}
    first = next(iter(seats.values())).records
    listed = {seat.records.ranks for seat in seats.values()}
    if (first.name, first.description) == DEFAULT_GROUP:
        known = {*by_rank, *range(min(world_size or 0, _MOST_MEMBERS))}
        return _Group(
            key, seats, waiters, tuple(sorted(known)), is_whole=world_size is not None and len(known) == world_size
        )
    if len(listed) == 1 and (ranges := listed.pop()):
        size = sum(last + 1 - start for start, last in ranges)
        if size <= _MOST_MEMBERS:
            ranks = {rank for start, last in ranges for rank in range(start, last + 1)}
            return _Group(key, seats, waiters, tuple(sorted(ranks | seats.keys())), is_whole=ranks >= seats.keys())
    return _Group(key, seats, waiters, tuple(sorted(seats)), is_whole=False)


def _how_far(group: _Group, by_rank: Mapping[int, Member]) -> _Come:
    """How far each member has come. What some processes made more often than others is not compared."""
    waiters = group.waiters
    lowest = min(one.number for one in waiters.values())
    created = (
        (group.seats[rank].node, one.created_unix_seconds) for rank, one in waiters.items() if one.number == lowest
    )
    earliest = _earliest(created)
    generations = {seat.records.generation for seat in group.seats.values()}
    numbers, unknown = {}, set()
    for rank in group.members:
        seat = group.seats.get(rank)
        if seat is not None and len(generations) == 1:
            numbers[rank] = seat.records.number
        elif seat is None and generations == {1} and _reaches_back(by_rank.get(rank), group.key[0], earliest):
            numbers[rank] = 0
        else:
            unknown.add(rank)
    return _Come(numbers, frozenset(unknown))


def _earliest(created: Iterable[tuple[str | None, float]]) -> dict[str | None, float]:
    """When the first of them was enqueued, by node."""
    found: dict[str | None, float] = {}
    for node, seconds in created:
        found[node] = min(found.get(node, seconds), seconds)
    return found


def _reaches_back(member: Member | None, library: Library, earliest: Mapping[str | None, float]) -> bool:
    """Whether what a rank without a record in a group still has begins before the first record of its peers.

    Clocks of other nodes may differ.
    """
    recorder = next((one for one in member.recorded if one.library == library), None) if member else None
    if member is None or recorder is None:
        return False
    if not recorder.is_wrapped:
        return True
    oldest = recorder.oldest_unix_seconds
    return oldest is not None and all(
        oldest < seconds - (0.0 if node is not None and node == member.id.node else _MOST_DIFFERENT_CLOCKS_SECONDS)
        for node, seconds in earliest.items()
    )


def _unread(by_rank: Mapping[int, Member], groups: Iterable[_Group], world_size: int | None) -> bool:
    """Whether a rank of the job, or of these groups, was not read."""
    read = {rank for rank, member in by_rank.items() if member.recorded}
    return len(read) < max(len(by_rank), world_size or 0) or any(not read.issuperset(group.members) for group in groups)


def _meetings(group: _Group, come: _Come) -> Iterator[Meeting]:
    """What is waited for in one group: one meeting for each number at which somebody waits, of many a few."""
    by_number: dict[int, list[int]] = defaultdict(list)
    waiters = group.waiters
    for rank, one in waiters.items():
        by_number[one.number].append(rank)
    numbers = sorted(by_number)
    for number in (*numbers[: _MOST_SAID - 1], *numbers[_MOST_SAID - 1 :][-1:]):
        waiting = sorted(by_number[number])
        ours = [waiters[rank] for rank in waiting]
        yield Meeting(
            library=group.key[0],
            name=group.key[1],
            description=group.seats[waiting[0]].records.description,
            number=number,
            operation=ours[0].operation,
            seconds=min(one.open_seconds for one in ours),
            timeout_seconds=ours[0].timeout_seconds,
            members=group.members,
            is_whole=group.is_whole,
            waiting=tuple(waiting),
            missing=tuple(rank for rank, reached in come.numbers.items() if reached < number),
            unseen=tuple(sorted(come.unknown)),
        )


# --- the answers -----------------------------------------------------------------------------------------------------


def _awaited(
    base: Answer,
    groups: Sequence[_Group],
    come: Sequence[_Come],
    awaited: Mapping[int, Member],
    stance: Callable[[Member], Stance],
) -> Answer:
    """Somebody has not come: by what he has open, and by what stack and kernel say of him."""
    stands = {rank: stance(member) for rank, member in sorted(awaited.items())}
    busy = {rank for rank, member in awaited.items() if is_busy(member)}
    for how in ("elsewhere", "held"):  # who is held up may be by who is elsewhere
        if named := tuple(rank for rank, stand in stands.items() if stand == how and rank not in busy):
            waiting = {rank for group in groups for rank in group.waiters}
            waiting.update(rank for rank, stand in stands.items() if stand == "waits")
            return base._replace(kind="not_come", named=named if len(named) <= len(waiting) else ())
    if outside := tuple(rank for rank, stand in stands.items() if stand in ("elsewhere", "held")):
        return base._replace(kind="not_come", first_look=outside)
    if circle := _circle(groups, come):
        return base._replace(kind="circle", circle=circle, first_look=_alone(circle, base.meetings))
    if there := _still_open(groups, base.meetings, stands):
        return base._replace(kind="still_open", meetings=(*there, *(one for one in base.meetings if one not in there)))
    idle = [rank for rank in stands if rank not in busy]
    if not idle or any(stands[rank] == "waits" for rank in idle):
        return base
    return base._replace(kind="not_come", first_look=tuple(idle) if len(idle) == 1 else ())


def _still_open(
    groups: Iterable[_Group], meetings: Iterable[Meeting], awaited: Mapping[int, Stance]
) -> tuple[Meeting, ...]:
    """To what all have come and several are still in, where who is awaited elsewhere waits in something open itself.

    One that alone is still in it may hold itself up.
    """
    waiting = {rank for group in groups for rank in group.waiters}
    if not waiting.issuperset(awaited) or set(awaited.values()) != {"waits"}:
        return ()
    complete = (one for one in meetings if one.is_whole and not one.missing and not one.unseen)
    return tuple(one for one in complete if len(one.waiting) > 1)


def _has_open(member: Member) -> bool:
    """Whether an operation of any kind stays open for which its main thread may wait, or is open without a record.

    For what another thread has open it may, too, but where it stands in a call that no thread of its own ends.
    """
    return any(
        records.has_lost_open
        or any(one.stays_open and (one.by_main or not member.is_held_outside) for one in records.operations)
        for recorder in member.recorded
        for records in recorder.groups
    )


def _is_stopped(member: Member) -> bool:
    """Whether the kernel holds it: whatever it has open, it does not come."""
    return member.state in STOPPED_STATES or member.frozen_cgroup is not None


def _alone(circle: Sequence[int], meetings: Sequence[Meeting]) -> tuple[int, ...]:
    """The one rank of a circle that waits where nobody waits with it, while with the others some do."""
    company: dict[int, int] = {}
    for meeting in meetings:
        for rank in meeting.waiting:
            company[rank] = max(company.get(rank, 0), len(meeting.waiting))
    alone = tuple(rank for rank in circle if company.get(rank) == 1)
    return alone if len(alone) == 1 else ()


def _circle(groups: Sequence[_Group], come: Sequence[_Come]) -> tuple[int, ...]:
    """Ranks that all wait for each other, () without any: of several such circles the one with the lowest rank.

    A rank waits for all members of a group who have not come as far, which are the first of them by their numbers. So
    one node for each place in that order, with a way to the place before it, keeps the graph linear.
    """
    ways: dict[_Node, list[_Node]] = defaultdict(list)
    for index, (group, far) in enumerate(zip(groups, come, strict=True)):
        ordered = sorted(far.numbers, key=lambda rank: (far.numbers[rank], rank))
        for place, rank in enumerate(ordered):
            ways[index, place] += [(_RANK, rank), *([(index, place - 1)] if place else [])]
        reached = [far.numbers[rank] for rank in ordered]
        for rank, one in sorted(group.waiters.items()):
            behind = bisect_left(reached, one.number)
            if rank in far.numbers and behind:
                ways[_RANK, rank].append((index, behind - 1))
    found = (sorted(rank for kind, rank in part if kind == _RANK) for part in strongly_connected(ways))
    return min((tuple(ranks) for ranks in found if len(ranks) > 1), default=())


_Node = tuple[int, int]
_RANK = -1


def _mismatch(base: Answer, sides: Mapping[str, Sequence[int]]) -> Answer:
    """The sides of a mismatch, the largest first; the lone one of more than two ranks is a first look."""
    ordered = sorted(
        ((what, tuple(sorted(ranks))) for what, ranks in sides.items()), key=lambda side: (-len(side[1]), side)
    )
    sizes = [len(ranks) for _, ranks in ordered]
    lone = ordered[-1][1] if sizes[-1] == 1 and sizes[-2] > 1 else ()
    return base._replace(kind="mismatch", differs=tuple(ordered), first_look=lone)


def _other_operation(groups: Iterable[_Group]) -> dict[str, list[int]] | None:
    """What members of a group did under one number in which some wait: another operation, else other types or sizes."""
    for group in groups:
        numbers = {one.number for one in group.waiters.values()}
        if len({seat.records.generation for seat in group.seats.values()}) > 1:
            continue
        done: dict[int, dict[int, Enqueued]] = defaultdict(dict)
        for rank, seat in group.seats.items():
            for one in seat.records.operations:
                if one.number in numbers and not one.is_p2p and one.operation != "coalesced":
                    done[one.number][rank] = one
        for number in sorted(done):
            for key_of, say in _DIFFERENCES:
                sides: dict[Any, list[int]] = defaultdict(list)
                for rank, one in done[number].items():
                    if any(what := key_of(one)):
                        sides[what].append(rank)
                if len(sides) > 1:
                    return {say(*what): ranks for what, ranks in sides.items()}
    return None


# What members may do otherwise under one number, and how that is said.
_DIFFERENCES: tuple[tuple[Callable[[Enqueued], tuple[Any, ...]], Callable[..., str]], ...] = (
    (lambda one: (one.operation,), lambda operation: operation),
    (
        lambda one: (one.operation, one.dtypes) if one.dtypes else (),
        lambda operation, dtypes: f"{operation} of {', '.join(dtypes)}",
    ),
    (
        lambda one: (one.operation, one.sizes) if one.sizes else (),
        lambda operation, sizes: f"{operation} of {' '.join(map(str, sizes))}",
    ),
)


def _other_order(groups: Sequence[_Group]) -> dict[str, list[int]] | None:
    """Who enqueued the open operations of two groups in another order than others: each waits for the other's first."""
    opened: dict[tuple[int, Library], list[tuple[int, int]]] = defaultdict(list)
    for index, group in enumerate(groups):
        for rank, one in group.waiters.items():
            opened[rank, group.key[0]].append((one.order, index))
    sides: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (rank, _), found in opened.items():
        for (_, first), (_, second) in itertools.combinations(sorted(found)[:_MOST_ORDERED], 2):
            sides[first, second].append(rank)
    for (first, second), ranks in sorted(sides.items()):
        if first < second and (others := sides.get((second, first))):
            before, after = (groups[index].description() for index in (first, second))
            return {f"{before} before {after}": ranks, f"{after} before {before}": others}
    return None
