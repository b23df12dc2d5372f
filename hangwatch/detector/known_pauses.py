"""Known pauses: pauses of a job that ended by themselves. At the place of a known pause, a job pages later. Pure.

For example, a job waits four minutes for a generation server every ten minutes. It looks hung each time, and
continues each time. The detector learns the place of the awaited rank and the duration of the low power. A place is
the key and activity of a group: it identifies the code, not the rank. The number of places is limited, because the
owner of a job can create any number of them.
"""

from collections.abc import Collection

from hangwatch.model import Grouping, Motion, RankId, Signature, Value

FORGOTTEN_SECONDS = 86400.0
MOST_PAUSES = 64
MOST_PLACES = 16
# A hang must page at least this long before the collective timeout ends the job
END_MARGIN_SECONDS = 120.0

NOWHERE = "nowhere"
"""The place of a capture without a usable place, see `find_places`, or of a hang that cannot end by itself.

A pause there is not learned."""


class Pause(Value, frozen=True):
    """A place at which the job has paused and continued, with the longest of these pauses.

    `seen_at` is the time of the last pause, in CLOCK_MONOTONIC seconds.
    """

    place: str
    longest_seconds: float
    seen_at: float


class EndedPause(Value, frozen=True):
    """A pause after which power came back, with the places of the ranks for which the other ranks waited.

    `began` is in CLOCK_MONOTONIC seconds, `seconds` is the length of the pause.
    """

    places: frozenset[str]
    began: float
    seconds: float


def find_places(grouping: Grouping, named: Collection[RankId]) -> frozenset[str]:
    """Return the places of the awaited ranks.

    Awaited are the `named` ranks, else all ranks that wait neither for a rank nor for a GPU. The result is
    `NOWHERE` alone if every rank waits, if an awaited rank has no stack, or if there are too many places. It is
    empty if an awaited rank progresses, because the job then works.
    """
    busy_groups = [group for group in grouping.groups if group.waits_for not in {"ranks", "gpu"}]
    awaited = [
        group for group in busy_groups if any(member.signature is not Signature.BEHIND_GPU for member in group.members)
    ]
    if awaited and named:
        awaited = [group for group in grouping.groups if any(member.id in named for member in group.members)]
    if any(group.motion is Motion.MOVING for group in awaited):
        return frozenset()
    places = frozenset(f"{group.key} {group.activity}" for group in awaited)
    if not awaited or not all(group.frames for group in awaited) or len(places) > MOST_PLACES:
        return frozenset({NOWHERE})
    return places


def add_places(places: frozenset[str], more_places: frozenset[str]) -> frozenset[str]:
    """Return the places of a pause together with those that one more capture found.

    If there are more than `MOST_PLACES`, this is not a single pause: then only `NOWHERE` is added.
    """
    both = places | more_places
    return both if len(both) <= MOST_PLACES else places | {NOWHERE}


def add_pause(pauses: tuple[Pause, ...], ended: EndedPause, now: float) -> tuple[Pause, ...]:
    """Return the known pauses with one more pause. Each place is in one entry. The latest `MOST_PAUSES` are kept."""
    if NOWHERE in ended.places:
        return pauses
    known = {pause.place: pause for pause in pauses if now - pause.seen_at < FORGOTTEN_SECONDS}
    for place in sorted(ended.places):
        before = known.pop(place, None)
        longest = ended.seconds if before is None else max(before.longest_seconds, ended.seconds)
        known[place] = Pause(place=place, longest_seconds=longest, seen_at=now)
    return tuple(known.values())[-MOST_PAUSES:]


def longest_seconds(pauses: Collection[Pause], places: Collection[str], now: float) -> float | None:
    """Return the shortest of the longest known pauses at these places, in seconds; None if a place has none."""
    known = {pause.place: pause.longest_seconds for pause in pauses if now - pause.seen_at < FORGOTTEN_SECONDS}
    lengths = [known.get(place) for place in places]
    return None if None in lengths else min((length for length in lengths if length is not None), default=None)


def hold_seconds(longest: float | None, stalled_hold_seconds: float, collective_seconds: float | None) -> float:
    """Return the seconds for which a hung job may be quiet before it pages: twice its longest pause.

    The result is 0 without a pause (`longest` is None). It is at most the stalled hold, and ends at least
    `END_MARGIN_SECONDS` before the collective timeout. `collective_seconds` is None without such a timeout.
    """
    if longest is None:
        return 0.0
    ends = [] if collective_seconds is None else [collective_seconds - END_MARGIN_SECONDS]
    return max(0.0, min(2 * longest, stalled_hold_seconds, *ends))
