"""Follow ranks that stay between the same few lines of code. Several captures are needed to judge them. Pure.

A loop that polls a collective changes its lines like a loop that computes. A rank at a single line may wait or
work. Within minutes, a rank that works reaches other lines or draws power. A rank that waits forever does neither.
"""

from collections.abc import Iterator, Mapping

from hangwatch.model import CodeRegion, Grouping, RankId, Value
from hangwatch.stacks.round_places import MOST_PLACES_OF_A_STAY

FEWEST_LOOKS = 2


class Standstill(Value, frozen=True):
    """Captures in a row that found a rank between the same few lines since `since` (CLOCK_MONOTONIC, seconds)."""

    stay: CodeRegion
    since: float
    captures: int = 1


def find_stays(grouping: Grouping) -> dict[RankId, CodeRegion]:
    """Return by rank the few lines of code between which a capture found the rank."""
    return {member.id: member.stack.stay for member in grouping.members if member.stack.stay is not None}


def follow_stays(
    before: Mapping[RankId, Standstill], stays: Mapping[RankId, CodeRegion], now: float
) -> dict[RankId, Standstill]:
    """Return the standstills of these ranks after one more capture. At other lines, counting begins again."""
    return {rank: _follow_stay(before.get(rank), stay, now) for rank, stay in stays.items()}


def _follow_stay(before: Standstill | None, stay: CodeRegion, now: float) -> Standstill:
    if before is None or before.stay.within != stay.within:
        return Standstill(stay=stay, since=now)
    places = tuple(sorted({*before.stay.places, *stay.places}))
    carries = before.stay.carries or stay.carries
    if len(places) > MOST_PLACES_OF_A_STAY:
        return Standstill(stay=stay, since=now)
    return Standstill(
        stay=CodeRegion(within=stay.within, places=places, carries=carries),
        since=before.since,
        captures=before.captures + 1,
    )


def find_settled(
    standstills: Mapping[RankId, Standstill], now: float, seconds: float, carrying_seconds: float
) -> Iterator[RankId]:
    """Yield the ranks that at least two captures, at least `seconds` apart, found between the same few lines of code.

    A rank with a process that carries bytes must have stayed there for `carrying_seconds`.
    """
    for rank, one in standstills.items():
        if one.captures >= FEWEST_LOOKS and now - one.since >= (carrying_seconds if one.stay.carries else seconds):
            yield rank
