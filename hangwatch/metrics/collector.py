"""Prometheus metric families from the board. A scrape reads the snapshot and never touches the machine.

A name is `hangwatch_` + subject + base unit. There is no host label (Prometheus adds `instance`) and no pid label.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from hangwatch import words
from hangwatch.config import Detector
from hangwatch.metrics import collective_metrics, gpu_metrics, job_metrics, self_metrics
from hangwatch.metrics.series import LABEL_LENGTH, counter, gauge, sentence_label, single_gauge
from hangwatch.model import CheckStatus, Point
from hangwatch.model.keyed_lists import list_by_key
from hangwatch.state.board import Board, Snapshot

log = logging.getLogger(__package__)


def families(snapshot: Snapshot, now: float, settings: Detector, external_url: str = "") -> Iterator[Metric]:
    """Yield all metric families of a snapshot. `now` is CLOCK_MONOTONIC in seconds, `external_url` is from [http]."""
    yield self_metrics.build()
    yield from gpu_metrics.sampler(snapshot, now)
    yield from gpu_metrics.readings(snapshot, settings)
    yield from job_metrics.states(snapshot, now)
    yield from job_metrics.idle_workers(snapshot, now, settings)
    yield from job_metrics.silences(snapshot)
    yield from job_metrics.progress(snapshot, now)
    yield from job_metrics.lateness(snapshot)
    yield from job_metrics.incidents(snapshot, external_url)
    yield from job_metrics.activities(snapshot)
    yield from job_metrics.crashes(snapshot, now, external_url)
    yield from collective_metrics.numbers(snapshot)
    yield from self_metrics.captures(snapshot)
    yield self_metrics.hooks(snapshot)
    yield from self_metrics.tasks(snapshot, now)
    yield self_metrics.store(snapshot)
    yield from _check_results(snapshot)
    yield from _check_points(point for result in snapshot.checks.values() for point in result.points)


def _check_results(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the result of each check, the time of its last run, and the run's duration."""
    status = gauge("check_status", "Status of the check: 0 OK, 1 UNKNOWN, 2 WARNING, 3 CRITICAL", ("check",))
    info = gauge("check_info", "Status, reason and message of the check", ("check", "status", "reason", "message"))
    success = gauge("check_success", "1 if the check ran without an internal error", ("check",))
    duration = gauge("check_duration_seconds", "Duration of the last run", ("check",))
    ran = gauge("check_last_run_timestamp_seconds", "Time of the last run", ("check",))
    faults = gauge("check_faults", "Readings that the check needed but could not get", ("check",))
    for name, result in snapshot.checks.items():
        verdict = result.verdict
        status.add_metric([name], verdict.status.value)
        # Each message with other numbers is a new series, so only checks that are not OK have the message.
        message = "" if verdict.status is CheckStatus.OK else sentence_label(verdict.message)
        info.add_metric([name, verdict.status.name, verdict.reason, message], 1)
        success.add_metric([name], float(result.success))
        duration.add_metric([name], result.duration_seconds)
        ran.add_metric([name], result.ran_unix_seconds)
        faults.add_metric([name], len(result.faults))
    yield from (status, info, success, duration, ran, faults)


def _check_points(points: Iterable[Point]) -> Iterator[Metric]:
    """Yield the numbers that checks measured, under the names that the checks define."""
    for name, rows in list_by_key((point.name, point) for point in points).items():
        labels = [key for key, _ in rows[0].labels]
        kind = CounterMetricFamily if rows[0].kind == "counter" else GaugeMetricFamily
        family = kind(f"hangwatch_{name}", rows[0].help, labels=labels)
        for row in rows:
            values = dict(row.labels)
            family.add_metric([values.get(label, "")[:LABEL_LENGTH] for label in labels], row.value)
        yield family


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
        """Yield the metric families. Stop at the first error, because an exception would make the whole scrape fail."""
        # First, because a rule over all nodes compares it with the time at which the scrape began.
        yield single_gauge("time_seconds", "Wall clock of this node in Unix time", self._unix_clock())
        try:
            all_families = families(self._board.snapshot, self._clock(), self._settings, self._external_url)
            yield from map(_printable, all_families)
        except Exception:
            self.errors += 1
            log.exception("a metric could not be exported; please report this")
        yield counter("export_errors", "Scrapes that are incomplete because of an error inside hangwatch", self.errors)


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
