"""hangwatch itself: its version, captures, hooks, store, and how long its scans take."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric

from hangwatch import __version__
from hangwatch.metrics.series import gauge, single
from hangwatch.state.board import DUMP_BUCKETS_SECONDS, Snapshot


def build() -> Metric:
    """Version of hangwatch and of its Python."""
    info = InfoMetricFamily("hangwatch_build", "Version of hangwatch and of the Python that runs it")
    info.add_metric([], {"version": __version__, "python": platform.python_version()})
    return info


def captures(snapshot: Snapshot) -> Iterator[Metric]:
    """Captures by what they found, and dumps by how they went."""
    captures = CounterMetricFamily("hangwatch_captures", "Captures taken, by what they found", labels=["result"])
    for result, count in snapshot.captures.items():
        captures.add_metric([result], count)
    failures = CounterMetricFamily("hangwatch_dump_failures", "Dumps that gave no stack, by reason", labels=["reason"])
    for reason, count in snapshot.dump_failures.items():
        failures.add_metric([reason], count)
    buckets, total = [], 0
    for bound, count in zip((*DUMP_BUCKETS_SECONDS, "+Inf"), snapshot.dumps.counts, strict=True):
        total += count
        buckets.append((str(bound), float(total)))
    yield from (captures, failures)
    yield single("dumpers_stuck", "py-spys that hang in the kernel and cannot be ended", snapshot.dumpers_stuck)
    yield HistogramMetricFamily(
        "hangwatch_dump_seconds",
        "Duration of one dump of one process",
        buckets=buckets,
        sum_value=snapshot.dumps.sum_seconds,
    )


def hooks(snapshot: Snapshot) -> Metric:
    """Hooks by what came of them."""
    told = "Hooks that were due, by what came of them; not_called: over the bounds, or without the folder they want"
    runs = CounterMetricFamily("hangwatch_hook_runs", told, labels=["event", "outcome"])
    for labels, count in snapshot.hook_runs.items():
        runs.add_metric(labels, count)
    return runs


def beats(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    """How long scans and captures take, and what is left out."""
    if snapshot.scan_seconds is not None:
        yield single("scan_seconds", "How long the newest scan of /proc took", snapshot.scan_seconds)
    running = gauge("running_seconds", "For how long a scan or a capture has been running; 0 when none is", ("beat",))
    for beat in ("scan", "capture"):
        running.add_metric([beat], snapshot.running_seconds(beat, now))
    yield running
    left_out = gauge("left_out", "What is beyond the limits of [jobs] and not watched", ("owner", "what"))
    for one in snapshot.left_out:
        for what in ("jobs", "ranks", "processes"):
            left_out.add_metric([one.owner, what], getattr(one, what))
    yield left_out


def store(snapshot: Snapshot) -> Metric:
    """Whether incidents can be kept."""
    up = gauge("store_up", "1 while incidents can be kept on disk; without it the watch goes on", ())
    up.add_metric([], float(snapshot.store_problem is None))
    return up
