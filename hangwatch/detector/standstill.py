"""Pure: ranks that stand between the same few lines from look to look. What one look cannot tell of them, several can.

A loop that asks whether a collective is over changes its lines as one that computes does, and a rank at one line may
wait or work. What works goes elsewhere in minutes, or draws power; what waits for ever does neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hangwatch.model import Grouping, RankId, Stay, Value
from hangwatch.stacks.progress import MOST_PLACES_OF_A_STAY

FEWEST_LOOKS = 2


class Standstill(Value, frozen=True):
    """In how many looks in a row a rank stood between these places, and since when, on CLOCK_MONOTONIC."""

    stay: Stay
    since: float
    looks: int = 1


def of(grouping: Grouping) -> dict[RankId, Stay]:
    """The stays of a look."""
    return {member.id: member.stack.stay for member in grouping.members if member.stack.stay is not None}


def followed(before: Mapping[RankId, Standstill], found: Mapping[RankId, Stay], now: float) -> dict[RankId, Standstill]:
    """What was known with one more look: who is not in it, or stands elsewhere, begins anew."""
    return {rank: _followed(before.get(rank), stay, now) for rank, stay in found.items()}


def _followed(before: Standstill | None, stay: Stay, now: float) -> Standstill:
    if before is None or before.stay.within != stay.within:
        return Standstill(stay=stay, since=now)
    places = tuple(sorted({*before.stay.places, *stay.places}))
    if len(places) > MOST_PLACES_OF_A_STAY:
        return Standstill(stay=stay, since=now)
    return Standstill(stay=Stay(within=stay.within, places=places), since=before.since, looks=before.looks + 1)


def settled(known: Mapping[RankId, Standstill], now: float, seconds: float) -> Iterator[RankId]:
    """The ranks that have stood so for so many seconds, by enough looks."""
    for rank, one in known.items():
        if one.looks >= FEWEST_LOOKS and now - one.since >= seconds:
            yield rank
