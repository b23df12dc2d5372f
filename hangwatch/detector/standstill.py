"""Ranks that stay between the same few lines. One capture cannot judge them; several captures can. Pure.

A loop that polls a collective changes its lines like a loop that computes, and a rank at a single line may wait or
work. A rank that works moves on in minutes, or draws power; a rank that waits for ever does neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hangwatch.model import CodeRegion, Grouping, RankId, Value
from hangwatch.stacks.round_places import MOST_PLACES_OF_A_STAY

FEWEST_LOOKS = 2


class Standstill(Value, frozen=True):
    """The number of captures in a row in which a rank stayed between these places, and since when (CLOCK_MONOTONIC)."""

    stay: CodeRegion
    since: float
    captures: int = 1


def find_stays(grouping: Grouping) -> dict[RankId, CodeRegion]:
    """Return the stays in one capture."""
    return {member.id: member.stack.stay for member in grouping.members if member.stack.stay is not None}


def follow_stays(
    before: Mapping[RankId, Standstill], stays: Mapping[RankId, CodeRegion], now: float
) -> dict[RankId, Standstill]:
    """Return the standstills with one more capture.

    A rank that was seen at another place begins again. A rank that was not seen is dropped.
    """
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
    """Yield the ranks that have stayed for at least `seconds` over enough captures; `carrying_seconds` with bytes."""
    for rank, one in standstills.items():
        if one.captures >= FEWEST_LOOKS and now - one.since >= (carrying_seconds if one.stay.carries else seconds):
            yield rank
