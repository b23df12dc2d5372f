"""Metrics of the flight recorders: collectives of ranks, gaps between them, suspected jobs, and ranks that are late."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from hangwatch.metrics.series import JOB, gauge, number_text, ranks_label, sentence_label
from hangwatch.model import JobState
from hangwatch.state.board import Snapshot
from hangwatch.verdict.wording.short_paths import shorten_paths


def progress(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    """Yield the counters of the ranks, the gaps of the jobs, and the verdicts on suspected jobs."""
    text = "Collectives that the rank has enqueued since hangwatch follows it, by PyTorch's flight recorder"
    counted = CounterMetricFamily("hangwatch_rank_collectives", text, labels=[*JOB, "rank", "local_rank"])
    gap = gauge("job_progress_gap_seconds", "Time since the ranks of the job enqueued a collective", JOB)
    usual = gauge("job_usual_gap_seconds", "Length that 99 % of the job's gaps between collectives do not exceed", JOB)
    labels = (*JOB, "verdict", "confidence", "named", "check_first", "summary")
    info = gauge("job_suspected_info", "The verdict on a job that is suspected and does not page yet", labels)
    for entry in snapshot.living:
        name, record = tuple(entry.job.name.labels.values()), entry.watch.progress
        for rank in entry.job.ranks:
            rank_progress = record.ranks.get(rank.id)
            if rank_progress is not None:
                place = [number_text(rank.rank), number_text(rank.local_rank)]
                counted.add_metric([*name, *place], rank_progress.counter.total)
        if record.progressed_at is not None:
            gap.add_metric(name, record.gap_seconds(now))
        if (usual_seconds := record.usual_seconds) is not None:
            usual.add_metric(name, usual_seconds)
        if entry.suspected is not None and entry.watch.state is JobState.SUSPECTED:
            verdict, node = entry.suspected.verdict, entry.suspected.capture.node
            named, check_first = ranks_label(verdict.named, node), ranks_label(verdict.check_first, node)
            summary = sentence_label(shorten_paths(verdict.message, entry.suspected.grouping))
            info.add_metric([*name, verdict.kind, verdict.confidence.value, named, check_first, summary], 1)
    yield from (counted, gap, usual, info)


def lateness(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the lateness of each rank behind the others, the ranks that are named as late, and the step time."""
    labels = (*JOB, "rank", "local_rank")
    text = "Median time by which the rank enqueues a collective behind the median of the other ranks of the node"
    late = gauge("rank_lateness_seconds", text, labels)
    text = "Lateness of the named rank as a ratio of the step; only while a rank is named"
    named = gauge("job_straggler_lateness_ratio", text, labels)
    step = gauge("job_step_seconds", "Median time between two collectives at the place where ranks are compared", JOB)
    for entry in snapshot.living:
        order = entry.arrival_order
        if order is not None and order.step_seconds > 0:
            step.add_metric(tuple(entry.job.name.labels.values()), order.step_seconds)
        for rank in entry.job.ranks if order is not None else ():
            values = [*entry.job.name.labels.values(), number_text(rank.rank), number_text(rank.local_rank)]
            if order is not None and (seconds := order.lateness_seconds.get(rank.id)) is not None:
                late.add_metric(values, seconds)
            if order is not None and rank.id == order.named:
                named.add_metric(values, order.lateness_ratio)
    yield from (late, named, step)
