"""Pure: pauses of a job that ended by themselves, and how much longer it may stand still where it has paused before.

A job that waits four minutes for a generation server every ten minutes looks hung each time, and goes on each time. The
place where its awaited rank stood, and for how long power was away, is learnt, and such a place pages later. A place is
the key of a group: so it says which code, never which rank, and its owner can make as many as he likes.
"""

from __future__ import annotations

from collections.abc import Collection

from hangwatch.model import Grouping, Motion, RankId, Signature, Value

FORGOTTEN_SECONDS = 86400.0
MOST_PAUSES = 64
MOST_PLACES = 16
END_MARGIN_SECONDS = 120.0  # so long before the job ends itself its hang must have paged

NOWHERE = "nowhere"
"""The place of a look that shows a hang's picture, or no stack of who is awaited: it is never learnt."""


class Pause(Value, frozen=True):
    """A place where the job stood still and went on: its longest pause there, and when one was last seen there.

    Times are CLOCK_MONOTONIC seconds.
    """

    place: str
    longest_seconds: float
    seen_at: float


class EndedPause(Value, frozen=True):
    """A pause after which power came back: where its looks found the awaited ranks, when it began, how long it was."""

    places: frozenset[str]
    began: float
    seconds: float


def places_of(grouping: Grouping, named: Collection[RankId]) -> frozenset[str]:
    """Where the ranks stand for which the others wait: the named ones, else all that are not in a wait.

    Nowhere, where every rank is in a wait, or one of these gave no stack. Empty where one of these moves: it works.
    """
    told = [group for group in grouping.groups if group.waits_for not in {"ranks", "gpu"}]
    awaited = [group for group in told if any(one.signature is not Signature.BEHIND_GPU for one in group.members)]
    if awaited and named:
        accused = frozenset(named)
        awaited = [group for group in grouping.groups if any(one.id in accused for one in group.members)]
    if any(group.motion is Motion.MOVING for group in awaited):
        return frozenset()
    places = frozenset(f"{group.key} {group.activity}" for group in awaited)
    if not awaited or not all(group.frames for group in awaited) or len(places) > MOST_PLACES:
        return frozenset({NOWHERE})
    return places


def also(places: frozenset[str], seen: frozenset[str]) -> frozenset[str]:
    """The places of a pause with those of one more look; nowhere is added where they are too many to be one pause."""
    both = places | seen
    return both if len(both) <= MOST_PLACES else places | {NOWHERE}


def learn(pauses: tuple[Pause, ...], ended: EndedPause, now: float) -> tuple[Pause, ...]:
    """The pauses with one more that ended by itself; one entry per place, those seen last are kept."""
    if NOWHERE in ended.places:
        return pauses
    known = {pause.place: pause for pause in pauses if now - pause.seen_at < FORGOTTEN_SECONDS}
    for place in sorted(ended.places):
        before = known.pop(place, None)
        longest = ended.seconds if before is None else max(before.longest_seconds, ended.seconds)
        known[place] = Pause(place=place, longest_seconds=longest, seen_at=now)
    return tuple(known.values())[-MOST_PAUSES:]


def longest_seconds(pauses: Collection[Pause], places: Collection[str], now: float) -> float | None:
    """The longest pause that is known of all of these places; None where one of them is not known, or there is none."""
    known = {pause.place: pause.longest_seconds for pause in pauses if now - pause.seen_at < FORGOTTEN_SECONDS}
    lengths = [known.get(place) for place in places]
    return None if None in lengths else min((length for length in lengths if length is not None), default=None)


def hold_seconds(longest: float | None, stalled_hold_seconds: float, collective_seconds: float | None) -> float:
    """How long a hung job may be quiet before it pages: twice its longest pause here, 0 where it is not known to pause.

    At most the stalled hold, and so long that `END_MARGIN_SECONDS` are left of what a collective waits (None: no end).
    """
    if longest is None:
        return 0.0
    ends = [] if collective_seconds is None else [collective_seconds - END_MARGIN_SECONDS]
    return max(0.0, min(2 * longest, stalled_hold_seconds, *ends))
