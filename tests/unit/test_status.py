"""The status value of the daemon. The driver decides which job holds a GPU; environments do not count."""

import itertools

import pytest
from msgspec.structs import replace

from hangwatch.detector import job_watch
from hangwatch.model import (
    GpuSample,
    GpuSweep,
    Grouping,
    Incident,
    Job,
    JobState,
    ProcessId,
    Rank,
    Verdict,
    Worker,
)
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.status import build_status

UUID = "GPU-0"


def claimant(key: str, pid: int, *workers: int) -> Job:
    rank = Rank(
        id=ProcessId(pid=pid, start_ticks=pid),
        rank=0,
        local_rank=0,
        gpu_uuids=(UUID,),
        workers=tuple(Worker(id=ProcessId(pid=worker, start_ticks=worker), comm="python") for worker in workers),
    )
    return Job(job_id="100", job_key=key, launcher="torchrun", launcher_id=None, ranks=(rank,), owner=f"uid {key}")


def holders(jobs: tuple[Job, ...], pids: tuple[int, ...], ended: frozenset[str] = frozenset()) -> list[str]:
    entries = {}
    for job in jobs:
        watch = job_watch.begin_watch(job, 5.0, 0.0)
        entries[job.key] = JobEntry(job=job, watch=replace(watch, state=JobState.ENDED) if job.key in ended else watch)
    sweep = GpuSweep(
        taken_monotonic_seconds=6.0, taken_unix_seconds=1e9, gpus=(GpuSample(index=0, uuid=UUID, pids=pids),)
    )
    (gpu,) = build_status(Snapshot(sweep=sweep, jobs=entries), "n1", 7.0).gpus
    return [job.job_key for job in gpu.jobs]


@pytest.mark.parametrize("jobs", list(itertools.permutations((claimant("a1", 10, 11), claimant("b2", 20)))))
def test_of_two_jobs_that_claim_a_gpu_the_driver_knows_the_holder(jobs: tuple[Job, ...]) -> None:
    assert holders(jobs, (10,)) == holders(jobs, (11, 99)) == ["a1"]
    assert holders(jobs, (20,)) == ["b2"]
    assert sorted(holders(jobs, ())) == sorted(holders(jobs, (99,))) == ["a1", "b2"], (
        "the holder is unknown: both are listed"
    )
    assert sorted(holders(jobs, (10, 20))) == ["a1", "b2"], "they share it"


def test_a_job_that_ended_holds_nothing() -> None:
    assert holders((claimant("a1", 10),), (10,), frozenset({"a1"})) == []


@pytest.mark.parametrize(
    ("state", "closed", "shown"),
    [
        (JobState.HUNG, None, True),
        (JobState.RECOVERED, 1e9, True),
        (JobState.ENDED, 1e9, True),
        (JobState.QUIET, 1e9, False),
        (JobState.SUSPECTED, 1e9, False),
    ],
)
def test_a_new_silence_is_not_told_by_the_verdict_of_the_last_hang(
    state: JobState, closed: float | None, shown: bool
) -> None:
    job = claimant("a1", 10)
    verdict = Verdict(kind="AllWaiting", message="All ranks wait")
    incident = Incident(
        incident_id="i1",
        node="n1",
        job=job,
        opened_unix_seconds=1e9,
        state=state,
        verdict=verdict,
        grouping=Grouping(groups=()),
        closed_unix_seconds=closed,
    )
    entry = JobEntry(job=job, watch=replace(job_watch.begin_watch(job, 5.0, 0.0), state=state), incident=incident)
    (seen,) = build_status(Snapshot(jobs={job.key: entry}), "n1", 7.0).jobs
    assert (seen.verdict, seen.incident) == (("All ranks wait", "i1") if shown else (None, None))
