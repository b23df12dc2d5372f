"""Two jobs on one GPU: its power is that of both, so the counters of each job decide."""

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector import job_watch
from hangwatch.detector.progress_gaps import ProgressRecord
from hangwatch.model import GpuSample, GpuSweep, Job, ProcessId, Rank, SamplerStatus
from hangwatch.state import steps
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.unseen import list_unseen


def entry(name: str, pid: int, *, has_counters: bool = True) -> JobEntry:
    rank = Rank(id=ProcessId(pid=pid, start_ticks=1), rank=0, local_rank=0, gpu_uuids=("GPU-0",))
    job = Job(job_id=name, job_key=name, launcher="torchrun", launcher_id=None, ranks=(rank,))
    progress = ProgressRecord(progressed_at=90.0 if has_counters else None)
    return JobEntry(job=job, watch=replace(job_watch.begin_watch(job, 0.0), progress=progress))


def sampled(*entries: JobEntry, pids: tuple[int, ...], mig_uuids: tuple[str, ...] = ()) -> Snapshot:
    gpu = GpuSample(index=0, uuid="GPU-0", power_watts=90.0, power_limit_watts=700.0, pids=pids, mig_uuids=mig_uuids)
    sweep = GpuSweep(taken_monotonic_seconds=100.0, taken_unix_seconds=1e9, gpus=(gpu,))
    board = Snapshot(jobs={each.job.key: each for each in entries})
    board, _ = steps.record_sample(
        board, sweep, SamplerStatus(alive=True), now=100.0, settings=Detector(), gap_seconds=1e9
    )
    return board


def with_power(board: Snapshot) -> list[str]:
    return [key for key, each in board.jobs.items() if each.watch.power.gpus]


def list_notes(board: Snapshot) -> list[str]:
    return [unseen.detail for unseen in list_unseen(board) if unseen.reason == "PowerShared"]


def test_power_of_a_shared_gpu_counts_for_no_job_with_counters() -> None:
    board = sampled(entry("a", 7), entry("b", 8), entry("c", 9, has_counters=False), pids=(7, 8, 9))
    assert with_power(board) == ["c"]
    assert list_notes(board)[0] == "power is shared with job b, c"


def test_instances_of_a_gpu_share_its_power() -> None:
    assert with_power(sampled(entry("a", 7), entry("b", 8), pids=(), mig_uuids=("MIG-1", "MIG-2"))) == []


def test_job_that_only_claims_a_gpu_shares_no_power() -> None:
    board = sampled(entry("a", 7), entry("b", 8), pids=(7,))
    assert with_power(board) == ["a", "b"] and list_notes(board) == []
