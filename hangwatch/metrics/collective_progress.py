"""Pure: the progress of each rank of this node in each process group, as series for the rules over all nodes.

The rules decide which rank has not joined, by the definitions of `wait_graph`. What PromQL cannot express is in
docs/adr/026-fleet-rule.md. The job's owner writes the names of groups: each is replaced by a short text, unique in the
job.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.collectives.process_groups import DEFAULT_GROUP, waits_in
from hangwatch.collectives.wait_graph import Stance, is_busy
from hangwatch.model import Enqueued, Grouping, GroupRecords, Member
from hangwatch.model.flight_records import Library
from hangwatch.verdict.scene import stance_of

MOST_GROUPS_OF_A_RANK = 8
_TEXT_LENGTH = 40
_PLAIN = re.compile(rf"[\w.:-]{{1,{_TEXT_LENGTH}}}", re.ASCII)


class Place(NamedTuple):
    """Where a rank stands by its stack and by the kernel, and whether an operation of its own is open."""

    rank: int
    stance: Stance
    has_open: bool


class Reached(NamedTuple):
    """How far a rank is in one group: its newest collective, and what it waits in, None where in nothing.

    `group` is the library with the name, of the default group "default_pg"; `description` is for people. `generation`
    as in `GroupRecords`.
    """

    place: Place
    group: str
    description: str
    generation: int
    number: int
    newest: Enqueued | None
    waits_in: Enqueued | None

    @property
    def is_default(self) -> bool:
        """Whether it is the group of all ranks."""
        return self.group.partition(":")[2] == DEFAULT_GROUP[1]


class Unseen(NamedTuple):
    """A rank of which no recorder shows an operation of the default group.

    `since_unix_seconds` is from when on it would show one: 0 for always, while nothing was overwritten.
    """

    place: Place
    group: str
    since_unix_seconds: float


class Found(NamedTuple):
    """All ranks of one job on this node; `left_out` counts what is over the bounds, ranks times groups."""

    reached: tuple[Reached, ...] = ()
    unseen: tuple[Unseen, ...] = ()
    left_out: int = 0


def found(grouping: Grouping, most: int) -> Found:
    """How far the ranks of a job are, of so many ranks times groups at most; nothing where two bear the same number."""
    ranks = Counter(member.id.rank for member in grouping.members if member.id.rank is not None)
    if any(count > 1 for count in ranks.values()):
        return Found()
    stance = stance_of(grouping)
    reached: list[Reached] = []
    unseen: list[Unseen] = []
    left_out = 0
    for member in sorted(
        (one for one in grouping.members if one.recorder.libraries), key=lambda one: one.id.sort_key()
    ):
        if member.id.rank is None:
            continue
        place = Place(member.id.rank, stance(member), is_busy(member))
        seats = sorted(_seats(member), key=_precedence)
        room = min(MOST_GROUPS_OF_A_RANK, most - len(reached))
        reached += [_reached(place, seat) for seat in seats[:room]]
        left_out += max(0, len(seats) - room)
        if room > 0 and not any(map(_is_default, seats)):
            unseen += _unseen(place, member)
    return Found(tuple(reached), tuple(unseen), left_out)


class Collective(NamedTuple):
    """One collective, in which ranks wait or which is their newest."""

    group: str
    description: str
    number: int
    operation: str
    waits: bool


def collectives(ranks: Sequence[Reached]) -> Counter[Collective]:
    """How many of these ranks wait in which collective, and what the newest one of others is.

    That of the default group, and where somebody here waits: it tells whether all do the same under one number.
    """
    found: Counter[Collective] = Counter()
    waited_in = {one.group for one in ranks if one.waits_in is not None}
    described: dict[str, str] = {}
    for one in ranks:
        description = described.setdefault(one.group, one.description)
        is_shown = one.group in waited_in or one.is_default
        if one.waits_in is not None:
            found[Collective(one.group, description, one.waits_in.number, _operation(one.waits_in), waits=True)] += 1
        if one.newest is not None and one.newest != one.waits_in and is_shown:
            found[Collective(one.group, description, one.newest.number, _operation(one.newest), waits=False)] += 1
    return found


def _operation(one: Enqueued) -> str:
    return words.elided(one.operation, _TEXT_LENGTH)


def waited_since(ranks: Iterable[Reached]) -> dict[str, float]:
    """When the first of these ranks enqueued what it waits in, of each group."""
    since: dict[str, float] = {}
    for one in ranks:
        if one.waits_in is not None:
            unix_seconds = one.waits_in.created_unix_seconds
            since[one.group] = min(since.get(one.group, unix_seconds), unix_seconds)
    return since


def _seats(member: Member) -> Iterator[GroupRecords]:
    return (records for recorder in member.recorder.libraries for records in recorder.groups)


def _precedence(seat: GroupRecords) -> tuple[bool, bool, int]:
    """What a rank waits in comes first, then the default group, then what it used last."""
    newest = max((one.order for one in seat.operations), default=-1)
    return waits_in(seat) is None, not _is_default(seat), -newest


def _is_default(seat: GroupRecords) -> bool:
    return (seat.name, seat.description) == DEFAULT_GROUP


def _reached(place: Place, seat: GroupRecords) -> Reached:
    collectives = [one for one in seat.operations if not one.is_p2p and one.number == seat.number]
    return Reached(
        place=place,
        group=_group(seat.library, DEFAULT_GROUP[1] if _is_default(seat) else _distinct(seat.name)),
        description=_description(seat),
        generation=seat.generation,
        number=seat.number,
        newest=collectives[-1] if collectives else None,
        waits_in=waits_in(seat),
    )


def _description(seat: GroupRecords) -> str:
    """What a page calls it: descriptions repeat, and anybody may give one."""
    if _is_default(seat):
        return "the default group"
    return f"{words.elided(seat.description, _TEXT_LENGTH) or 'group'} ({_group(seat.library, _distinct(seat.name))})"


def _unseen(place: Place, member: Member) -> Iterable[Unseen]:
    for recorder in member.recorder.libraries:
        since = recorder.oldest_unix_seconds if recorder.is_wrapped else 0.0
        if since is not None:
            yield Unseen(place, _group(recorder.library, DEFAULT_GROUP[1]), since)


def _group(library: Library, name: str) -> str:
    return f"{library}:{name}"


def _distinct(name: str) -> str:
    """The name where it is plain and short, else a checksum of it: whatever is cut off, two names stay two."""
    if _PLAIN.fullmatch(name) and name != DEFAULT_GROUP[1]:
        return name
    return f"~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
