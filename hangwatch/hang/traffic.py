"""Pure: how much the links of a rank's GPUs carried during a look, from counters that were read with its rounds.

A counter that fell has wrapped or was set back, and what flowed meanwhile is not known. One that wrapped unseen shows
less than flowed: a rate is never too high.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from hangwatch.model import GpuTraffic, TrafficSweep

_Pair = tuple[float, float] | tuple[int, int]


class LinkRates(NamedTuple):
    """Bytes per second in both directions together, of the busiest GPU; None where nothing was counted."""

    nvlink: float | None = None
    pcie: float | None = None


def link_rates(uuids: Collection[str], sweeps: Iterable[TrafficSweep]) -> LinkRates:
    """What the links of these GPUs carried between the first and the last of `sweeps`."""
    read: dict[str, list[GpuTraffic]] = {uuid: [] for uuid in uuids}
    for sweep in sweeps:
        for gpu in sweep.gpus:
            if gpu.uuid in read:
                read[gpu.uuid].append(gpu)
    return LinkRates(
        nvlink=_most(_counted(readings, lambda one: one.nvlink_bytes) for readings in read.values()),
        pcie=_most(_pcie(readings) for readings in read.values()),
    )


def _pcie(readings: Sequence[GpuTraffic]) -> float | None:
    counted = _counted(readings, lambda one: one.pcie_bytes)
    if counted is not None:
        return counted
    sampled = [sum(one.pcie_bytes_per_second) for one in readings if one.pcie_bytes_per_second is not None]
    return sum(sampled) / len(sampled) if sampled else None


def _counted(readings: Sequence[GpuTraffic], read: Callable[[GpuTraffic], _Pair | None]) -> float | None:
    """The mean rate over the intervals at both ends of which there is a count, and none that fell."""
    carried = seconds = 0.0
    for one, two in pairwise(readings):
        before, after = read(one), read(two)
        grown = [] if before is None or after is None else [b - a for a, b in zip(before, after, strict=True)]
        if grown and min(grown) >= 0:
            carried += sum(grown)
            seconds += two.taken_monotonic_seconds - one.taken_monotonic_seconds
    return carried / seconds if seconds > 0 else None


def _most(rates: Iterable[float | None]) -> float | None:
    return max((rate for rate in rates if rate is not None), default=None)
