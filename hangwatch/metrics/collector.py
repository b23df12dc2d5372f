"""Prometheus metric families from the board. A scrape reads the snapshot and never touches the machine.

A name is `hangwatch_` + subject + base unit. There is no host label (Prometheus adds `instance`) and no pid label.
"""

import logging
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, starmap
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from hangwatch import __version__, words
from hangwatch.checks.framework.contract import JOB, Metric, Metrics
from hangwatch.config import Detector
from hangwatch.metrics import collective_metrics, gpu_metrics, job_metrics
from hangwatch.metrics.view import LABEL_LENGTH, View, sentence_label
from hangwatch.model import CheckResult, CheckStatus, NotMonitored, Point
from hangwatch.state.board import DUMP_BUCKETS_SECONDS, Board, DumpHistogram
from hangwatch.state.unseen import Unseen, list_unseen

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
log = logging.getLogger(__package__)


class _CheckView(NamedTuple):
    """A check and its newest result."""

    name: str
    result: CheckResult

    @property
    def message(self) -> str:
        """The message as a label; "" if the check is OK, since each message with other numbers is a new series."""
        verdict = self.result.verdict
        return "" if verdict.status is CheckStatus.OK else sentence_label(verdict.message)


_CHECKS = Metrics[View, _CheckView](
    Metric(
        "check_status",
        "Status of the check: 0 OK, 1 UNKNOWN, 2 WARNING, 3 CRITICAL",
        attrgetter("result.verdict.status.value"),
    ),
    Metric(
        "check_info",
        "Status, reason and message of the check",
        lambda each: {(each.result.verdict.status.name, each.result.verdict.reason, each.message): 1},
        by=("status", "reason", "message"),
    ),
    Metric("check_success", "1 if the check ran without an internal error", attrgetter("result.success")),
    Metric("check_duration_seconds", "Duration of the last run", attrgetter("result.duration_seconds")),
    Metric("check_last_run_timestamp_seconds", "Time of the last run", attrgetter("result.ran_unix_seconds")),
    Metric("check_faults", "Readings that the check needed but could not get", lambda each: len(each.result.faults)),
    subjects=lambda view: starmap(_CheckView, view.snapshot.checks.items()),
    labels={"check": attrgetter("name")},
)
_OWN: tuple[Metrics[View, Any], ...] = (
    Metrics[View, View](
        Metric(
            "build_info",
            "Version of hangwatch and of its Python",
            lambda _: {(platform.python_version(), __version__): 1},
            by=("python", "version"),
        ),
        Metric("captures_total", "Captures, by result", attrgetter("snapshot.captures"), by=("result",)),
        Metric(
            "dump_failures_total",
            "Dumps without a stack, by reason",
            attrgetter("snapshot.dump_failures"),
            by=("reason",),
        ),
        Metric(
            "dumpers_stuck",
            "py-spy processes that are blocked in the kernel and cannot be killed",
            attrgetter("snapshot.dumpers_stuck"),
        ),
        Metric(
            "hook_runs_total",
            "Hooks by outcome; not_called: a limit was reached, or the hook needs an incident that was not written",
            attrgetter("snapshot.hook_runs"),
            by=("event", "outcome"),
        ),
        Metric("scan_seconds", "Duration of the newest scan of /proc", attrgetter("snapshot.scan_seconds")),
        Metric(
            "running_seconds",
            "Time since the current scan or capture began; 0 if none is running",
            lambda view: {task: view.snapshot.running_seconds(task, view.now) for task in ("scan", "capture")},
            by=("beat",),
        ),
        Metric(
            "late_tasks_total",
            "Tasks that were due while their last run continued",
            attrgetter("snapshot.late_tasks"),
            by=("task",),
        ),
        Metric(
            "store_up",
            "1 while incidents can be written to disk; jobs are monitored in any case",
            lambda view: view.snapshot.store_problem is None,
        ),
    ),
    Metrics[View, NotMonitored](
        Metric(
            "left_out",
            "Jobs, ranks and processes not monitored: exceeds a limit in [jobs]",
            lambda excess: {what: getattr(excess, what) for what in ("jobs", "ranks", "processes")},
            by=("what",),
        ),
        subjects=lambda view: view.snapshot.left_out,
        labels={"owner": attrgetter("owner")},
    ),
    Metrics[View, Unseen](
        Metric("unseen_ranks", "Ranks with a source that hangwatch cannot read, and why", attrgetter("ranks")),
        subjects=lambda view: list_unseen(view.snapshot),
        labels={
            **JOB,
            "source": attrgetter("source"),
            "reason": attrgetter("reason"),
            "detail": lambda each: sentence_label(each.detail),
        },
    ),
)
_ALL: tuple[Metrics[View, Any], ...] = (
    *gpu_metrics.METRICS,
    *job_metrics.METRICS,
    *collective_metrics.METRICS,
    *_OWN,
    _CHECKS,
)


def _make_family(metric: Metric[Any] | Point) -> Family:
    """Return the family of a metric without series: its name, text and type."""
    return Family(f"hangwatch_{metric.name.removesuffix('_total')}", metric.help, metric.kind)


def declare() -> dict[str, Family]:
    """Return the families of the daemon's metrics without series."""
    return {metric.name: _make_family(metric) for metrics in _ALL for metric in metrics.metrics}


def fill(families: dict[str, Family], view: View) -> None:
    """Add the values of all metrics: the daemon's, then those of the checks."""
    for metrics in _ALL:
        for metric, labels, number in metrics.read(view):
            families[metric.name].add_sample(f"hangwatch_{metric.name}", labels, number)
    families["dump_seconds"] = _dump_seconds(view.snapshot.dumps)
    for result in view.snapshot.checks.values():
        for point in result.points:
            labels = {name: value[:LABEL_LENGTH] for name, value in point.labels}
            if point.name not in families:
                families[point.name] = _make_family(point)
            families[point.name].add_sample(f"hangwatch_{point.name}", labels, point.value)


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

    def collect(self) -> Iterator[Family]:
        """Yield the metric families. After an error, further series are missing: it must not fail the whole scrape."""
        # First, because a rule over all nodes compares it with the time at which the scrape began.
        unix_seconds = self._unix_clock()
        yield GaugeMetricFamily("hangwatch_time_seconds", "Wall clock of this node in Unix time", unix_seconds)
        view = View(self._board.snapshot, self._clock(), self._settings, self._external_url)
        families = declare()
        try:
            fill(families, view)
        except Exception:
            self.errors += 1
            log.exception("a metric could not be exported; please report this")
        yield from map(_printable, families.values())
        errors_text = "Scrapes that are incomplete because of an error inside hangwatch"
        yield CounterMetricFamily("hangwatch_export_errors", errors_text, self.errors)


def _dump_seconds(dumps: DumpHistogram) -> Family:
    bounds = (*map(str, DUMP_BUCKETS_SECONDS), "+Inf")
    buckets = list(zip(bounds, accumulate(dumps.counts), strict=True))
    text = "Duration of one dump of one process"
    return HistogramMetricFamily("hangwatch_dump_seconds", text, buckets, dumps.sum_seconds)


def _printable(family: Family) -> Family:
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

    def collect(self) -> Iterable[Family]:
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


def render(registry: CollectorRegistry) -> bytes:
    """Return all metrics of a registry in the text format 0.0.4. No sample may have a timestamp or be `_created`.

    The bytes are those of prometheus_client, in less than half of its time, which is most of a scrape. It checks and
    escapes the name of each label of each sample. Names of hangwatch need neither.
    """
    lines: list[str] = []
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"# HELP {name} {_escape_help(family.documentation)}\n")
        lines.append(f"# TYPE {name} {'untyped' if family.type == 'unknown' else family.type}\n")
        for sample in family.samples:
            labels = ",".join([f'{label}="{_escape(sample.labels[label])}"' for label in sorted(sample.labels)])
            number = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
            lines.append(f"{sample.name}{f'{{{labels}}}' if labels else ''} {number}\n")
    return "".join(lines).encode()


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
