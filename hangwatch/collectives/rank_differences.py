"""Differences of a late rank: what its process or GPU shows, and those of the other ranks of the node do not. Pure."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from hangwatch.model import ProcessId, Value

_SHORTEST_SECONDS = 0.5  # between two readings
# The value of the late rank is at least this multiple of the highest of the others
_TIMES_OTHERS = 2.0
_SLOW_CLOCK_RATIO = 0.95  # of the lowest clock of the others


class RankLoad(Value, frozen=True):
    """Counters of a rank at one moment (CLOCK_MONOTONIC); None for a value that the node does not have.

    `delay_seconds`: time for which its main thread waited for a core. `throttled_seconds`: time for which the CPU quota
    of its control groups stopped it. `io_bytes` and `faulted_bytes`: bytes that system calls of the main thread moved,
    and that its page faults brought in. `clock_hertz`: the SM clock of its slowest GPU. `workers`: the processes to
    which the sums `worker_cpu_seconds` and `worker_io_bytes` belong.
    """

    read_monotonic_seconds: float
    delay_seconds: float | None = None
    throttled_seconds: float | None = None
    io_bytes: float | None = None
    faulted_bytes: float | None = None
    swap_bytes: float | None = None
    clock_hertz: float | None = None
    workers: tuple[ProcessId, ...] = ()
    worker_cpu_seconds: float | None = None
    worker_io_bytes: float | None = None


class _Row(NamedTuple):
    """A value, the least difference from the other ranks that counts, and its sentence."""

    value: Callable[[RankLoad, RankLoad], float | None]
    least: float
    text: str


def find_differences(
    before: Mapping[ProcessId, RankLoad], now: Mapping[ProcessId, RankLoad], late: ProcessId
) -> tuple[str, ...]:
    """Return a sentence for each value by which the late rank differs from all others. It proves no cause."""
    ranks = [rank for rank in now if rank in before]
    if late not in ranks or len(ranks) < 2:
        return ()
    sentences = []
    for row in _ROWS:
        values = {rank: row.value(before[rank], now[rank]) for rank in ranks}
        others = [value for rank, value in values.items() if rank != late and value is not None]
        value = values[late]
        if value is not None and others:
            highest = max(others)
            if value - highest >= row.least and value >= _TIMES_OTHERS * highest:
                sentences.append(row.text.format(value, highest))
    clocks = {rank: now[rank].clock_hertz for rank in ranks}
    other_clocks = [clock for rank, clock in clocks.items() if rank != late and clock is not None]
    clock, slowest = clocks[late], min(other_clocks, default=0.0)
    if clock is not None and clock <= _SLOW_CLOCK_RATIO * slowest:
        sentences.append(f"its GPU runs at {clock / 1e6:,.0f} MHz, the others at {slowest / 1e6:,.0f} MHz or more")
    return tuple(sentences)


def _rate(name: str, unit: float = 1.0) -> Callable[[RankLoad, RankLoad], float | None]:
    """Return a function for the growth of the counter `name` in units per second."""

    def compute_rate(before: RankLoad, now: RankLoad) -> float | None:
        first, last = getattr(before, name), getattr(now, name)
        passed = now.read_monotonic_seconds - before.read_monotonic_seconds
        return None if first is None or last is None or passed < _SHORTEST_SECONDS else (last - first) / passed / unit

    return compute_rate


def _worker_rate(name: str, unit: float = 1.0) -> Callable[[RankLoad, RankLoad], float | None]:
    """Return a function as `_rate`; its value is None if a worker has started or ended."""
    compute_rate = _rate(name, unit)
    return lambda before, now: compute_rate(before, now) if before.workers == now.workers else None


_MIB = float(1 << 20)
_ROWS = (
    _Row(
        _rate("delay_seconds"),
        0.02,
        "its main thread waited {:.0%} of the time for a core, those of the others at most {:.0%}",
    ),
    _Row(
        _rate("throttled_seconds"),
        0.02,
        "its CPU quota stopped it for {:.0%} of the time, the others for at most {:.0%}",
    ),
    _Row(_worker_rate("worker_cpu_seconds"), 0.1, "its workers used {:.2f} cores, those of the others at most {:.2f}"),
    _Row(
        _worker_rate("worker_io_bytes", _MIB),
        1.0,
        "its workers read and wrote {:,.0f} MiB/s, those of the others at most {:,.0f} MiB/s",
    ),
    _Row(
        _rate("io_bytes", _MIB),
        1.0,
        "its main thread read and wrote {:,.0f} MiB/s, those of the others at most {:,.0f} MiB/s",
    ),
    _Row(
        _rate("faulted_bytes", _MIB),
        16.0,
        "page faults of its main thread brought in {:,.0f} MiB/s, those of the others at most {:,.0f} MiB/s",
    ),
    _Row(
        lambda _, now: None if now.swap_bytes is None else now.swap_bytes / _MIB,
        64.0,
        "it has {:,.0f} MiB in swap, the others have at most {:,.0f} MiB",
    ),
)
