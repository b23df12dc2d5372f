"""Pure: what NCCL's RAS says of communicators, to the progress of each rank, as an `Answer` of `wait_graph`.

NCCL counts what each rank has launched, on the host. A launched operation may be done, so a higher count is no wait: a
rank is named only if the stack of a rank that is ahead shows a wait. The rank with the lowest count of a communicator,
the same in all answers, has not joined. A count that rises tells nothing, and neither does a communicator of which a
rank did not respond.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from hangwatch import words
from hangwatch.collectives.wait_graph import Answer, Stance, judge
from hangwatch.formats.nccl_ras_status import COLLECTIVES, Communicator, RasRank, RasStatus
from hangwatch.model import (
    Enqueued,
    Evidence,
    GroupRecords,
    Launched,
    Member,
    Motion,
    NcclRas,
    ProcessId,
    RankId,
    Recorded,
)

_MOST_LAUNCHED = 8  # of one rank
_ELSEWHERE_SHOWN = 4
_SHOWN = 4
_MOST_IDS = 64

Names = Mapping[tuple[str, int], ProcessId]
"""The ranks of a node by address and pid, as they know themselves."""


def of_ranks(
    answers: Sequence[tuple[float, RasStatus]], names: Names, ranks: Sequence[ProcessId], world_size: int | None
) -> dict[ProcessId, NcclRas]:
    """What the answers, each with its time, say of the ranks of one node; of whom they say nothing is left out."""
    still = _that_stand_still([status for _, status in answers])
    counted: dict[ProcessId, list[Launched]] = defaultdict(list)
    even: dict[ProcessId, int] = defaultdict(int)
    belongs: dict[ProcessId, int] = defaultdict(int)
    for one in answers[-1][1].communicators:
        seats = _seats(one, names, ranks, world_size)
        for process in seats:
            belongs[process] += 1
            even[process] += one.name in still and _is_even(one)
        if one.name in still:
            for process, launched in _uneven(one, seats, names):
                counted[process].append(launched)
    return {
        process: NcclRas(
            version=answers[-1][1].version,
            answers=len(answers),
            seconds=answers[-1][0] - answers[0][0],
            communicators=belongs[process],
            even=even[process],
            launched=tuple(sorted(counted[process], key=lambda one: one.count is not None)[:_MOST_LAUNCHED]),
        )
        for process in belongs
    }


def _that_stand_still(statuses: Sequence[RasStatus]) -> set[str]:
    """The communicators that are there in every answer, and the same."""
    first, *others = ({one.name: one for one in status.communicators} for status in statuses)
    return {name for name, one in first.items() if one.is_running and all(other.get(name) == one for other in others)}


def _seats(
    one: Communicator, names: Names, ranks: Iterable[ProcessId], world_size: int | None
) -> dict[ProcessId, list[RasRank]]:
    """The ranks of a communicator that are processes of this node; one that is not listed has launched `rest`.

    In a communicator that is as large as the job, every rank of the job is one of its.
    """
    seats: dict[ProcessId, list[RasRank]] = defaultdict(list)
    for rank in (*one.ranks, *one.unreached):
        if (process := names.get((rank.host, rank.pid))) is not None:
            seats[process].append(rank)
    if one.rest and one.size == world_size and len(one.ranks) < one.size:
        operations = [name for name, _ in one.rest]
        counts = tuple((name, count) for name, count in one.rest if operations.count(name) == 1)
        for process in ranks:
            if process not in seats:
                seats[process] = [RasRank(rank=one.size, counts=counts)]
    return seats


def _is_even(one: Communicator) -> bool:
    return one.is_listed and not one.unreached and len({rank.counts for rank in one.ranks}) == 1


def _uneven(
    one: Communicator, seats: Mapping[ProcessId, Sequence[RasRank]], names: Names
) -> Iterator[tuple[ProcessId, Launched]]:
    lost = {process for process, ranks in seats.items() if any(rank in one.unreached for rank in ranks)}
    for process in lost:
        yield process, _launched(one, "", None, [0], _elsewhere(one.unreached, names))
    for operation in COLLECTIVES:
        by_rank = {rank: count for rank in one.ranks for name, count in rank.counts if name == operation}
        reached = [*by_rank.values(), *(count for name, count in one.rest if name == operation)]
        if len(set(reached)) < 2:
            continue
        late = [rank for rank, count in by_rank.items() if count == min(reached)]
        away = _elsewhere((*one.unreached, *late), names)
        for process, ranks in seats.items():
            counts = [count for rank in ranks for name, count in rank.counts if name == operation]
            if counts and process not in lost:
                yield process, _launched(one, operation, min(counts), reached, away)


def _launched(
    one: Communicator, operation: str, count: int | None, reached: Sequence[int], elsewhere: tuple[str, ...]
) -> Launched:
    return Launched(
        communicator=one.name.partition("/")[0],
        size=one.size,
        operation=operation,
        count=count,
        lowest=min(reached),
        highest=max(reached),
        is_whole=not one.unreached and (one.is_listed or bool(one.rest)),
        elsewhere=elsewhere,
    )


def _elsewhere(ranks: Iterable[RasRank], names: Names) -> tuple[str, ...]:
    """Those that are no processes of this node, in words."""
    found = [
        f"its rank {rank.rank} (process {rank.pid} at {rank.host})"
        for rank in ranks
        if rank.host and (rank.host, rank.pid) not in names
    ]
    return tuple(found[:_ELSEWHERE_SHOWN])


# --- who is behind ---------------------------------------------------------------------------------------------------


def answer(members: Sequence[Member], stance: Callable[[Member], Stance], world_size: int | None) -> Answer:
    """Which ranks have not come, by flight recorders; where these tell nothing, by NCCL's own counts.

    By counts: else which ranks NCCL does not reach; else that none is behind. A rank is named that is behind as if a
    flight recorder said so; one that is behind and not named is a first look.
    """
    recorded = judge(members, stance, world_size)
    if recorded.meetings:
        return recorded
    if all(member.nccl_ras is None for member in members):
        return Answer("unknown", by_counts=True)
    found = _judged(members, stance, world_size, lambda member: stance(member) == "waits")
    if found.named:
        return found
    found = _judged(members, stance, world_size, lambda member: member.motion is not Motion.MOVING)
    behind = tuple(sorted({rank for one in found.meetings for rank in one.missing}))
    ahead = {rank for one in found.meetings for rank in one.waiting}
    if found.kind == "circle":
        return found
    if behind and len(behind) <= len(ahead):
        return found._replace(kind="not_come", named=(), first_look=behind)
    found = found._replace(kind="unknown", first_look=())
    lost = tuple(member.id.rank for member in members if is_lost(member) and member.id.rank is not None)
    if lost and 2 * len(lost) <= len(members):
        return found._replace(kind="not_reached", first_look=lost)
    is_even = all(ras is not None and 0 < ras.communicators == ras.even for ras in (one.nccl_ras for one in members))
    if is_even and all(stance(member) == "waits" for member in members):
        return found._replace(kind="everybody")
    return found


def _judged(
    members: Sequence[Member],
    stance: Callable[[Member], Stance],
    world_size: int | None,
    may_wait: Callable[[Member], bool],
) -> Answer:
    found = judge([_as_recorded(member, is_open=may_wait(member)) for member in members], stance, world_size)
    return found._replace(by_counts=True, came=frozenset())


def is_lost(member: Member) -> bool:
    """Whether NCCL does not reach it in some communicator."""
    return any(one.count is None for one in _launched_by(member))


def is_ahead(member: Member) -> bool:
    """Whether it has launched more than others, for whom it may wait."""
    return any(one.count is not None and one.count > one.lowest for one in _launched_by(member))


def _launched_by(member: Member) -> tuple[Launched, ...]:
    return member.nccl_ras.launched if member.nccl_ras is not None else ()


def _as_recorded(member: Member, *, is_open: bool) -> Member:
    """The member with its counts in the form of a flight recorder: what it has launched and others have not `is_open`.

    A communicator of which somebody did not answer is left out: who is last is not known.
    """
    seconds = member.nccl_ras.seconds if member.nccl_ras else 0.0
    groups = tuple(
        GroupRecords(
            library="nccl",
            name=f"{one.communicator} {one.operation}",
            description=f"communicator {one.communicator}",
            number=one.count,
            operations=(_open(one, seconds),) if is_open and one.count > one.lowest else (),
        )
        for one in _launched_by(member)
        if one.count is not None and one.is_whole
    )
    return replace(member, recorded=(Recorded(library="nccl", groups=groups),) if member.nccl_ras else ())


def _open(one: Launched, seconds: float) -> Enqueued:
    """The first of what others have not launched."""
    return Enqueued(
        number=one.lowest + 1,
        operation=one.operation,
        order=0,
        created_unix_seconds=0.0,
        open_seconds=seconds,
        stays_open=True,
    )


# --- in words --------------------------------------------------------------------------------------------------------


def evidence(members: Iterable[Member]) -> tuple[Evidence, ...]:
    """What NCCL said, with its numbers: of each communicator whose ranks are not alike, else that all are."""
    asked = [(member, member.nccl_ras) for member in members if member.nccl_ras is not None]
    found: dict[tuple[str, str], list[tuple[RankId, Launched]]] = defaultdict(list)
    for member, ras in asked:
        for one in ras.launched:
            found[one.communicator, one.operation].append((member.id, one))
    if found:
        by = _by(asked[0][1])
        lines = sorted(found.items(), key=lambda item: (item[0][1] != "", item[0]))[:_SHOWN]
        return tuple(_evidence(by, [who for who, _ in said], _line(said)) for _, said in lines)
    if asked and all(0 < ras.communicators == ras.even for _, ras in asked):
        said = "all ranks of each communicator have launched as much of everything, and nothing more meanwhile"
        return (_evidence(_by(asked[0][1]), [member.id for member, _ in asked], said),)
    return ()


def _by(ras: NcclRas) -> str:
    seconds = words.duration(round(ras.seconds) or ras.seconds)
    return f"NCCL {ras.version} says of itself, the same {ras.answers} times in {seconds}"


def _evidence(by: str, ids: Sequence[RankId], said: str) -> Evidence:
    return Evidence(kind="nccl_ras", message=f"{by}: {said}", ranks=tuple(ids[:_MOST_IDS]))


def _line(said: Sequence[tuple[RankId, Launched]]) -> str:
    """What each has launched in one communicator, the lowest first; and who is behind of those that are not here."""
    one = said[0][1]
    by_count: dict[int | None, list[RankId]] = defaultdict(list)
    for rank, launched in said:
        by_count[launched.count].append(rank)
    shown = sorted(by_count.items(), key=lambda item: (item[0] is not None, item[0] or 0))[:_SHOWN]
    parts = [_part(count, ids, one.operation) for count, ids in shown]
    if one.count is not None and min(count for count in by_count if count is not None) > one.lowest:
        parts.append(f"others {one.lowest:,}" + (f": {words.listing(one.elsewhere)}" if one.elsewhere else ""))
    elif one.elsewhere:
        parts.append(f"so behind, or not reached, too: {words.listing(one.elsewhere)}")
    return f"of communicator {one.communicator} with {words.count(one.size)}, {'; '.join(parts)}"


def _part(count: int | None, ids: Sequence[RankId], operation: str) -> str:
    known = [one for one in ids if one.rank is not None]
    who = words.who([RankId(rank=one.rank) for one in known] if len(known) == len(ids) else ids)
    if count is None:
        return f"{who} {'does' if len(ids) == 1 else 'do'} not answer it"
    what = "collectives" if operation == "collective" else operation
    return f"{who} {'has' if len(ids) == 1 else 'have'} launched {count:,} {what}"
