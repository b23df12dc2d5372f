"""Rates of a process and of its main thread, from counters of two or more rounds. Pure."""

from collections.abc import Callable, Sequence
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
    """Return the rates of the main thread between the dumps, because a dump itself causes context switches."""
    intervals, seconds = _between_dumps(rounds)
    if seconds <= 0:
        return MainRates()
    cpu = sum(_list_growth(intervals, lambda counters: counters.cpu_seconds))
    system = sum(_list_growth(intervals, lambda counters: counters.system_seconds))
    delay = sum(_list_growth(intervals, lambda counters: counters.delay_seconds))
    switches = _list_growth(intervals, lambda counters: counters.voluntary_switches)
    faulted = _list_growth(intervals, lambda counters: counters.faulted_bytes)
    return MainRates(
        cpu_ratio=cpu / seconds,
        runnable_ratio=(cpu + delay) / seconds,
        switches=sum(switches) / seconds if switches else None,
        polls=sum(switches) >= max(_FEWEST_POLLS, POLLS_PER_SECOND * seconds) and min(switches) > 0,
        is_in_kernel=system > cpu / 2,
        faulted_bytes=sum(faulted) / seconds if faulted else None,
    )


def measure_process(rounds: Sequence[ProcessDump]) -> Rates:
    """Return the rates of a process from the first round to the last."""
    called = measure_growth(rounds, lambda dump: dump.io_bytes)
    fetched = measure_growth(rounds, lambda dump: dump.fetched_bytes)
    read = called if fetched is None else max(called or 0.0, fetched)  # both count storage reads
    carried = sum_known([read, measure_growth(rounds, lambda dump: dump.traffic.socket_bytes)])
    return Rates(measure_growth(rounds, lambda dump: dump.cpu_seconds), carried)


def measure_object(rounds: Sequence[ProcessDump]) -> float | None:
    """Return the bytes per second of the main thread and of the connection of its call; None without its counters."""
    intervals, seconds = _between_dumps(rounds)
    moved = _list_growth(intervals, lambda counters: counters.io_bytes)
    if seconds <= 0 or not moved:
        return None
    return sum_known([sum(moved) / seconds, measure_growth(rounds, lambda dump: dump.traffic.object_bytes)])


def _list_growth(
    intervals: Sequence[tuple[ThreadCounters, ThreadCounters]], read: Callable[[ThreadCounters], float | None]
) -> list[float]:
    """Return the growth of a counter in each interval with a reading at both ends."""
    pairs = ((read(first), read(last)) for first, last in intervals)
    return [max(0, last - first) for first, last in pairs if first is not None and last is not None]


def _between_dumps(rounds: Sequence[ProcessDump]) -> tuple[list[tuple[ThreadCounters, ThreadCounters]], float]:
    """Return the counters of one thread at both ends of each interval between two dumps, and the sum of the seconds."""
    spans = ((one.main.after, two.main.before) for one, two in pairwise(rounds))
    intervals = [(after, before) for after, before in spans if after is not None and before is not None]
    return intervals, sum(last.read_monotonic_seconds - first.read_monotonic_seconds for first, last in intervals)


def measure_children(rounds: Sequence[ProcessDump]) -> Rates:
    """Return the rates of a process's children besides its workers, over the rounds in which they were found."""
    traffic = ((dump, dump.traffic) for dump in rounds)
    counted = [dump for dump, its in traffic if (its.children_bytes, its.children_cpu_seconds) != (None, None)]
    return Rates(
        measure_growth(counted, lambda dump: dump.traffic.children_cpu_seconds),
        measure_growth(counted, lambda dump: dump.traffic.children_bytes),
    )


def measure_change(rounds: Sequence[ProcessDump], read: Callable[[ProcessDump], float | None]) -> float | None:
    """Return the change of a counter per second, from the first round to the last. None if it was not read in both."""
    if len(rounds) < 2:
        return None
    began, ended = rounds[0].taken_monotonic_seconds, rounds[-1].taken_monotonic_seconds
    first, last = read(rounds[0]), read(rounds[-1])
    return None if ended <= began or first is None or last is None else (last - first) / (ended - began)


def measure_growth(rounds: Sequence[ProcessDump], read: Callable[[ProcessDump], float | None]) -> float | None:
    """Return the change of a counter per second; 0 if it fell."""
    change = measure_change(rounds, read)
    return None if change is None else max(0.0, change)


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
