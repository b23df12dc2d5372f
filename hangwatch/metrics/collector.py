"""Board -> Prometheus families. A scrape reads the snapshot and never touches the machine.

Every name is `hangwatch_` + subject + base unit. There is no host label (Prometheus adds `instance`) and no pid label.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from hangwatch import words
from hangwatch.config import Detector
from hangwatch.metrics import check_metrics, collective_metrics, gpu_metrics, job_metrics
from hangwatch.metrics import self_metrics as own
from hangwatch.metrics.series import LABEL_LENGTH, counter, single
from hangwatch.state.board import Board, Snapshot

log = logging.getLogger(__package__)


def families(snapshot: Snapshot, now: float, settings: Detector, external_url: str = "") -> Iterator[Metric]:
    """All families of one snapshot; `now` is CLOCK_MONOTONIC in seconds, `external_url` that of [http]."""
    yield own.build()
    yield from gpu_metrics.sampler(snapshot, now)
    yield from gpu_metrics.readings(snapshot, settings)
    yield from job_metrics.states(snapshot, now)
    yield from job_metrics.incidents(snapshot, external_url)
    yield from job_metrics.crashes(snapshot, now, external_url)
    yield from collective_metrics.numbers(snapshot)
    yield from own.captures(snapshot)
    yield own.hooks(snapshot)
    yield from own.beats(snapshot, now)
    yield own.store(snapshot)
    yield from check_metrics.results(snapshot)
    yield from check_metrics.points(point for result in snapshot.checks.values() for point in result.points)


class BoardCollector(Collector):
    """Gives prometheus_client the families of the present snapshot; an error costs the rest of one scrape, loudly."""

    def __init__(
        self,
        board: Board,
        clock: Callable[[], float],
        settings: Detector,
        unix_clock: Callable[[], float] = time.time,
        external_url: str = "",
    ) -> None:
        self._board, self._clock, self._settings, self._unix_clock = board, clock, settings, unix_clock
        self._external_url = external_url
        self.errors = 0

    def collect(self) -> Iterator[Metric]:
        """The families; prometheus_client itself would let one exception fail the whole scrape."""
        # First of all: a rule over all nodes compares it with the time at which the scrape began.
        yield single("time_seconds", "The wall clock of this node, as unix time", self._unix_clock())
        try:
            found = families(self._board.snapshot, self._clock(), self._settings, self._external_url)
            yield from map(_shown, found)
        except Exception:
            self.errors += 1
            log.exception("a metric could not be exported; please report this")
        yield counter("export_errors", "Scrapes that lost families to an error inside hangwatch", self.errors)


def _shown(family: Metric) -> Metric:
    """The family with nothing in its labels that a terminal acts on: much of them is what a job's owner wrote.

    Two series that are the same after that are one: Prometheus refuses a scrape in which a series comes twice.
    """
    foreign = [sample for sample in family.samples if not all(map(str.isprintable, sample.labels.values()))]
    if foreign:
        shown: dict[tuple[object, ...], Sample] = {}
        for sample in family.samples:
            labels = {
                name: value if value.isprintable() else words.printable(value)[: max(LABEL_LENGTH, len(value))]
                for name, value in sample.labels.items()
            }
            shown.setdefault((sample.name, *sorted(labels.items())), sample._replace(labels=labels))
        family.samples = list(shown.values())
    return family


class GuardedProcessCollector(Collector):
    """CPU, memory and fds of the daemon itself; a row of /proc that surprises the library costs only these."""

    def __init__(self) -> None:
        self._inner = ProcessCollector(registry=CollectorRegistry())

    def collect(self) -> Iterable[Metric]:
        """The process_* families, or none."""
        try:
            return list(self._inner.collect())
        except (ValueError, OSError) as error:
            log.warning("process metrics are missing from this scrape: %s", error)
            return []


def registry(board: Board, clock: Callable[[], float], settings: Detector, external_url: str = "") -> CollectorRegistry:
    """A registry of its own, so that two daemons in one process (tests, demo) do not meet."""
    own = CollectorRegistry()
    own.register(BoardCollector(board, clock, settings, external_url=external_url))
    own.register(GuardedProcessCollector())
    return own
