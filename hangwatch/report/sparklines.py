"""Power and collectives over time as rows of blocks, for reports. Pure."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hangwatch import words
from hangwatch.model import Incident, PowerSeries
from hangwatch.report import phrases

INDENT = 23
"""The column at which the blocks begin."""
_MAX_GPUS = 16
_SPARKS = 40
_BLOCKS = "▁▂▃▄▅▆▇█"


def draw_all(incident: Incident, width: int) -> list[str]:
    """Return the rows of the collectives of a rank, then of the power of each GPU."""
    return [*draw_collectives(incident, width), *draw_power(incident, width)]


def draw_progress(incident: Incident, width: int) -> Iterator[str]:
    """Yield the collectives of a rank over time, and the order of the ranks before the incident."""
    yield from draw_collectives(incident, width)
    if (arrival := incident.arrival) is not None and arrival.is_named:
        yield f"{'before':<{INDENT - 1}} {words.printable(arrival.message)}"


def draw_collectives(incident: Incident, width: int) -> Iterator[str]:
    """Yield the collectives of a rank over time; nothing without a progress counter."""
    if (counted := incident.collectives) is not None and len(counted.totals) > 1:
        steps = [later - earlier for earlier, later in pairwise(counted.totals)]
        sparks = _draw_sparks(steps, max(steps), width - INDENT)
        yield f"{'collectives':<{INDENT - 1}} {sparks}  {phrases.describe_collectives(counted)}"


def draw_power(incident: Incident, width: int) -> Iterator[str]:
    """Yield the power of each GPU over time, with its levels."""
    top = max((max(series.watts, default=0.0) for series in incident.power), default=0.0)
    for series in incident.power[:_MAX_GPUS]:
        if series.watts:
            ranks = f" (local rank {words.fold(series.local_ranks)})" if series.local_ranks else ""
            name = f"gpu {series.index}{ranks}"
            now = f" {series.watts[-1]:>5.0f} W now"
            levels = _describe_levels(series)
            width_with_now = width - INDENT - len(now)
            width_with_levels = width_with_now - len(levels)
            fits = width_with_levels >= _SPARKS // 2  # else the levels go to the next line
            sparks = _draw_sparks(series.watts, top, width_with_levels if fits else max(width_with_now - 1, 1))
            yield f"{name:<{INDENT - 1}} {sparks}{now}{levels}"
    if len(incident.power) > _MAX_GPUS:
        yield f"and {len(incident.power) - _MAX_GPUS} more GPUs: see incident.json"


def _describe_levels(series: PowerSeries) -> str:
    levels = (
        ("busy", series.busy_watts),
        ("quiet below", series.low_power_threshold_watts),
        ("limit", series.limit_watts),
    )
    return "".join(f", {name} {watts:.0f} W" for name, watts in levels if watts is not None)


def _draw_sparks(values: Sequence[float], top: float, most: int) -> str:
    """Return a row of blocks for the mean value in each slice of time. The lowest is 0, the highest is `top`."""
    size = len(values)
    slices = min(most, _SPARKS, size)
    cuts = [size * number // slices for number in range(slices + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    return "".join(_BLOCKS[min(int(mean / (top or 1.0) * len(_BLOCKS)), len(_BLOCKS) - 1)] for mean in means)
