"""Metrics of hangwatch itself: version, captures, hooks, store, and the duration of scans."""

import platform
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric

from hangwatch import __version__
from hangwatch.metrics.series import JOB, gauge, sentence_label, single_gauge
from hangwatch.state.board import DUMP_BUCKETS_SECONDS, Snapshot
from hangwatch.state.unseen import list_unseen


def build() -> Metric:
    """Return a metric with the versions of hangwatch and of its Python as labels."""
    info = InfoMetricFamily("hangwatch_build", "Version of hangwatch and of its Python")
    info.add_metric([], {"version": __version__, "python": platform.python_version()})
    return info


def captures(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the results of captures, and the failures and durations of dumps."""
    captures = CounterMetricFamily("hangwatch_captures", "Captures, by result", labels=["result"])
    for result, count in snapshot.captures.items():
        captures.add_metric([result], count)
    failures = CounterMetricFamily("hangwatch_dump_failures", "Dumps without a stack, by reason", labels=["reason"])
    for reason, count in snapshot.dump_failures.items():
        failures.add_metric([reason], count)
    buckets, total = [], 0
    for bound, count in zip((*DUMP_BUCKETS_SECONDS, "+Inf"), snapshot.dumps.counts, strict=True):
        total += count
        buckets.append((str(bound), float(total)))
    yield from (captures, failures)
    yield single_gauge(
        "dumpers_stuck", "py-spy processes that are blocked in the kernel and cannot be killed", snapshot.dumpers_stuck
    )
    yield HistogramMetricFamily(
        "hangwatch_dump_seconds",
        "Duration of one dump of one process",
        buckets=buckets,
        sum_value=snapshot.dumps.sum_seconds,
    )


def hooks(snapshot: Snapshot) -> Metric:
    """Return the number of hook runs, by event and outcome."""
    runs = CounterMetricFamily(
        "hangwatch_hook_runs",
        "Hooks by outcome; not_called: a limit was reached, or the hook needs an incident that was not written",
        labels=["event", "outcome"],
    )
    for labels, count in snapshot.hook_runs.items():
        runs.add_metric(labels, count)
    return runs


def tasks(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    """Yield the duration of scans and captures, and the number of jobs that are not monitored."""
    if snapshot.scan_seconds is not None:
        yield single_gauge("scan_seconds", "Duration of the newest scan of /proc", snapshot.scan_seconds)
    running = gauge("running_seconds", "Time since the current scan or capture began; 0 if none is running", ("beat",))
    for task in ("scan", "capture"):
        running.add_metric([task], snapshot.running_seconds(task, now))
    yield running
    late = CounterMetricFamily(
        "hangwatch_late_tasks", "Tasks that were due while their last run continued", labels=["task"]
    )
    for task, count in snapshot.late_tasks.items():
        late.add_metric([task], count)
    yield late
    left_out = gauge(
        "left_out", "Jobs, ranks and processes not monitored: exceeds a limit in [jobs]", ("owner", "what")
    )
    for excess in snapshot.left_out:
        for what in ("jobs", "ranks", "processes"):
            left_out.add_metric([excess.owner, what], getattr(excess, what))
    yield left_out
    labels = (*JOB, "source", "reason", "detail")
    unseen = gauge("unseen_ranks", "Ranks of which hangwatch cannot read a source, and why", labels)
    for missing in list_unseen(snapshot):
        reason = (missing.source, missing.reason, sentence_label(missing.detail))
        unseen.add_metric([*missing.job.labels.values(), *reason], missing.ranks)
    yield unseen


def store(snapshot: Snapshot) -> Metric:
    """Return a metric that is 1 if incidents can be written, else 0."""
    return single_gauge(
        "store_up",
        "1 while incidents can be written to disk; jobs are monitored in any case",
        float(snapshot.store_problem is None),
    )
