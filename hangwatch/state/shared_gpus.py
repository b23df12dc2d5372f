"""GPUs with ranks of several jobs. Their power is that of all these jobs, and shows nothing about one of them. Pure."""

from collections.abc import Mapping, Sequence

from hangwatch.model import GpuSample, Job
from hangwatch.state.board import JobEntry, Snapshot


def find_shared_gpus(snapshot: Snapshot) -> dict[str, tuple[Job, ...]]:
    """Return the living jobs on each GPU that several of them share, by the uuid of the GPU.

    An environment can claim any GPU. So a job counts only if the driver lists its processes on the GPU, or if the GPU
    is divided into MIG instances.
    """
    gpus = snapshot.sweep.gpus if snapshot.sweep is not None else ()
    users = {gpu.uuid: tuple(entry.job for entry in snapshot.living if _uses(entry.job, gpu)) for gpu in gpus}
    return {uuid: jobs for uuid, jobs in users.items() if len(jobs) > 1}


def _uses(job: Job, gpu: GpuSample) -> bool:
    return gpu.uuid in job.gpu_uuids and (bool(gpu.mig_uuids) or not job.pids.isdisjoint(gpu.pids))


def ignores_power(entry: JobEntry, uuid: str, shared: Mapping[str, Sequence[Job]]) -> bool:
    """True if the power of a GPU says nothing about a job: it is shared, and the counters show the job's progress."""
    return uuid in shared and entry.watch.progress.progressed_at is not None
