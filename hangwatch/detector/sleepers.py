"""Ranks that sleep, from capture to capture. One sleep ends by itself; sleep after sleep at one place may never end.

A rank is not judged until it wakes. A rank that sleeps again at the same lines polls. If the others wait for it and no
rank progresses, then what it polls for does not happen. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from hangwatch.model import Grouping, Motion, RankId, Signature, Sleep, Value

SECONDS_AFTER_WAKING = 1.0  # the next capture then finds the rank at work, or in its next sleep
SHORTEST_PAUSE_SECONDS = 60.0  # between two captures because of sleeps


class Sleeper(Value, frozen=True):
    """The sleeps of a rank at one place, in consecutive captures. Times are CLOCK_MONOTONIC seconds.

    `since` is when the first of `sleeps` sleeps was seen, `until` the latest end of the last one. `longest_seconds` is
    the longest time that was seen to be left of one.
    """

    place: str
    since: float
    until: float
    longest_seconds: float
    sleeps: int = 1


def find_sleeps(grouping: Grouping) -> dict[RankId, Sleep]:
    """Return the sleeps in one capture."""
    return {member.id: member.stack.sleep for member in grouping.members if member.stack.sleep is not None}


def follow_sleeps(
    before: Mapping[RankId, Sleeper], sleeps: Mapping[RankId, Sleep], now: float, unix_now: float
) -> dict[RankId, Sleeper]:
    """Return the sleepers with one more capture. A rank at another place, or not asleep, begins again.

    `unix_now` is the time `now` by the clock of the node.
    """
    return {
        rank: _follow_sleep(before.get(rank), sleep, now, now + sleep.until_unix_seconds - unix_now)
        for rank, sleep in sleeps.items()
    }


def _follow_sleep(before: Sleeper | None, sleep: Sleep, now: float, until: float) -> Sleeper:
    if before is None or before.place != sleep.place:
        return Sleeper(place=sleep.place, since=now, until=until, longest_seconds=sleep.seconds)
    is_same = now < before.until  # of a relative timeout only the length is known: it seems to end ever later
    return Sleeper(
        place=sleep.place,
        since=before.since,
        until=min(before.until, until) if is_same else until,
        longest_seconds=max(before.longest_seconds, 0.0 if is_same else sleep.seconds),
        sleeps=before.sleeps + (not is_same),
    )


def find_polling(
    sleepers: Mapping[RankId, Sleeper], grouping: Grouping, now: float, hold_seconds: float
) -> frozenset[RankId]:
    """Return the ranks that poll for something that does not happen.

    Such a rank slept at least twice at the same lines, for the hold and two of its sleeps. All other ranks wait for
    ranks or their GPUs, they are at least as many, and no rank progresses.
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
    """Return the ranks that wake within the stalled hold: none of their sleeps was longer."""
    return frozenset(rank for rank, one in sleepers.items() if one.longest_seconds <= stalled_hold_seconds)


def next_capture_at(sleepers: Mapping[RankId, Sleeper], now: float, stalled_hold_seconds: float) -> float | None:
    """Return when a sleeping rank has woken; None if none sleeps. After the stalled hold nothing more is expected."""
    awaited = [
        one.until
        for rank, one in sleepers.items()
        if rank in find_asleep(sleepers, stalled_hold_seconds) and now - one.since < stalled_hold_seconds
    ]
    return max(now + SHORTEST_PAUSE_SECONDS, min(awaited) + SECONDS_AFTER_WAKING) if awaited else None
