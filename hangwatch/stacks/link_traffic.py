"""Traffic of a rank's GPU links and of its node's network ports during a capture, and the use of its GPUs. Pure.

The counters are read in each round. If a counter fell, it wrapped or was reset: that interval is ignored. A counter
that wrapped unnoticed shows fewer bytes than were carried, so a rate may be too low but never too high.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice, pairwise

from hangwatch.model import GpuTraffic, GpuUse, PortCounters, PortTraffic, TrafficSweep

_Pair = tuple[float, float] | tuple[int, int]
_MOST_WORSE = 8


def link_rates(uuids: Collection[str], sweeps: Iterable[TrafficSweep]) -> tuple[float | None, float | None]:
    """Return the bytes per second on NVLink and on PCIe of the busiest of these GPUs; None if they were not counted."""
    read = _readings(uuids, sweeps)
    return _most(_measure_rate(readings, lambda one: one.nvlink_bytes) for readings in read), _most(map(_pcie, read))


def gpu_use(uuids: Collection[str], sweeps: Iterable[TrafficSweep]) -> GpuUse | None:
    """Return the mean use of the GPU with the highest SM ratio. None if no GPU reported its use."""
    reported = ([one.use for one in readings[1:] if one.use is not None] for readings in _readings(uuids, sweeps))
    means = (
        GpuUse(
            sm_ratio=sum(use.sm_ratio for use in uses) / len(uses),
            tensor_ratio=sum(use.tensor_ratio for use in uses) / len(uses),
            dram_ratio=sum(use.dram_ratio for use in uses) / len(uses),
        )
        for uses in filter(None, reported)
    )
    return max(means, key=lambda use: use.sm_ratio, default=None)


def port_traffic(first: Sequence[PortCounters], last: Sequence[PortCounters], seconds: float) -> PortTraffic | None:
    """Return the traffic of ports that were read twice; None without such. A counter that fell counts as 0 bytes."""
    before = {port.name: port for port in first}
    pairs = [(before[port.name], port) for port in last if port.name in before]
    if not pairs or seconds <= 0:
        return None
    carried = sum(max(0, after.carried_bytes - once.carried_bytes) for once, after in pairs)
    worse = (
        f"{after.name} {counter} +{count - dict(once.errors)[counter]}"
        for once, after in pairs
        for counter, count in after.errors
        if count > dict(once.errors).get(counter, count)
    )
    return PortTraffic(bytes_per_second=carried / seconds, worse=tuple(islice(worse, _MOST_WORSE)))


def _readings(uuids: Collection[str], sweeps: Iterable[TrafficSweep]) -> list[list[GpuTraffic]]:
    read: dict[str, list[GpuTraffic]] = {uuid: [] for uuid in uuids}
    for sweep in sweeps:
        for gpu in sweep.gpus:
            if gpu.uuid in read:
                read[gpu.uuid].append(gpu)
    return list(read.values())


def _pcie(readings: Sequence[GpuTraffic]) -> float | None:
    counted = _measure_rate(readings, lambda one: one.pcie_bytes)
    if counted is not None:
        return counted
    sampled = [sum(one.pcie_bytes_per_second) for one in readings if one.pcie_bytes_per_second is not None]
    return sum(sampled) / len(sampled) if sampled else None


def _measure_rate(readings: Sequence[GpuTraffic], read: Callable[[GpuTraffic], _Pair | None]) -> float | None:
    """Return the bytes per second over the intervals in which no counter is missing or fell; None without such."""
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
