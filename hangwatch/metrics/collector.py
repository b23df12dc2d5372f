"""Prometheus metric families from the board. A scrape reads the snapshot and never touches the machine.

A name is `hangwatch_` + subject + base unit. There is no host label (Prometheus adds `instance`) and no pid label.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from hangwatch import words
from hangwatch.config import Detector
from hangwatch.metrics import collective_metrics, gpu_metrics, job_metrics, self_metrics
from hangwatch.metrics.families import Family
from hangwatch.metrics.series import LABEL_LENGTH, Series, sentence_label
from hangwatch.model import CheckResult, CheckStatus
from hangwatch.state.board import Board, Snapshot

log = logging.getLogger(__package__)


def fill(series: Series, snapshot: Snapshot, now: float, settings: Detector, external_url: str = "") -> None:
    """Add the series of a snapshot. `now` is CLOCK_MONOTONIC in seconds, `external_url` is from [http]."""
    gpu_metrics.add_gpus(series, snapshot, now, settings)
    job_metrics.add_states(series, snapshot, now)
    job_metrics.add_idle_workers(series, snapshot, now, settings)
    job_metrics.add_silences(series, snapshot)
    job_metrics.add_progress(series, snapshot, now)
    job_metrics.add_incidents(series, snapshot, external_url)
    job_metrics.add_activities(series, snapshot)
    job_metrics.add_crashes(series, snapshot, now, external_url)
    collective_metrics.add_numbers(series, snapshot)
    self_metrics.add_captures(series, snapshot)
    self_metrics.add_state(series, snapshot, now)
    for name, result in snapshot.checks.items():
        _add_result(series, name, result)
        for point in result.points:
            series.declare(point.name, Family(point.help, tuple(label for label, _ in point.labels), point.kind))
            series.add(point.name, [value[:LABEL_LENGTH] for _, value in point.labels], point.value)


def _add_result(series: Series, name: str, result: CheckResult) -> None:
    """Add the result of a check, the time of its last run, and the run's duration."""
    verdict = result.verdict
    # Each message with other numbers is a new series, so only checks that are not OK have the message.
    message = "" if verdict.status is CheckStatus.OK else sentence_label(verdict.message)
    series.add("check_status", (name,), verdict.status.value)
    series.add("check_info", (name, verdict.status.name, verdict.reason, message), 1)
    series.add("check_success", (name,), float(result.success))
    series.add("check_duration_seconds", (name,), result.duration_seconds)
    series.add("check_last_run_timestamp_seconds", (name,), result.ran_unix_seconds)
    series.add("check_faults", (name,), len(result.faults))


class BoardCollector(Collector):
    """Serve the metric families of the current snapshot. An error is logged and ends the scrape early."""

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
        """Yield the metric families. After an error, further series are missing: it must not fail the whole scrape."""
        series = Series()
        # First, because a rule over all nodes compares it with the time at which the scrape began.
        series.add("time_seconds", (), self._unix_clock())
        try:
            fill(series, self._board.snapshot, self._clock(), self._settings, self._external_url)
        except Exception:
            self.errors += 1
            log.exception("a metric could not be exported; please report this")
        series.add("export_errors", (), self.errors)
        yield from map(_printable, series.families)


def _printable(family: Metric) -> Metric:
    """Escape control characters in the labels of a metric family, because a job's owner wrote many of the labels.

    If two series then have the same labels, only the first is kept, because Prometheus refuses duplicate series.
    """
    if not all(value.isprintable() for sample in family.samples for value in sample.labels.values()):
        unique: dict[tuple[object, ...], Sample] = {}
        for sample in family.samples:
            labels = {
                name: value if value.isprintable() else words.printable(value)[: max(LABEL_LENGTH, len(value))]
                for name, value in sample.labels.items()
            }
            unique.setdefault((sample.name, *sorted(labels.items())), sample._replace(labels=labels))
        family.samples = list(unique.values())
    return family


class GuardedProcessCollector(Collector):
    """Metrics of the daemon's process: CPU, memory and descriptors. If they cannot be read, only they are missing."""

    def __init__(self) -> None:
        self._inner = ProcessCollector(registry=CollectorRegistry())

    def collect(self) -> Iterable[Metric]:
        """Return the process_* metric families; an empty list after an error."""
        try:
            return list(self._inner.collect())
        except (ValueError, OSError) as error:
            log.warning("process metrics are missing from this scrape: %s", error)
            return []


def registry(board: Board, clock: Callable[[], float], settings: Detector, external_url: str = "") -> CollectorRegistry:
    """Return a new registry for one daemon. Two daemons in one process (tests, demo) need separate registries."""
    separate = CollectorRegistry()
    separate.register(BoardCollector(board, clock, settings, external_url=external_url))
    separate.register(GuardedProcessCollector())
    return separate
