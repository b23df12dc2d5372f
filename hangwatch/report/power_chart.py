"""The geometry of the chart of power and collectives. Its size is bounded for any number of GPUs and samples. Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from hangwatch import words
from hangwatch.model import CollectiveSeries, Incident, PowerSeries, Value, median
from hangwatch.report import phrases

WIDTH, HEIGHT = 960, 330
LEFT, RIGHT, TOP, BOTTOM = 52, 950, 30, 270  # the plot; below it the clock, then the states
STRIP = 298
MAX_LINES = 16
LABEL_WIDTH = 112  # of "stacks 10", in the font size of a phone
LAST_LABEL = 860  # a label further right ends at its mark
_MAX_MARKS = 100
_MAX_POINTS = 480  # of one line; more points are reduced to the lowest and highest of each slice
_STEPS_SECONDS = (1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_GAP = 6  # a pause of this many sample intervals is drawn as a gap


class Line(Value, frozen=True):
    """A line of the chart and its row in the legend. It shows one GPU, or the median of many."""

    path: str
    name: str
    local_ranks: str
    style: int
    odd: bool = False
    now_watts: float | None = None
    busy_watts: float | None = None
    low_power_threshold_watts: float | None = None
    limit_watts: float | None = None
    label_y: float = 0.0


class Mark(Value, frozen=True):
    """A tick, a capture, or a period in one state. `label` is "" if it would collide with another label."""

    at: float
    label: str = ""
    size: float = 0.0
    kind: str = ""


class Chart(Value, frozen=True):
    """All parts of the chart, in coordinates of the SVG.

    `collectives` is the path of the job's progress counter, which has a scale of its own; "" without one.
    """

    lines: tuple[Line, ...]
    collectives: str
    collectives_phrase: str
    band: str
    clock: tuple[Mark, ...]
    levels: tuple[Mark, ...]
    quiet: Mark | None
    captures: tuple[Mark, ...]
    states: tuple[Mark, ...]
    summary: str


class _Plane(Value, frozen=True):
    start: float
    end: float
    top_watts: float

    def x(self, unix_seconds: float) -> float:
        fraction = (unix_seconds - self.start) / max(self.end - self.start, 1e-9)
        return round(LEFT + min(max(fraction, 0.0), 1.0) * (RIGHT - LEFT), 1)

    def y(self, watts: float) -> float:
        return round(BOTTOM - min(max(watts / self.top_watts, 0.0), 1.0) * (BOTTOM - TOP), 1)


def chart(incident: Incident) -> Chart | None:
    """Return the chart of an incident; None if there are neither power samples nor progress counters.

    More than 16 GPUs are drawn as a band and a median line.
    """
    gpus = [gpu for gpu in incident.power if len(gpu.watts) > 1]
    counted = incident.collectives
    if counted is not None and len(counted.totals) < 2:
        counted = None
    if not gpus and counted is None:
        return None
    times = [gpu.unix_seconds for gpu in gpus] or ([] if counted is None else [counted.unix_seconds])
    highest = max((max(gpu.watts) for gpu in gpus), default=0.0)
    quiet = max((gpu.low_power_threshold_watts or 0.0 for gpu in gpus), default=0.0)
    plane = _Plane(
        start=min(seconds[0] for seconds in times),
        end=max(seconds[-1] for seconds in times),
        top_watts=max(highest, quiet, 1.0) * 1.06,
    )
    # The GPUs on this node that belong to named ranks, by their UUIDs.
    named = [rank for rank in incident.verdict.named if rank.node in (None, incident.node)]
    ranks = {rank.rank for rank in named} - {None}
    pids = {rank.pid for rank in named} - {None}
    odd = frozenset(
        uuid for rank in incident.job.ranks if rank.rank in ranks or rank.id.pid in pids for uuid in rank.gpu_uuids
    )
    if len(gpus) <= MAX_LINES:
        lines, band = [_draw_line(gpu, number, gpu.uuid in odd, plane) for number, gpu in enumerate(gpus)], ""
    else:
        lines, band = _draw_many(gpus, odd, plane)
    return Chart(
        lines=tuple(sorted(lines, key=lambda line: line.odd)),
        collectives="" if counted is None else _draw_collectives(counted, plane),
        collectives_phrase="" if counted is None else phrases.describe_collectives(counted),
        band=band,
        clock=tuple(_mark_clock(plane)),
        levels=tuple(Mark(at=plane.y(watts), label=f"{watts:g}") for watts in _choose_levels(plane.top_watts) if gpus),
        quiet=_mark_quiet(gpus, plane),
        captures=tuple(_mark_captures(incident, plane)),
        states=tuple(_mark_states(incident, plane)),
        summary=" ".join(_describe_chart(gpus, counted, plane)),
    )


def _draw_collectives(counted: CollectiveSeries, plane: _Plane) -> str:
    """Return an SVG path of the counter, from its lowest value at the bottom to its highest value at the top."""
    low, high = min(counted.totals), max(counted.totals)
    scale = plane.top_watts / (high - low) if high > low else 0.0
    return _draw_path(counted.unix_seconds, [(total - low) * scale for total in counted.totals], plane)


def _draw_line(gpu: PowerSeries, number: int, odd: bool, plane: _Plane) -> Line:
    end = plane.y(gpu.watts[-1])
    return Line.copy_from(
        gpu,
        path=_draw_path(gpu.unix_seconds, gpu.watts, plane),
        name=f"GPU {gpu.index}",
        local_ranks=words.fold(gpu.local_ranks) if gpu.local_ranks else "",
        style=number,
        odd=odd,
        now_watts=gpu.watts[-1],
        label_y=end + 17 if end < BOTTOM - 20 else end - 24,
    )


def _draw_many(gpus: Sequence[PowerSeries], odd: frozenset[str], plane: _Plane) -> tuple[list[Line], str]:
    """Return lines for the median and for the GPUs of named ranks, and an area from the lowest to the highest GPU."""
    times = [plane.start + (plane.end - plane.start) * number / 240 for number in range(241)]
    columns = [[watts for gpu in gpus if (watts := _find_watts(gpu, time)) is not None] for time in times]
    sampled = [(time, column) for time, column in zip(times, columns, strict=True) if column]
    upper = [f"{plane.x(time)},{plane.y(max(column))}" for time, column in sampled]
    lower = [f"{plane.x(time)},{plane.y(min(column))}" for time, column in reversed(sampled)]
    middle = [median(column) for _, column in sampled]
    line = Line(
        path=_draw_path([time for time, _ in sampled], middle, plane),
        name=f"median of {len(gpus)} GPUs",
        local_ranks="",
        style=0,
        now_watts=middle[-1],
    )
    named = [_draw_line(gpu, 1 + number, True, plane) for number, gpu in enumerate(gpus) if gpu.uuid in odd][:MAX_LINES]
    return [line, *named], f"M{' L'.join(upper + lower)} Z"


def _find_watts(gpu: PowerSeries, unix_seconds: float) -> float | None:
    """Return the power in watts at a time, by the latest sample. None before the first and after the last sample."""
    index = bisect_right(gpu.unix_seconds, unix_seconds) - 1
    return gpu.watts[index] if index >= 0 and unix_seconds <= gpu.unix_seconds[-1] else None


def _draw_path(times: Sequence[float], watts: Sequence[float], plane: _Plane) -> str:
    """Return an SVG path through the samples, with peaks and dips. A long pause is drawn as a gap."""
    kept = _choose_samples(watts)
    steps = sorted(b - a for a, b in pairwise(times))
    gap = _GAP * steps[len(steps) // 2]
    parts: list[str] = []
    for number, index in enumerate(kept):
        broken = number == 0 or any(times[i + 1] - times[i] > gap for i in range(kept[number - 1], index))
        parts.append(f"{'M' if broken else 'L'}{plane.x(times[index])},{plane.y(watts[index])}")
    return " ".join(parts)


def _choose_samples(watts: Sequence[float]) -> list[int]:
    """Return the indexes of the samples to draw: all, or the lowest and the highest of each slice of time."""
    size, slices = len(watts), _MAX_POINTS // 2
    if size <= _MAX_POINTS:
        return list(range(size))
    kept = {0, size - 1}
    for number in range(slices):
        part = range(size * number // slices, size * (number + 1) // slices)
        kept |= {min(part, key=watts.__getitem__), max(part, key=watts.__getitem__)}
    return sorted(kept)


def _mark_clock(plane: _Plane) -> Iterable[Mark]:
    span = plane.end - plane.start
    step = next((step for step in _STEPS_SECONDS if span / step <= 8), _STEPS_SECONDS[-1] * (1 + span // 691200))
    form = "%H:%M" if step >= 60 else "%H:%M:%S"
    first = int(-(-plane.start // step))
    for number in range(first, int(plane.end // step) + 1):
        yield Mark(at=plane.x(number * step), label=words.utc(number * step, form))


def _choose_levels(top_watts: float) -> list[float]:
    """Return four to eight round power levels from 0 W to the top of the chart."""
    magnitude = 10.0 ** (len(str(int(top_watts))) - 1)
    step = next(step for step in (magnitude / 5, magnitude / 2, magnitude, magnitude * 2) if top_watts / step <= 8)
    return [step * number for number in range(int(top_watts / step) + 1)]


def _mark_quiet(gpus: Sequence[PowerSeries], plane: _Plane) -> Mark | None:
    lines = [gpu.low_power_threshold_watts for gpu in gpus if gpu.low_power_threshold_watts is not None]
    if not lines:
        return None
    low, high = min(lines), max(lines)
    label = f"quiet below {low:.0f} W" if high - low < 1 else f"quiet below {low:.0f}-{high:.0f} W, by GPU"
    return Mark(at=plane.y(high), size=plane.y(low) - plane.y(high), label=label)


def _mark_captures(incident: Incident, plane: _Plane) -> Iterable[Mark]:
    free = float(LEFT)
    for number, capture in enumerate(incident.captures[:_MAX_MARKS], 1):
        end = capture.started_unix_seconds + capture.duration_seconds
        if plane.start <= capture.started_unix_seconds <= plane.end:
            at = plane.x(capture.started_unix_seconds)
            begin = at - LABEL_WIDTH if at > LAST_LABEL else at
            label = f"stacks {number}" if len(incident.captures) > 1 else "stacks taken"
            yield Mark(at=at, size=max(plane.x(end) - at, 2.0), label=label if begin >= free else "")
            free = begin + LABEL_WIDTH if begin >= free else free


def _mark_states(incident: Incident, plane: _Plane) -> Iterable[Mark]:
    """Yield a mark for each state of the job, for the strip below the clock. A state gets a label only if it fits."""
    steps = incident.timeline[-_MAX_MARKS:]
    for number, step in enumerate(steps):
        end = steps[number + 1].unix_seconds if number + 1 < len(steps) else plane.end
        if step.unix_seconds <= plane.end and end >= plane.start:
            at, size = plane.x(step.unix_seconds), plane.x(end) - plane.x(step.unix_seconds)
            if size > 0:
                label = step.state.value if size > 7.5 * len(step.state.value) else ""
                yield Mark(at=at, size=size, label=label, kind=step.state.value)


def _describe_chart(gpus: Sequence[PowerSeries], counted: CollectiveSeries | None, plane: _Plane) -> Iterable[str]:
    """Yield sentences that describe the chart, for screen readers."""
    if gpus:
        first = [gpu.watts[0] for gpu in gpus]
        last = [gpu.watts[-1] for gpu in gpus]
        yield (
            f"Power of {words.count(len(gpus), 'GPU')} from {words.utc(plane.start)} to {words.utc(plane.end)}: "
            f"{min(first):.0f} to {max(first):.0f} W at the beginning, {min(last):.0f} to {max(last):.0f} W at the end."
        )
    if counted is not None:
        yield words.sentence(phrases.describe_collectives(counted))
