"""Arrival order: the rank that enqueues the collectives of its groups later than the other ranks. Pure.

Collectives of ranks are matched by group and number, never by time. Ranks are compared at one *place*: a group, an
operation with its sizes, and the position in the step. After the first collective of a step all ranks are level again,
so a median over all collectives shows nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from math import hypot, sqrt
from typing import Literal, NamedTuple

from msgspec import field
from msgspec.structs import replace

from hangwatch.model import ProcessId, Value, list_by_key, median
from hangwatch.model.flight_records import Library, RankRecords

FEWEST_RECORDS = 300  # at one place
LATE_RATIO, LATE_IN_HALF_RATIO = 0.03, 0.015  # of the step
SURE_STANDARD_ERRORS = 6.0
MOST_SHOWN_STANDARD_ERRORS = 1000.0
MOST_ROWS = 400  # of one place, from one reading
MOST_PLACES = 64  # of one reading
MOST_READINGS = 1440
MOST_SIZES = 8  # of one collective; more do not distinguish places
_OUTLIERS = 256  # one in so many gaps is an outlier, such as a checkpoint


class Enqueued(NamedTuple):
    """A collective that a rank enqueued. `number` is its sequence number in the group with this name."""

    library: Library
    group: str
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    number: int
    unix_ns: int


class Place(Value, frozen=True):
    """A collective of the step. `position` counts the collectives of the group since the last long gap, from 0."""

    library: Library
    group: str
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    position: int


class PlaceSamples(NamedTuple):
    """Samples of one place: a row for each collective.

    `lateness` has the rows one after the other: seconds of each of `ranks` behind the median of the others. `times`
    are in Unix seconds, of the median rank. `last` has the index of the last rank in each row.
    """

    ranks: tuple[ProcessId, ...]
    lateness: array[float]
    times: array[float]
    last: array[int]


class Window(NamedTuple):
    """The samples of one job, by reading, and the number of the last collective that was used, by group."""

    readings: tuple[Mapping[Place, PlaceSamples], ...] = ()
    last_used: Mapping[tuple[Library, str], int] = {}


class ArrivalOrder(Value, frozen=True):
    """The order of the ranks of a job at the place where the latest rank is named, or is latest.

    `reason` tells why no rank is named; it is empty if `latest` is named. `lateness_seconds` is the median of each
    rank. `lateness_ratio` (of the step), `standard_errors` (above the next rank) and `last_ratio` (of the collectives
    in which it was last) are those of `latest`. `ready_in_seconds`: the time until there are enough records; None if
    unknown. `differences`: see `rank_differences`; only of a named rank.
    """

    reason: Literal["", "NoRecords", "TooFewRecords", "NoneLate", "LateByRole"]
    latest: ProcessId | None = None
    place: Place | None = None
    records: int = 0
    step_seconds: float = 0.0
    lateness_seconds: Mapping[ProcessId, float] = field(default_factory=dict)
    lateness_ratio: float = 0.0
    standard_errors: float = 0.0
    last_ratio: float = 0.0
    ready_in_seconds: float | None = None
    differences: tuple[str, ...] = ()

    @property
    def named(self) -> ProcessId | None:
        """The rank that is named; None if no rank is."""
        return None if self.reason else self.latest


def list_collectives(recorder: RankRecords, uncounted: Collection[int]) -> list[Enqueued]:
    """Return the collectives of a recorder, without those of the `uncounted` groups (ids).

    Of several groups with the same name, the newest one counts. Groups without a name cannot be distinguished.
    """
    counted = [
        record
        for record in recorder.records
        if record.group_name and record.group_id not in uncounted and not record.is_p2p and not record.is_coalesced_part
    ]
    ids = list_by_key((record.group_name, record.group_id) for record in counted)
    newest = {name: max(of_name) for name, of_name in ids.items()}
    return [
        Enqueued(
            recorder.library,
            record.group_name,
            record.operation.rpartition(":")[2],
            record.input_sizes[:MOST_SIZES],
            record.collective_seq,
            record.created_unix_ns,
        )
        for record in counted
        if record.group_id == newest[record.group_name]
    ]


def add_reading(window: Window, by_rank: Mapping[ProcessId, Iterable[Enqueued]], seconds: float) -> Window:
    """Return the window with the collectives that all ranks of their group have enqueued since the last reading.

    `by_rank` has all collectives that the recorders hold, also the used ones: they show where a step begins. Old
    readings are dropped if the others last `seconds` and have enough records.
    """
    groups: dict[tuple[Library, str], dict[ProcessId, dict[int, Enqueued]]] = defaultdict(dict)
    for rank, collectives in by_rank.items():
        for collective in collectives:
            groups[collective.library, collective.group].setdefault(rank, {})[collective.number] = collective
    if not groups:
        return window
    last_used = {key: window.last_used.get(key, 0) for key in groups}
    rows: dict[Place, list[tuple[int, ...]]] = {}
    ranks_at: dict[Place, tuple[ProcessId, ...]] = {}
    for key, by_number in groups.items():
        common = sorted(set.intersection(*map(set, by_number.values()))) if len(by_number) > 1 else []
        if not common:
            continue
        used, last_used[key] = last_used[key], common[-1]
        middle = [_middle([numbers[number].unix_ns for numbers in by_number.values()]) for number in common]
        for number, position in zip(common, _find_positions(middle), strict=True):
            if position is None or (number <= used <= common[-1]):  # numbers fall if the group is made anew
                continue
            row: dict[tuple[str, tuple[tuple[int, ...], ...]], dict[ProcessId, int]] = {}
            for rank, numbers in by_number.items():
                collective = numbers[number]
                row.setdefault((collective.operation, collective.sizes), {})[rank] = collective.unix_ns
            for (operation, sizes), times in row.items():
                place = Place(library=key[0], group=key[1], operation=operation, sizes=sizes, position=position)
                if len(times) > 1 and ranks_at.setdefault(place, tuple(times)) == tuple(times):
                    rows.setdefault(place, []).append(tuple(times.values()))
    first_places = sorted(rows, key=lambda place: place.position)[:MOST_PLACES]
    new = {place: _make_samples(ranks_at[place], rows[place][-MOST_ROWS:]) for place in first_places}
    readings = (*window.readings, new) if new else window.readings
    while len(readings) > 1 and (len(readings) > MOST_READINGS or _is_enough(readings[1:], seconds)):
        readings = readings[1:]
    return Window(readings, last_used)


def _middle(times: Sequence[int]) -> int:
    return sorted(times)[len(times) // 2]


def _find_positions(times: Sequence[int]) -> list[int | None]:
    """Return the position of each collective of a group in its step; None before the first step.

    A step begins after a long gap: one that is longer than half of the gaps that fill most of the time.
    """
    gaps = [later - earlier for earlier, later in pairwise(times)]
    falling = sorted(gaps, reverse=True)
    falling = [min(gap, falling[len(falling) // _OUTLIERS]) for gap in falling]
    border = falling[max(range(len(falling)), key=lambda index: (index + 1) * falling[index])] / 2 if falling else 0
    positions: list[int | None] = [None]
    for gap in gaps:
        before = positions[-1]
        positions.append(0 if gap > border else None if before is None else before + 1)
    return positions[: len(times)]


def _make_samples(ranks: tuple[ProcessId, ...], rows: Iterable[Sequence[int]]) -> PlaceSamples:
    samples = PlaceSamples(ranks, array("f"), array("d"), array("l"))
    for times in rows:
        samples.lateness.extend(_behind_others(times))
        samples.times.append(_middle(times) / 1e9)
        samples.last.append(max(range(len(times)), key=times.__getitem__))
    return samples


def _behind_others(times: Sequence[int]) -> list[float]:
    """Return the seconds of each time (ns) behind the median of the other times. There are at least two."""
    ordered = sorted(times)
    low, high = (len(times) - 2) // 2, (len(times) - 1) // 2  # the middle of the others
    below, between, above = (
        (ordered[low + (own <= low)] + ordered[high + (own <= high)]) / 2 for own in (low, high, len(times))
    )
    first, second = ordered[low], ordered[high]
    return [(time - (below if time <= first else between if time <= second else above)) / 1e9 for time in times]


def _is_enough(readings: Sequence[Mapping[Place, PlaceSamples]], seconds: float) -> bool:
    counts = Counter[Place]()
    for reading in readings:
        for place, samples in reading.items():
            counts[place] += len(samples.times)
    place, count = max(counts.items(), key=lambda item: item[1])
    at_place = [reading[place].times for reading in readings if place in reading]
    return count >= FEWEST_RECORDS and at_place[-1][-1] - at_place[0][0] >= seconds


def judge(window: Window, seconds: float) -> ArrivalOrder:
    """Return the arrival order of a job, and name a rank if the records of `seconds` prove that it is late.

    A rank is named if its median lateness is 3 % of the step, 6 standard errors above that of the next rank, and 1.5 %
    in both halves of the time. A rank that is late in only one of its groups, or only at places that most ranks do not
    have, is late by role and not named.
    """
    places = _merge(window.readings)
    if not places:
        return ArrivalOrder(reason="NoRecords")
    enough = {place: samples for place, samples in places.items() if _is_enough([{place: samples}], seconds)}
    if not enough:
        place, samples = max(places.items(), key=lambda item: len(item[1].times))
        return ArrivalOrder(
            reason="TooFewRecords",
            place=place,
            records=len(samples.times),
            ready_in_seconds=_ready_in_seconds(window.readings, place, samples, seconds),
        )
    orders = [_compare(place, samples) for place, samples in enough.items()]
    candidates = [order for order in orders if order.named]
    named = [order for order in candidates if order.named and not _is_role(order.named, orders)]
    latest = max(named or candidates or orders, key=lambda order: order.lateness_ratio)
    return latest if named or not candidates else replace(latest, reason="LateByRole")


def _merge(readings: Sequence[Mapping[Place, PlaceSamples]]) -> dict[Place, PlaceSamples]:
    """Return the samples of each place, of the readings in which the same ranks as in the last one were there."""
    newest = {place: samples.ranks for reading in readings for place, samples in reading.items()}
    merged = {place: PlaceSamples(ranks, array("f"), array("d"), array("l")) for place, ranks in newest.items()}
    for reading in readings:
        for place, samples in reading.items():
            if samples.ranks == newest[place]:
                merged[place].lateness.extend(samples.lateness)
                merged[place].times.extend(samples.times)
                merged[place].last.extend(samples.last)
    return merged


def _ready_in_seconds(
    readings: Sequence[Mapping[Place, PlaceSamples]], place: Place, samples: PlaceSamples, seconds: float
) -> float | None:
    """Return the time until there are enough records; None before the second reading shows their rate."""
    first = next(reading[place] for reading in readings if place in reading)
    passed = samples.times[-1] - first.times[-1]
    if passed <= 0:
        return None
    per_second = (len(samples.times) - len(first.times)) / passed
    missing_seconds = seconds - (samples.times[-1] - samples.times[0])
    return max(0.0, missing_seconds, (FEWEST_RECORDS - len(samples.times)) / per_second)


def _compare(place: Place, samples: PlaceSamples) -> ArrivalOrder:
    """Return the order at one place; its latest rank is named if it is late."""
    count, ranks = len(samples.times), samples.ranks
    step = max(1e-9, median(later - earlier for earlier, later in pairwise(samples.times)))
    columns = [samples.lateness[index :: len(ranks)] for index in range(len(ranks))]
    ordered = [sorted(column) for column in columns]
    middle, reach = count // 2, int(SURE_STANDARD_ERRORS / 2 * sqrt(count))
    order = sorted(range(len(ranks)), key=lambda index: ordered[index][middle])
    latest, following = order[-1], order[-2]
    # The bounds of the median at six standard errors, as in the sign test: right for every distribution.
    low = ordered[latest][middle] - ordered[latest][middle - reach]
    high = ordered[following][middle + reach] - ordered[following][middle]
    standard_error = max(1e-12, hypot(low, high) / SURE_STANDARD_ERRORS)
    standard_errors = (ordered[latest][middle] - ordered[following][middle]) / standard_error
    halves = (columns[latest][:middle], columns[latest][middle:])
    is_late = (
        ordered[latest][middle] >= LATE_RATIO * step
        and standard_errors >= SURE_STANDARD_ERRORS
        and all(median(half) >= LATE_IN_HALF_RATIO * step for half in halves)
    )
    return ArrivalOrder(
        reason="" if is_late else "NoneLate",
        latest=ranks[latest],
        place=place,
        records=count,
        step_seconds=step,
        lateness_seconds={rank: values[middle] for rank, values in zip(ranks, ordered, strict=True)},
        lateness_ratio=ordered[latest][middle] / step,
        standard_errors=min(standard_errors, MOST_SHOWN_STANDARD_ERRORS),
        last_ratio=samples.last.count(latest) / len(samples.last),
    )


def _is_role(rank: ProcessId, orders: Sequence[ArrivalOrder]) -> bool:
    """True if a rank is level in one of its groups, or late only at places that most ranks do not have."""
    late_groups, groups, shared = set[tuple[Library, str]](), set[tuple[Library, str]](), {rank}
    for order in orders:
        if rank in order.lateness_seconds and order.place is not None:
            groups.add((order.place.library, order.place.group))
            if order.lateness_seconds[rank] / order.step_seconds >= LATE_IN_HALF_RATIO:
                late_groups.add((order.place.library, order.place.group))
                shared.update(order.lateness_seconds)
    every = {each for order in orders for each in order.lateness_seconds}
    return late_groups != groups or 2 * len(shared) < len(every)
