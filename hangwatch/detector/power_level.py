"""Is a GPU quiet? Its floor, its busy level, and the line between them. Pure.

A hung job does not fall to the idle power of its GPUs: ranks that wait inside a collective spin, and draw 14 to 29 %
of the power limit. So the line is drawn between the floor (idle) and what this job drew while it worked. Beside it
there may be a plain line, a share of the power limit, which asks neither what the GPU idled nor what it worked at.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from statistics import median

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.model import GpuSample, Value

SMOOTHING_SAMPLES = 5  # a median of five: one odd sample neither starts nor ends a quiet time
BUCKETS = 60  # the busy window is kept and forgotten in sixtieths
BUSY_QUANTILE = 0.9
NARROWEST_WATTS = 20.0  # between idle and work: less is noise
FLAT_SPREAD = 0.03  # a run is flat while the smoothed power stays within this of its mean
FALL_SECONDS = 10.0  # flat for so long, and what lies far under the work is not taken for work
FALLEN_RATIO = 0.75  # of the working level; power that is flat under it is no proof of anything, and worth a glance
FALLEN_LIGHT_RATIO = 0.9  # the same where the power is one that only hangs, idle cards and light jobs draw
STUCK_MARGIN = 1.1  # over this times the level at which all stood still, power is back


class GpuPower(Value, frozen=True):
    """The power history of one GPU that one job holds. Watts; `work` are samples of past buckets, oldest first.

    `busy_watts` is None until the GPU worked. `taught_watts` is a lower working level that a capture with moving
    ranks has shown to be honest work; it is dropped once the power has risen well over it. `flat_*` are of the
    present run of flat power: since when on CLOCK_MONOTONIC, its mean, its samples. `stuck_watts`, while the job is
    suspected or worse, is the level at which a glance found it standing still.
    """

    recent: tuple[float, ...] = ()
    limit_watts: float | None = None
    idle_watts: float | None = None
    work: tuple[tuple[float, ...], ...] = ()
    bucket: tuple[float, ...] = ()
    bucket_began_monotonic_seconds: float = 0.0
    busy_watts: float | None = None
    taught_watts: float | None = None
    flat_since_seconds: float | None = None
    flat_mean_watts: float = 0.0
    flat_samples: int = 0
    stuck_watts: float | None = None

    @property
    def watts(self) -> float | None:
        """The smoothed power, None before the first sample."""
        return _smoothed(self.recent)


@functools.lru_cache(maxsize=1024)  # asked for many times of each sample, on a node with more GPUs than anybody builds
def _smoothed(recent: tuple[float, ...]) -> float | None:
    return median(recent) if recent else None


def floor_watts(gpu: GpuPower, settings: Detector) -> float | None:
    """What the GPU draws doing nothing: its own idle level where that was seen, else a share of its limit."""
    if gpu.idle_watts is not None:
        return gpu.idle_watts
    return None if gpu.limit_watts is None else settings.idle_ratio_of_limit * gpu.limit_watts


def _line(gpu: GpuPower, busy: float | None, settings: Detector) -> float | None:
    floor = floor_watts(gpu, settings)
    if floor is None or busy is None or busy <= floor:
        return None
    return floor + settings.quiet_fraction * (busy - floor)


def quiet_line_watts(gpu: GpuPower, settings: Detector) -> float | None:
    """At or under this the GPU is quiet. None while it has no busy level, or works no harder than it idles.

    The plain line counts as well, but for a GPU of which a level at or under it was shown to be work; and what a
    glance showed to be a standstill is quiet, whatever the lines.
    """
    if gpu.stuck_watts is not None:
        return max(STUCK_MARGIN * gpu.stuck_watts, _ordinary_line(gpu, settings) or 0.0)
    if gpu.taught_watts is None:
        return _ordinary_line(gpu, settings)
    line, plain = _line(gpu, gpu.taught_watts, settings), plain_line_watts(gpu, settings)
    return line if plain is None or gpu.taught_watts <= plain else max(line or 0.0, plain)


def plain_line_watts(gpu: GpuPower, settings: Detector) -> float | None:
    """The configured share of the power limit; None where none is configured or the limit is unknown."""
    if not settings.quiet_watts_ratio_of_limit or gpu.limit_watts is None:
        return None
    return settings.quiet_watts_ratio_of_limit * gpu.limit_watts


def _ordinary_line(gpu: GpuPower, settings: Detector) -> float | None:
    learnt, plain = _line(gpu, gpu.busy_watts, settings), plain_line_watts(gpu, settings)
    if learnt is None or plain is None:
        return plain if learnt is None else learnt
    return max(learnt, plain)


def is_quiet(gpu: GpuPower, settings: Detector) -> bool:
    """Whether the smoothed power is at or under the quiet line; False where either is unknown."""
    line, watts = quiet_line_watts(gpu, settings), gpu.watts
    return line is not None and watts is not None and watts <= line


def is_low(gpu: GpuPower, settings: Detector) -> bool:
    """Like `is_quiet`, but by the ordinary busy level even where a capture taught a lower one."""
    line, watts = _ordinary_line(gpu, settings), gpu.watts
    return line is not None and watts is not None and watts <= line


def is_over_plain_line(gpu: GpuPower, settings: Detector) -> bool:
    """Whether the smoothed power is over the plain line; False where either is unknown."""
    line, watts = plain_line_watts(gpu, settings), gpu.watts
    return line is not None and watts is not None and watts > line


def is_busy(gpu: GpuPower, settings: Detector) -> bool:
    """Whether the GPU draws what only real work draws, judged without any history."""
    watts = gpu.watts
    return watts is not None and gpu.limit_watts is not None and watts >= settings.busy_ratio_of_limit * gpu.limit_watts


def has_worked(gpu: GpuPower, settings: Detector) -> bool:
    """Whether its busy level is one that only real work draws."""
    return (
        gpu.busy_watts is not None
        and gpu.limit_watts is not None
        and gpu.busy_watts >= settings.busy_ratio_of_limit * gpu.limit_watts
    )


def is_under_work(gpu: GpuPower, settings: Detector) -> bool:
    """Whether the smoothed power lies far under the working level, be it learnt or taught.

    Far is a quarter; a tenth is enough under `busy_ratio_of_limit`, where the measured hangs lie.
    """
    level, watts = gpu.busy_watts if gpu.taught_watts is None else gpu.taught_watts, gpu.watts
    if level is None or watts is None:
        return False
    light = min(FALLEN_LIGHT_RATIO * level, settings.busy_ratio_of_limit * (gpu.limit_watts or 0.0))
    return watts < max(FALLEN_RATIO * level, light)


def flat_seconds(gpu: GpuPower, now: float) -> float:
    """For how long the power has been flat; 0 without a reading."""
    return 0.0 if gpu.flat_since_seconds is None else now - gpu.flat_since_seconds


def observe(gpu: GpuPower, sample: GpuSample, idle_watts: float | None, now: float) -> GpuPower:
    """Add one sample, taken at `now` on CLOCK_MONOTONIC; one without a power reading leaves no trace in the history."""
    if sample.power_watts is None:
        return replace(forget_run(gpu), recent=())
    gpu = replace(
        gpu,
        recent=(*gpu.recent, sample.power_watts)[-SMOOTHING_SAMPLES:],
        limit_watts=gpu.limit_watts if sample.power_limit_watts is None else sample.power_limit_watts,
        idle_watts=idle_watts,
    )
    mean, watts = gpu.flat_mean_watts, median(gpu.recent)
    if gpu.flat_since_seconds is None or abs(watts - mean) > FLAT_SPREAD * mean:
        return replace(gpu, flat_since_seconds=now, flat_mean_watts=watts, flat_samples=1)
    samples = gpu.flat_samples + 1
    return replace(gpu, flat_mean_watts=mean + (watts - mean) / samples, flat_samples=samples)


def forget_run(gpu: GpuPower) -> GpuPower:
    """As if the power had not been flat before: nobody knows what it was in between."""
    return gpu if gpu.flat_since_seconds is None else replace(gpu, flat_since_seconds=None)


def learn(gpu: GpuPower, now: float, settings: Detector) -> GpuPower:
    """Count the newest sample as work, unless the GPU is low at this moment (a pause is no work).

    Nor is power that fell and stays flat, until a look has shown that it is, see `teach`: taken for work it would lower
    the line under which it lies.
    """
    watts = gpu.watts
    if watts is None or is_low(gpu, settings):
        return gpu
    if flat_seconds(gpu, now) >= FALL_SECONDS and is_under_work(gpu, settings):
        return gpu
    began = gpu.bucket_began_monotonic_seconds if gpu.bucket else now
    bucket = (*gpu.bucket, gpu.recent[-1])
    busy = gpu.busy_watts
    if busy is None:
        busy = gpu.watts
    work = gpu.work
    if now - began >= settings.busy_window_seconds / BUCKETS:
        work = (*work, bucket)[-BUCKETS:]
        bucket = ()
        ordered = sorted(itertools.chain.from_iterable(work))
        busy = ordered[min(len(ordered) - 1, int(BUSY_QUANTILE * len(ordered)))]
    taught = gpu.taught_watts
    if taught is not None and busy is not None and (watts >= FALLEN_RATIO * busy or FALLEN_RATIO * watts > taught):
        taught = None
    return replace(
        gpu, bucket=bucket, bucket_began_monotonic_seconds=began, work=work, busy_watts=busy, taught_watts=taught
    )


def teach(gpu: GpuPower) -> GpuPower:
    """Take the present power as a working level: ranks were seen moving at it."""
    return gpu if gpu.watts is None else replace(gpu, taught_watts=gpu.watts)


def idle_levels(
    known: dict[str, float], samples: tuple[GpuSample, ...], held: frozenset[str], limit_ratio: float = 0.25
) -> dict[str, float]:
    """The slowly averaged power of each GPU that no process and no job holds, by uuid: its own idle level.

    A GPU that draws more than `limit_ratio` of its limit is at work for somebody whom this node cannot see (a pid
    namespace hides the processes), and teaches nothing.
    """
    levels = dict(known)
    for sample in samples:
        watts, limit = sample.power_watts, sample.power_limit_watts
        if watts is None or limit is None or sample.pids or sample.uuid in held or watts > limit_ratio * limit:
            continue
        old = levels.get(sample.uuid, watts)
        levels[sample.uuid] = old + 0.1 * (watts - old)
    return levels


class GpuLevels(Value, frozen=True):
    """What a GPU draws doing nothing, and doing this job's work, in watts.

    `is_light`: this work draws no more than cards do in measured hangs, so such power proves nothing.
    """

    floor_watts: float
    busy_watts: float
    is_light: bool = False

    def ratio(self, watts: float) -> float | None:
        """Where so much power lies between the two, as 0 to 1; None where they are too close to tell."""
        width = self.busy_watts - self.floor_watts
        return (watts - self.floor_watts) / width if width >= NARROWEST_WATTS else None


def gpu_levels(gpus: Mapping[str, GpuPower], settings: Detector) -> dict[str, GpuLevels]:
    """The levels of each GPU that has a history at work, by uuid."""
    floors = {uuid: floor_watts(gpu, settings) for uuid, gpu in gpus.items()}
    return {
        uuid: GpuLevels(floor_watts=floor, busy_watts=gpu.busy_watts, is_light=not has_worked(gpu, settings))
        for uuid, gpu in gpus.items()
        if (floor := floors[uuid]) is not None and gpu.busy_watts is not None
    }
