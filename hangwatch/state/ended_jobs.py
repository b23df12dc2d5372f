"""The missing parts of a job: its absent local ranks, and its processes that have ended."""

from collections.abc import Iterator

from msgspec.structs import replace

from hangwatch.model import EndedProcess, Job, gaps, spans
from hangwatch.state.actions import ReadCrashArtifacts
from hangwatch.state.board import JobEntry

# The newest of a job: as many as can run at once, so the first dead rank is kept
ENDED_RANKS_KEPT = 1024
ENDED_WORKERS_KEPT = 64


def with_known_absent(entry: JobEntry, job: Job) -> Job:
    """Return the job with its absent local ranks.

    A local rank that the job had before and no longer has is absent, even if the environment does not show the
    number of ranks.
    """
    here = sorted({rank.local_rank for rank in job.ranks if rank.local_rank is not None})
    before = [range(rank.local_rank, rank.local_rank + 1) for rank in entry.job.ranks if rank.local_rank is not None]
    known = (*before, *entry.job.absent, *job.absent)
    absent = spans(gap for first, last in spans(known) for gap in gaps(here, last + 1, first))
    return job if absent == job.absent_local_ranks else replace(job, absent_local_ranks=absent)


def with_ended(before: Job, job: Job, unix_now: float) -> Job:
    """Return the job with its processes that ended since `before`, an earlier state of the job.

    The kernel log is searched for these processes later.
    """
    present = set(job.processes)
    gone = [process for process in _as_ended(before, unix_now) if process.id not in present]
    ranks, workers = ([one for one in (*before.ended, *gone) if one.is_worker is kind] for kind in (False, True))
    ended = (*ranks[-ENDED_RANKS_KEPT:], *workers[-ENDED_WORKERS_KEPT:])
    return job if ended == job.ended else replace(job, ended=ended)


def ask_for_artifacts(before: JobEntry, after: Job) -> tuple[ReadCrashArtifacts, ...]:
    """Return a request to read crash artifacts if a rank has ended since `before`; else ()."""
    known = {one.id for one in before.job.ended}
    new = any(not one.is_worker and one.id not in known for one in after.ended)
    return (ReadCrashArtifacts(job=after, was_open=before.watch.is_open),) if new else ()


def _as_ended(job: Job, unix_now: float) -> Iterator[EndedProcess]:
    """Yield each rank and worker of a job as a process that ended at `unix_now`."""
    for rank in job.ranks:
        ended = EndedProcess.copy_from(rank, gone_unix_seconds=unix_now)
        yield ended
        yield from (replace(ended, id=worker.id, is_worker=True, gpu_uuids=()) for worker in rank.workers)
