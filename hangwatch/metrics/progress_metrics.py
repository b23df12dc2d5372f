"""Metrics of the progress counters: collectives of ranks, gaps between them, jobs suspected because of a gap."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from hangwatch.metrics.series import JOB, gauge, number_text, ranks_label, sentence_label
from hangwatch.model import JobState
from hangwatch.state.board import Snapshot


def progress(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    """Yield the counters of the ranks, the gaps of the jobs, and the verdicts on suspected jobs."""
    text = "Collectives that the rank has enqueued since hangwatch follows it, by PyTorch's flight recorder"
    counted = CounterMetricFamily("hangwatch_rank_collectives", text, labels=[*JOB, "rank", "local_rank"])
    gap = gauge("job_progress_gap_seconds", "Time since the ranks of the job enqueued a collective", JOB)
    usual = gauge("job_usual_gap_seconds", "Length that 99 % of the job's gaps between collectives do not exceed", JOB)
    labels = (*JOB, "verdict", "confidence", "named", "first_look", "summary")
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
            named, first_look = ranks_label(verdict.named, node), ranks_label(verdict.first_look, node)
            summary = sentence_label(verdict.message)
            info.add_metric([*name, verdict.kind, verdict.confidence.value, named, first_look, summary], 1)
    yield from (counted, gap, usual, info)
