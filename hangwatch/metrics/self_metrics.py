"""Metrics of hangwatch itself: version, captures, hooks, store, and the duration of scans."""

import platform
from operator import attrgetter
from typing import Any

from hangwatch import __version__
from hangwatch.checks.framework.contract import JOB, Metric, Metrics
from hangwatch.metrics.texts import sentence_label
from hangwatch.metrics.view import View
from hangwatch.model import NotMonitored
from hangwatch.state.unseen import Unseen, list_unseen

METRICS: tuple[Metrics[View, Any], ...] = (
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
