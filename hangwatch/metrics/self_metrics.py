"""Metrics of hangwatch itself: version, captures, hooks, store, and the duration of scans."""

import platform

from hangwatch import __version__
from hangwatch.metrics.series import Series, name_labels, sentence_label
from hangwatch.state.board import DUMP_BUCKETS_SECONDS, Snapshot
from hangwatch.state.unseen import list_unseen


def add_captures(series: Series, snapshot: Snapshot) -> None:
    """Add the results of captures and hooks, and the failures and durations of dumps."""
    for name in ("captures", "dump_failures", "late_tasks"):
        for key, count in getattr(snapshot, name).items():
            series.add(name, (key,), count)
    for labels, count in snapshot.hook_runs.items():
        series.add("hook_runs", labels, count)
    series.add("dumpers_stuck", (), snapshot.dumpers_stuck)
    series.add_histogram(
        "dump_seconds", (*DUMP_BUCKETS_SECONDS, "+Inf"), snapshot.dumps.counts, snapshot.dumps.sum_seconds
    )


def add_state(series: Series, snapshot: Snapshot, now: float) -> None:
    """Add the version, the state of the store, the duration of scans and captures, and what is not monitored."""
    series.add("build_info", (platform.python_version(), __version__), 1)
    series.add("store_up", (), float(snapshot.store_problem is None))
    if snapshot.scan_seconds is not None:
        series.add("scan_seconds", (), snapshot.scan_seconds)
    for task in ("scan", "capture"):
        series.add("running_seconds", (task,), snapshot.running_seconds(task, now))
    for excess in snapshot.left_out:
        for what in ("jobs", "ranks", "processes"):
            series.add("left_out", (excess.owner, what), getattr(excess, what))
    for missing in list_unseen(snapshot):
        reason = (missing.source, missing.reason, sentence_label(missing.detail))
        series.add("unseen_ranks", (*name_labels(missing.job), *reason), missing.ranks)
