"""What the GPUs of a job say together: quiet, fallen, down, or back at work."""

from __future__ import annotations

from hangwatch.config import Detector
from hangwatch.detector import power_level
from hangwatch.detector.job_watch import JobWatch
from hangwatch.detector.power_level import GpuPower


def has_quorum(count: int, voters: list[GpuPower], settings: Detector) -> bool:
    """Whether so many of the GPUs speak for the job."""
    return count >= settings.quorum * len(voters)


def is_quiet(voters: list[GpuPower], settings: Detector) -> bool:
    """Whether the job is quiet: enough of its GPUs are at their quiet line, or under it."""
    return has_quorum(sum(power_level.is_quiet(gpu, settings) for gpu in voters), voters, settings)


def quiet_uuids(watch: JobWatch, settings: Detector) -> frozenset[str]:
    """The GPUs that are quiet, by uuid."""
    return frozenset(uuid for uuid, gpu in watch.power.gpus.items() if power_level.is_quiet(gpu, settings))


def has_fallen(voters: list[GpuPower], settings: Detector) -> bool:
    """Whether the job draws less than at its work, by as much as makes a glance worth it."""
    return has_quorum(sum(power_level.is_under_work(gpu, settings) for gpu in voters), voters, settings)


def is_down(voters: list[GpuPower], settings: Detector) -> bool:
    """Whether the job draws less than it does at work, or was taught so."""
    down = sum(gpu.taught_watts is not None or power_level.is_low(gpu, settings) for gpu in voters)
    return has_quorum(down, voters, settings)


def is_still_down(watch: JobWatch, settings: Detector) -> bool:
    """Whether the power that a glance was for has lasted as long as the glance."""
    voters = [gpu for gpu in watch.power.gpus.values() if gpu.recent]
    return not watch.power.was_busy or has_fallen(voters, settings) or is_down(voters, settings)


def is_back(watch: JobWatch, voters: list[GpuPower], settings: Detector) -> bool:
    """Power is back: over the quiet line, or for a job that never rose, over what only work draws."""
    fell = watch.suspicion is not None and watch.suspicion.fell
    if (watch.power.was_busy or fell) and any(
        power_level.quiet_line_watts(gpu, settings) is not None for gpu in voters
    ):
        low = sum(power_level.is_quiet(gpu, settings) or power_level.is_low(gpu, settings) for gpu in voters)
        return not has_quorum(low, voters, settings)
    return has_quorum(sum(power_level.is_busy(gpu, settings) for gpu in voters), voters, settings)
