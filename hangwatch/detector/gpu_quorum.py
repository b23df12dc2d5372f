"""Judge the GPUs of a job together: are enough of them quiet, far below work, or back at work?"""

from hangwatch.config import Detector
from hangwatch.detector import power_level
from hangwatch.detector.job_watch import JobWatch
from hangwatch.detector.power_level import GpuPower


def has_quorum(count: int, voters: list[GpuPower], settings: Detector) -> bool:
    """True if `count` GPUs are at least the ratio `quorum` of `voters`, the GPUs of the job with a reading."""
    return count >= settings.quorum * len(voters)


def is_quiet(voters: list[GpuPower], settings: Detector) -> bool:
    """True if the job is quiet: enough of its GPUs are at or under their low-power threshold."""
    return has_quorum(sum(power_level.is_quiet(gpu, settings) for gpu in voters), voters, settings)


def quiet_uuids(watch: JobWatch, settings: Detector) -> frozenset[str]:
    """Return the uuids of the GPUs that draw at most their low-power threshold."""
    return frozenset(uuid for uuid, gpu in watch.power.gpus.items() if power_level.is_quiet(gpu, settings))


def has_fallen(voters: list[GpuPower], settings: Detector) -> bool:
    """True if the power of enough GPUs is far below their power at work. Then a light capture is useful."""
    return has_quorum(sum(power_level.is_under_work(gpu, settings) for gpu in voters), voters, settings)


def is_down(voters: list[GpuPower], settings: Detector) -> bool:
    """True if enough GPUs draw at most the usual threshold, or have a learned baseline."""
    down = sum(gpu.learned_watts is not None or power_level.is_low(gpu, settings) for gpu in voters)
    return has_quorum(down, voters, settings)


def is_back(watch: JobWatch, voters: list[GpuPower], settings: Detector) -> bool:
    """True if the power of a quiet job is above its low-power threshold again.

    If the job was never at work or has no threshold, its power must reach a level that only work draws.
    """
    if (watch.power.was_busy or watch.findings.fell) and any(
        power_level.low_power_threshold_watts(gpu, settings) is not None for gpu in voters
    ):
        low = sum(power_level.is_quiet(gpu, settings) or power_level.is_low(gpu, settings) for gpu in voters)
        return not has_quorum(low, voters, settings)
    return has_quorum(sum(power_level.is_busy(gpu, settings) for gpu in voters), voters, settings)
