"""Power levels of a GPU: its floor, its busy level, and the low-power threshold between them. Pure.

The power of a hung job stays above idle power: ranks that wait in a collective spin, and draw 14 to 29 % of the
power limit. So the threshold lies between the floor (idle power) and the power of this job at work. There may also
be a fixed threshold, which is a ratio of the power limit. It depends neither on the floor nor on the busy level.
"""

import functools
import itertools
from collections.abc import Mapping

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.model import GpuLevels, GpuSample, Value, median

SMOOTHING_SAMPLES = 5  # a median of five: a single outlier neither starts nor ends a quiet time
BUCKETS = 60  # the busy window has 60 buckets; the oldest bucket is dropped as a whole
BUSY_QUANTILE = 0.9
# A run is flat while the smoothed power stays within this ratio of its mean
FLAT_SPREAD = 0.03
# Power far below the working level that is flat for this long is not counted as work
FALL_SECONDS = 10.0
# Of the working level; flat power below it proves nothing, so a light capture is due
FALLEN_RATIO = 0.75
# The same, for power under `busy_ratio_of_limit`: of hangs, idle GPUs and light jobs
FALLEN_LIGHT_RATIO = 0.9
IDLE_LIMIT_RATIO = 0.25  # of the power limit; an idle GPU draws less
STUCK_MARGIN = 1.1  # power above this multiple of `stuck_watts` counts as back


class GpuPower(Value, frozen=True):
    """The power history of one GPU that one job holds, in watts.

    * `recent` are the newest samples. `bucket` and `work` are samples at work: `bucket` of the present period,
      `work` of past periods, oldest first. `busy_watts` is None until the GPU has worked.
    * `learned_watts` is the learned baseline: a lower level at which a capture saw ranks progress. It is dropped
      when power rises well above it.
    * `flat_since_seconds` (CLOCK_MONOTONIC), `flat_mean_watts` and `flat_samples` describe the present run of flat
      power. `flat_since_seconds` is None without such a run.
    * `stuck_watts` is the power at which a light capture found that ranks do not progress. It is set while the job
      is suspected or an incident is open.
    * While the job trains: `works_since_seconds` is the time since which the GPU works, with short breaks.
      `low_since_seconds` is the time since which it draws little power.
    """

    recent: tuple[float, ...] = ()
    limit_watts: float | None = None
    idle_watts: float | None = None
    work: tuple[tuple[float, ...], ...] = ()
    bucket: tuple[float, ...] = ()
    bucket_began_monotonic_seconds: float = 0.0
    busy_watts: float | None = None
    learned_watts: float | None = None
    flat_since_seconds: float | None = None
    flat_mean_watts: float = 0.0
    flat_samples: int = 0
    stuck_watts: float | None = None
    works_since_seconds: float | None = None
    low_since_seconds: float | None = None

    @property
    def watts(self) -> float | None:
        """The smoothed power; None before the first sample."""
        return _smoothed(self.recent)


@functools.lru_cache(maxsize=1024)  # called many times for each sample; the size exceeds the GPUs of any node
def _smoothed(recent: tuple[float, ...]) -> float | None:
    return median(recent) if recent else None


def floor_watts(gpu: GpuPower, settings: Detector) -> float | None:
    """Return the idle power of the GPU in watts: the measured level, else a ratio of the limit; None if unknown."""
    if gpu.idle_watts is not None:
        return gpu.idle_watts
    return None if gpu.limit_watts is None else settings.idle_ratio_of_limit * gpu.limit_watts


def _threshold_between(gpu: GpuPower, busy: float | None, settings: Detector) -> float | None:
    floor = floor_watts(gpu, settings)
    if floor is None or busy is None or busy <= floor:
        return None
    return floor + settings.quiet_fraction * (busy - floor)


def low_power_threshold_watts(gpu: GpuPower, settings: Detector) -> float | None:
    """Return the low-power threshold in watts; None if it cannot be computed.

    It is the higher one of two thresholds: the one between floor and busy level (or learned baseline), and the
    fixed one. The first is None if the busy level is unknown or not above the floor. The fixed one is ignored if
    the learned baseline is at or under it. If a light capture found that ranks do not progress, power at that level
    is always low.
    """
    if gpu.stuck_watts is not None:
        return max(STUCK_MARGIN * gpu.stuck_watts, _usual_threshold(gpu, settings) or 0.0)
    if gpu.learned_watts is None:
        return _usual_threshold(gpu, settings)
    line, plain = _threshold_between(gpu, gpu.learned_watts, settings), fixed_threshold_watts(gpu, settings)
    return line if plain is None or gpu.learned_watts <= plain else max(line or 0.0, plain)


def fixed_threshold_watts(gpu: GpuPower, settings: Detector) -> float | None:
    """Return the fixed threshold in watts; None if it is not configured or the power limit is unknown."""
    if not settings.low_power_ratio_of_limit or gpu.limit_watts is None:
        return None
    return settings.low_power_ratio_of_limit * gpu.limit_watts


def _usual_threshold(gpu: GpuPower, settings: Detector) -> float | None:
    learnt, plain = _threshold_between(gpu, gpu.busy_watts, settings), fixed_threshold_watts(gpu, settings)
    return max((line for line in (learnt, plain) if line is not None), default=None)


def is_quiet(gpu: GpuPower, settings: Detector) -> bool:
    """True if the smoothed power is at most the low-power threshold; False if either is unknown."""
    line, watts = low_power_threshold_watts(gpu, settings), gpu.watts
    return line is not None and watts is not None and watts <= line


def is_low(gpu: GpuPower, settings: Detector) -> bool:
    """True if the smoothed power is at most the usual threshold, which ignores a learned baseline; False if unknown."""
    line, watts = _usual_threshold(gpu, settings), gpu.watts
    return line is not None and watts is not None and watts <= line


def is_over_fixed_threshold(gpu: GpuPower, settings: Detector) -> bool:
    """True if the smoothed power is above the fixed threshold; False if either is unknown."""
    line, watts = fixed_threshold_watts(gpu, settings), gpu.watts
    return line is not None and watts is not None and watts > line


def is_busy(gpu: GpuPower, settings: Detector) -> bool:
    """True if the GPU draws at least `busy_ratio_of_limit` of its power limit, as only real work does."""
    watts = gpu.watts
    return watts is not None and gpu.limit_watts is not None and watts >= settings.busy_ratio_of_limit * gpu.limit_watts


def has_worked(gpu: GpuPower, settings: Detector) -> bool:
    """True if the busy level is at least `busy_ratio_of_limit` of the power limit, which only real work draws."""
    busy, limit = gpu.busy_watts, gpu.limit_watts
    return busy is not None and limit is not None and busy >= settings.busy_ratio_of_limit * limit


def is_under_work(gpu: GpuPower, settings: Detector) -> bool:
    """True if the smoothed power is far below the learned baseline; without a baseline, far below the busy level.

    "Far" is 25 %. Under `busy_ratio_of_limit`, where all measured hangs are, 10 % are enough.
    """
    level, watts = gpu.busy_watts if gpu.learned_watts is None else gpu.learned_watts, gpu.watts
    if level is None or watts is None:
        return False
    light = min(FALLEN_LIGHT_RATIO * level, settings.busy_ratio_of_limit * (gpu.limit_watts or 0.0))
    return watts < max(FALLEN_RATIO * level, light)


def flat_seconds(gpu: GpuPower, now: float) -> float:
    """Return the seconds for which the power has been flat; 0 without a present run of flat power."""
    return 0.0 if gpu.flat_since_seconds is None else now - gpu.flat_since_seconds


def add_sample(gpu: GpuPower, sample: GpuSample, idle_watts: float | None, now: float, settings: Detector) -> GpuPower:
    """Return the history with one more sample, taken at `now` (CLOCK_MONOTONIC).

    A sample without power clears the recent samples and ends the run of flat power. `idle_watts` is the idle level
    of the GPU; None if unknown.
    """
    if sample.power_watts is None:
        return replace(end_flat_run(gpu), recent=())
    gpu = replace(
        gpu,
        recent=(*gpu.recent, sample.power_watts)[-SMOOTHING_SAMPLES:],
        limit_watts=gpu.limit_watts if sample.power_limit_watts is None else sample.power_limit_watts,
        idle_watts=idle_watts,
    )
    if _is_well_above_baseline(gpu, settings):
        gpu = replace(gpu, learned_watts=None)
    mean, watts = gpu.flat_mean_watts, median(gpu.recent)
    if gpu.flat_since_seconds is None or abs(watts - mean) > FLAT_SPREAD * mean:
        return replace(gpu, flat_since_seconds=now, flat_mean_watts=watts, flat_samples=1)
    samples = gpu.flat_samples + 1
    return replace(gpu, flat_mean_watts=mean + (watts - mean) / samples, flat_samples=samples)


def end_flat_run(gpu: GpuPower) -> GpuPower:
    """Return the history without the present run of flat power: the power during a gap in the samples is unknown."""
    return gpu if gpu.flat_since_seconds is None else replace(gpu, flat_since_seconds=None)


def count_as_work(gpu: GpuPower, now: float, settings: Detector) -> GpuPower:
    """Return the history with the newest sample counted as work, unless the power is low now.

    Power that fell and stays flat does not count either, because it would lower the threshold that should detect
    it. It counts after a capture has shown that it is work.
    """
    if gpu.watts is None or is_low(gpu, settings):
        return gpu
    if flat_seconds(gpu, now) >= FALL_SECONDS and is_under_work(gpu, settings):
        return gpu
    began = gpu.bucket_began_monotonic_seconds if gpu.bucket else now
    bucket, work = (*gpu.bucket, gpu.recent[-1]), gpu.work
    busy = gpu.watts if gpu.busy_watts is None else gpu.busy_watts
    if now - began >= settings.busy_window_seconds / BUCKETS:
        work = (*work, bucket)[-BUCKETS:]
        bucket = ()
        ordered = sorted(itertools.chain.from_iterable(work))
        busy = ordered[min(len(ordered) - 1, int(BUSY_QUANTILE * len(ordered)))]
    return replace(gpu, bucket=bucket, bucket_began_monotonic_seconds=began, work=work, busy_watts=busy)


def _is_well_above_baseline(gpu: GpuPower, settings: Detector) -> bool:
    learned, busy, watts = gpu.learned_watts, gpu.busy_watts, gpu.watts
    if learned is None or busy is None or watts is None or is_low(gpu, settings):
        return False
    return watts >= FALLEN_RATIO * busy or FALLEN_RATIO * watts > learned


def update_idle_levels(
    earlier_levels: dict[str, float], samples: tuple[GpuSample, ...], held: frozenset[str]
) -> dict[str, float]:
    """Return the idle level of each GPU in watts, by uuid: a slow average of its power while no process holds it.

    `held` are the uuids of the GPUs of jobs. A GPU that draws more than `IDLE_LIMIT_RATIO` of its limit is skipped: it
    works for a process in another pid namespace, which hangwatch cannot see.
    """
    levels = dict(earlier_levels)
    for sample in samples:
        watts, limit = sample.power_watts, sample.power_limit_watts
        if watts is None or limit is None or sample.pids or sample.uuid in held or watts > IDLE_LIMIT_RATIO * limit:
            continue
        old = levels.get(sample.uuid, watts)
        levels[sample.uuid] = old + 0.1 * (watts - old)
    return levels


def gpu_levels(gpus: Mapping[str, GpuPower], settings: Detector) -> dict[str, GpuLevels]:
    """Return the levels of the GPUs, by uuid. GPUs without a known floor and busy level are left out."""
    return {
        uuid: GpuLevels(floor_watts=floor, busy_watts=gpu.busy_watts, is_light=not has_worked(gpu, settings))
        for uuid, gpu in gpus.items()
        if (floor := floor_watts(gpu, settings)) is not None and gpu.busy_watts is not None
    }
