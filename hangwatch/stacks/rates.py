"""Rates of a process and of its main thread, from counters of two or more rounds. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from hangwatch.model import ProcessDump, ThreadCounters

POLLS_PER_SECOND = 0.35  # sleep(2): 0.5; a DataLoader's timeout, and queue.get(timeout=5): 0.2
_FEWEST_POLLS = 2


class Rates(NamedTuple):
    """CPU time and bytes per second between the first and the last round. A value is None if its counter is missing.

    `cpu_ratio` is a ratio of one core. `io_bytes` are bytes of files and sockets per second.
    """

    cpu_ratio: float | None
    io_bytes: float | None


class MainRates(NamedTuple):
    """Rates of the main thread between the dumps. A value is None if its counter is missing.

    `cpu_ratio` is a ratio of one core. `runnable_ratio` adds the time in which the thread waited for a core. `switches`
    are voluntary context switches per second. `polls` is true if the thread switched voluntarily in every interval and
    often enough. `is_in_kernel` is true if more than half of its CPU time was system time. `faulted_bytes` are those of
    its page faults per second.
    """

    cpu_ratio: float | None = None
    runnable_ratio: float | None = None
    switches: float | None = None
    polls: bool = False
    is_in_kernel: bool = False
    faulted_bytes: float | None = None


def measure_main_thread(rounds: Sequence[ProcessDump]) -> MainRates:
    """Return the rates of the main thread.

    An interval begins after one dump and ends before the next, because a dump itself causes context switches.
    """
    intervals = _between_dumps(rounds)
    seconds = sum(last.read_monotonic_seconds - first.read_monotonic_seconds for first, last in intervals)
    if seconds <= 0:
        return MainRates()
    cpu = sum(max(0.0, last.cpu_seconds - first.cpu_seconds) for first, last in intervals)
    system = sum((last.system_seconds or 0.0) - (first.system_seconds or 0.0) for first, last in intervals)
    delay = sum((last.delay_seconds or 0.0) - (first.delay_seconds or 0.0) for first, last in intervals)
    switches = [
        last.voluntary_switches - first.voluntary_switches
        for first, last in intervals
        if first.voluntary_switches is not None and last.voluntary_switches is not None
    ]
    faulted = [
        max(0, last.faulted_bytes - first.faulted_bytes)
        for first, last in intervals
        if first.faulted_bytes is not None and last.faulted_bytes is not None
    ]
    often = sum(switches) >= max(_FEWEST_POLLS, POLLS_PER_SECOND * seconds)
    return MainRates(
        cpu_ratio=cpu / seconds,
        runnable_ratio=(cpu + max(0.0, delay)) / seconds,
        switches=sum(switches) / seconds if switches else None,
        polls=often and min(switches) > 0,
        is_in_kernel=system > cpu / 2,
        faulted_bytes=sum(faulted) / seconds if faulted else None,
    )


def measure_process(rounds: Sequence[ProcessDump]) -> Rates:
    """Return the rates of a process from the first round to the last."""
    seconds = _measure_seconds(rounds)
    if seconds is None:
        return Rates(None, None)
    first, last = rounds[0], rounds[-1]
    files, sockets = (first.io_bytes, last.io_bytes), (first.socket_bytes, last.socket_bytes)
    called, fetched = (
        _measure_growth(*files, seconds),
        _measure_growth(first.fetched_bytes, last.fetched_bytes, seconds),
    )
    read = called if fetched is None else max(called or 0.0, fetched)  # both count storage reads
    carried = sum_known([read, _measure_growth(*sockets, seconds)])
    return Rates(_measure_growth(first.cpu_seconds, last.cpu_seconds, seconds), carried)


def measure_ranks(rounds: Sequence[ProcessDump]) -> float | None:
    """Return the bytes per second on connections to other ranks; None if they were not counted."""
    seconds = _measure_seconds(rounds)
    return None if seconds is None else _measure_growth(rounds[0].rank_bytes, rounds[-1].rank_bytes, seconds)


def measure_object(rounds: Sequence[ProcessDump]) -> float | None:
    """Return the bytes per second that the main thread transfers, and those on the connection that its call is about.

    None if the counters of the main thread were not read.
    """
    seconds, intervals = _measure_seconds(rounds), _between_dumps(rounds)
    between = sum(last.read_monotonic_seconds - first.read_monotonic_seconds for first, last in intervals)
    read = [
        max(0, last.io_bytes - first.io_bytes)
        for first, last in intervals
        if first.io_bytes is not None and last.io_bytes is not None
    ]
    if seconds is None or between <= 0 or not read:
        return None
    carried = _measure_growth(rounds[0].object_bytes, rounds[-1].object_bytes, seconds)
    return sum_known([sum(read) / between, carried])


def _between_dumps(rounds: Sequence[ProcessDump]) -> list[tuple[ThreadCounters, ThreadCounters]]:
    """Return the counters at both ends of each interval between two dumps. Both are of the same thread."""
    spans = ((one.main_after, two.main_before) for one, two in pairwise(rounds))
    return [(after, before) for after, before in spans if after is not None and before is not None]


def measure_children(rounds: Sequence[ProcessDump]) -> Rates:
    """Return the rates of a process's children, except its data-loader workers.

    A round in which they were not found does not count.
    """
    found = [dump for dump in rounds if (dump.children_bytes, dump.children_cpu_seconds) != (None, None)]
    seconds = _measure_seconds(found)
    if seconds is None:
        return Rates(None, None)
    first, last = found[0], found[-1]
    return Rates(
        _measure_growth(first.children_cpu_seconds, last.children_cpu_seconds, seconds),
        _measure_growth(first.children_bytes, last.children_bytes, seconds),
    )


def _measure_seconds(rounds: Sequence[ProcessDump]) -> float | None:
    if len(rounds) < 2:
        return None
    seconds = rounds[-1].taken_monotonic_seconds - rounds[0].taken_monotonic_seconds
    return seconds if seconds > 0 else None


def _measure_growth(first: float | None, last: float | None, seconds: float) -> float | None:
    return None if first is None or last is None else max(0.0, last - first) / seconds


def sum_rates(every: Sequence[Rates]) -> Rates:
    """Return the sum of the rates of several processes."""
    return Rates(sum_known([one.cpu_ratio for one in every]), sum_known([one.io_bytes for one in every]))


def sum_known(values: Sequence[float | None]) -> float | None:
    """Return the sum of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def exceeds(value: float | None, limit: float) -> bool:
    """True if the value is known and above the limit. False for None."""
    return value is not None and value > limit
