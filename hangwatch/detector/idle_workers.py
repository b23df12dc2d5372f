"""Find a GPU that stopped working while all other GPUs of its job work on: that of an independent worker. Pure.

The ranks of a training job wait for each other, so all of them stop. Workers that generate data do not wait. One of
them may get stuck, and no other one shows it. That is a warning, never a page: its worker may also be done.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from hangwatch import words
from hangwatch.config import Detector
from hangwatch.detector import power_level
from hangwatch.detector.job_watch import JobWatch, with_power
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.transitions import Change, Transition
from hangwatch.model import Job, JobState

WORKED_SECONDS = 1800.0  # before, as long as the others
PAUSE_SECONDS = 3600.0  # between two warnings of one job


def follow_work(gpus: Mapping[str, GpuPower], now: float, settings: Detector) -> dict[str, GpuPower]:
    """Return the GPUs with the times at which work began, or low power, which ends work after `hold_seconds`."""
    return {uuid: _follow_gpu(gpu, now, settings) for uuid, gpu in gpus.items()}


def _follow_gpu(gpu: GpuPower, now: float, settings: Detector) -> GpuPower:
    if not gpu.recent:
        return forget_low_power(gpu)
    if power_level.is_low(gpu, settings):
        return gpu if gpu.low_since_seconds is not None else replace(gpu, low_since_seconds=now)
    if gpu.low_since_seconds is None and gpu.works_since_seconds is not None:
        return gpu
    is_break = gpu.low_since_seconds is None or now - gpu.low_since_seconds >= settings.hold_seconds
    began = now if gpu.works_since_seconds is None or is_break else gpu.works_since_seconds
    return replace(gpu, low_since_seconds=None, works_since_seconds=began)


def forget_low_power(gpu: GpuPower) -> GpuPower:
    """Return the GPU without the time since which it draws little power, because the whole job does not work."""
    return gpu if gpu.low_since_seconds is None else replace(gpu, low_since_seconds=None)


def warn_of_idle_worker(watch: JobWatch, job: Job, now: float, settings: Detector) -> Change:
    """Warn, at most once an hour, of a rank with the only GPU of its job that stopped working. The state stays."""
    warned_at = watch.power.idle_worker_at
    if warned_at is not None and now - warned_at < PAUSE_SECONDS:
        return watch, ()
    idle = find_idle_worker(watch, now, settings)
    if idle is None:
        return watch, ()
    uuid, since = idle
    others = words.count(len(watch.power.gpus) - 1, "other GPU")
    message = (
        f"{_name_rank(job, uuid)} may be stuck: its GPU has drawn little power for {words.duration(now - since)}, "
        f"and the {others} of the job work"
    )
    warning = Transition(job=watch.identity.name, before=watch.state, state=watch.state, message=message)
    return replace(with_power(watch, idle_worker_at=now), message=message), (warning,)


def find_idle_worker(watch: JobWatch, now: float, settings: Detector) -> tuple[str, float] | None:
    """Return the only GPU of a training job that stopped working for the stalled hold, and since when.

    None if there is no such GPU. Like all others, it must have worked for 30 minutes before. All others must work now.
    """
    gpus = watch.power.gpus
    low = {uuid: gpu.low_since_seconds for uuid, gpu in gpus.items() if gpu.low_since_seconds is not None}
    if watch.state is not JobState.TRAINING or len(low) != 1 or len(gpus) < 2:
        return None
    ((uuid, since),) = low.items()
    began = [gpu.works_since_seconds for gpu in gpus.values()]
    worked = all(start is not None and since - start >= WORKED_SECONDS for start in began)
    return (uuid, since) if worked and now - since >= settings.stalled_hold_seconds else None


def _name_rank(job: Job, uuid: str) -> str:
    """Return the name of the rank that holds a GPU: "rank 3 (pid 4711)"."""
    found = next((rank for rank in job.ranks if uuid in rank.gpu_uuids), None)
    if found is None:
        return "a rank"
    return f"pid {found.id.pid}" if found.rank is None else f"rank {found.rank} (pid {found.id.pid})"
