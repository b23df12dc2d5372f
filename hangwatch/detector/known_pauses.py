"""Known pauses: pauses of a job that ended by themselves. A job may stand still longer at such a place before it pages.

A job that waits four minutes for a generation server every ten minutes looks hung each time, and continues each time.
The place of the awaited rank and the duration of the low power are learned, and such a place pages later. A place is
the key of a group: it names the code and not the rank. The owner of a job can create any number of places. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from hangwatch.model import Grouping, Motion, RankId, Signature, Value

FORGOTTEN_SECONDS = 86400.0
MOST_PAUSES = 64
MOST_PLACES = 16
END_MARGIN_SECONDS = 120.0  # a hang must page at least this long before the collective timeout ends the job

NOWHERE = "nowhere"
"""The place of a capture that looks like a hang, or in which an awaited rank gave no stack. It is never remembered."""


class Pause(Value, frozen=True):
    """A place at which the job stopped and continued: its longest pause there, and when the last one was seen.

    Times are CLOCK_MONOTONIC seconds.
    """

    place: str
    longest_seconds: float
    seen_at: float


class EndedPause(Value, frozen=True):
    """A pause after which power came back: the places of the awaited ranks, when it began, and its length."""

    places: frozenset[str]
    began: float
    seconds: float


def find_places(grouping: Grouping, named: Collection[RankId]) -> frozenset[str]:
    """Return the places of the ranks that the others wait for: the named ranks, else all ranks that do not wait.

    `NOWHERE` if every rank waits, if an awaited rank gave no stack, or if there are too many places. Empty if an
    awaited rank progresses: the job works.
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


def add_places(places: frozenset[str], more_places: frozenset[str]) -> frozenset[str]:
    """Return the places of a pause with those of one more capture.

    Too many places are not one pause: then `NOWHERE` is added instead.
    """
    both = places | more_places
    return both if len(both) <= MOST_PLACES else places | {NOWHERE}


def add_pause(pauses: tuple[Pause, ...], ended: EndedPause, now: float) -> tuple[Pause, ...]:
    """Return the pauses with one more that ended by itself. Each place has one entry; the latest are kept."""
    if NOWHERE in ended.places:
        return pauses
    known = {pause.place: pause for pause in pauses if now - pause.seen_at < FORGOTTEN_SECONDS}
    for place in sorted(ended.places):
        before = known.pop(place, None)
        longest = ended.seconds if before is None else max(before.longest_seconds, ended.seconds)
        known[place] = Pause(place=place, longest_seconds=longest, seen_at=now)
    return tuple(known.values())[-MOST_PAUSES:]


def longest_seconds(pauses: Collection[Pause], places: Collection[str], now: float) -> float | None:
    """Return the longest pause that is known of all these places; None if a place is not known, or there is none."""
    known = {pause.place: pause.longest_seconds for pause in pauses if now - pause.seen_at < FORGOTTEN_SECONDS}
    lengths = [known.get(place) for place in places]
    return None if None in lengths else min((length for length in lengths if length is not None), default=None)


def hold_seconds(longest: float | None, stalled_hold_seconds: float, collective_seconds: float | None) -> float:
    """Return for how long a hung job may be quiet before it pages: twice its longest pause at this place, else 0.

    At most the stalled hold, and at most until `END_MARGIN_SECONDS` before the collective timeout (None: no timeout).
    """
    if longest is None:
        return 0.0
    ends = [] if collective_seconds is None else [collective_seconds - END_MARGIN_SECONDS]
    return max(0.0, min(2 * longest, stalled_hold_seconds, *ends))
