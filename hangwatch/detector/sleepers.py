"""Follow ranks that stay at one place from capture to capture: asleep, or between the same few lines of code. Pure.

A single sleep ends by itself, but sleeps may repeat forever. A rank is not judged until it wakes. A rank that sleeps
again and again at the same lines polls. If the other ranks wait for it and no rank progresses, the event for which it
polls does not happen.

A loop that polls a collective changes its lines like a loop that computes. A rank at a single line may wait or work.
Within minutes, a rank that works reaches other lines or draws power. A rank that waits forever does neither.
"""

from collections.abc import Iterator, Mapping, Set

from msgspec.structs import replace

from hangwatch.model import CodeRegion, Grouping, Motion, RankId, Signature, Sleep, Value
from hangwatch.stacks.round_places import MOST_PLACES_OF_A_STAY

SECONDS_AFTER_WAKING = 1.0  # the next capture then finds the rank at work, or in its next sleep
SHORTEST_PAUSE_SECONDS = 60.0  # between two captures that are taken because a sleep ends


class Sleeper(Value, frozen=True):
    """A rank that consecutive captures found asleep at the same place. Times are CLOCK_MONOTONIC seconds.

    `sleeps` counts its sleeps. `since` is the time of the first capture that found it asleep. `until` is the
    expected end of the last sleep. `longest_seconds` is the longest remaining time of a sleep that a capture found.
    """

    place: str
    since: float
    until: float
    longest_seconds: float
    sleeps: int = 1


def find_sleeps(grouping: Grouping) -> dict[RankId, Sleep]:
    """Return the sleeps that one capture found, by rank."""
    return {member.id: member.stack.sleep for member in grouping.members if member.stack.sleep is not None}


def follow_sleeps(
    before: Mapping[RankId, Sleeper], sleeps: Mapping[RankId, Sleep], now: float, unix_now: float
) -> dict[RankId, Sleeper]:
    """Return the sleepers after one more capture, which found `sleeps`.

    For a rank that sleeps at another place, counting begins again. A rank that is not asleep is dropped. `unix_now`
    is the moment `now` as Unix time.
    """
    return {
        rank: _follow_sleep(before.get(rank), sleep, now, now + sleep.until_unix_seconds - unix_now)
        for rank, sleep in sleeps.items()
    }


def _follow_sleep(before: Sleeper | None, sleep: Sleep, now: float, until: float) -> Sleeper:
    if before is None or before.place != sleep.place:
        return Sleeper(place=sleep.place, since=now, until=until, longest_seconds=sleep.seconds)
    is_same = now < before.until  # of a relative timeout only the length is known, so its end seems to move
    return replace(
        before,
        until=min(before.until, until) if is_same else until,
        longest_seconds=max(before.longest_seconds, 0.0 if is_same else sleep.seconds),
        sleeps=before.sleeps + (not is_same),
    )


def find_polling(
    sleepers: Mapping[RankId, Sleeper], grouping: Grouping, now: float, hold_seconds: float
) -> frozenset[RankId]:
    """Return the ranks that poll for an event that does not happen.

    Such a rank slept at least twice at the same lines, over at least the hold and twice its longest sleep. All
    other ranks wait for ranks or their GPUs, no rank progresses, and at least as many ranks wait as poll.
    """
    polling = frozenset(
        rank
        for rank, one in sleepers.items()
        if one.sleeps > 1 and now - one.since >= max(hold_seconds, 2 * one.longest_seconds)
    )
    return polling if polling and _are_awaited(polling, grouping) else frozenset()


def _are_awaited(polling: Set[RankId], grouping: Grouping) -> bool:
    others = [(group, one) for group in grouping.groups for one in group.members if one.id not in polling]
    may_move = any(one.motion is Motion.MOVING for one in grouping.members)
    wait = all(group.waits_for in ("ranks", "gpu") or one.signature is Signature.BEHIND_GPU for group, one in others)
    return wait and not may_move and len(others) >= len(polling)


def find_asleep(sleepers: Mapping[RankId, Sleeper], stalled_hold_seconds: float) -> frozenset[RankId]:
    """Return the ranks that will wake soon: none of their sleeps was longer than the stalled hold."""
    return frozenset(rank for rank, one in sleepers.items() if one.longest_seconds <= stalled_hold_seconds)


def next_capture_at(sleepers: Mapping[RankId, Sleeper], now: float, stalled_hold_seconds: float) -> float | None:
    """Return the time shortly after the next sleeping rank has woken; None if no rank will wake soon.

    A rank that has slept again and again for the stalled hold is ignored.
    """
    awaited = [
        one.until
        for rank, one in sleepers.items()
        if rank in find_asleep(sleepers, stalled_hold_seconds) and now - one.since < stalled_hold_seconds
    ]
    return max(now + SHORTEST_PAUSE_SECONDS, min(awaited) + SECONDS_AFTER_WAKING) if awaited else None


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
    if len(places) > MOST_PLACES_OF_A_STAY:
        return Standstill(stay=stay, since=now)
    region = replace(stay, places=places, carries=before.stay.carries or stay.carries)
    return replace(before, stay=region, captures=before.captures + 1)


def find_settled(
    standstills: Mapping[RankId, Standstill], now: float, seconds: float, carrying_seconds: float
) -> Iterator[RankId]:
    """Yield the ranks that at least two captures, at least `seconds` apart, found between the same few lines of code.

    A rank with a process that carries bytes must have stayed there for `carrying_seconds`.
    """
    for rank, one in standstills.items():
        if one.captures >= FEWEST_LOOKS and now - one.since >= (carrying_seconds if one.stay.carries else seconds):
            yield rank
