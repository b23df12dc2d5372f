"""Pages of the worker groups of one Ray job: they wait for each other, so one page is enough."""

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector import job_watch
from hangwatch.detector.watch_parts import Silence, Suspicion
from hangwatch.model import GpuSweep, Job, JobState, ProcessId, Rank, SamplerStatus
from hangwatch.state import steps
from hangwatch.state.board import JobEntry, Snapshot
from tests import samples

NOW = 10_000.0


def group(
    key: str, since: float, *, launcher: str = "ray", job_name: str = "01000000", named: bool = False
) -> JobEntry:
    rank = Rank(id=ProcessId(pid=100, start_ticks=1), rank=0, local_rank=0)
    job = Job(job_id=key, job_key=key, launcher=launcher, launcher_id=None, ranks=(rank,), job_name=job_name, share="u")
    suspicion, silence = Suspicion(saw_stacks=True, frozen_captures=9), Silence(since=0.0)
    watch = replace(
        job_watch.begin_watch(job, 0.0), state=JobState.HUNG, since=since, silence=silence, suspicion=suspicion
    )
    return JobEntry(job=job, watch=watch, incident=samples.loader_hang() if named else None)


def pages(*entries: JobEntry) -> list[str]:
    board = Snapshot(jobs={entry.job.key: entry for entry in entries})
    sweep = GpuSweep(taken_monotonic_seconds=NOW, taken_unix_seconds=1e9, gpus=())
    board, _ = steps.record_sample(board, sweep, SamplerStatus(), now=NOW, settings=Detector(), gap_seconds=1e9)
    return [key for key, entry in board.jobs.items() if entry.page]


def test_worker_groups_of_a_ray_job_page_once() -> None:
    assert pages(group("critic", 20.0), group("actor", 10.0)) == ["actor"]


def test_group_with_a_named_rank_pages_for_its_ray_job() -> None:
    assert pages(group("critic", 20.0, named=True), group("actor", 10.0)) == ["critic"]


def test_group_that_paged_before_goes_on_to_page() -> None:
    before = replace(group("critic", 20.0), page=True)
    assert pages(before, group("actor", 10.0, named=True)) == ["critic"]


def test_other_jobs_page_each() -> None:
    assert pages(group("a", 1.0, job_name="02000000"), group("b", 1.0)) == ["a", "b"]
    assert pages(group("a", 1.0, job_name=""), group("b", 1.0, job_name="")) == ["a", "b"]
    assert pages(group("a", 1.0, launcher="torchrun"), group("b", 1.0, launcher="torchrun")) == ["a", "b"]
