"""What is learnt of a job: which power is work, and how long it pauses where."""

from __future__ import annotations

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector import known_pauses, power_level
from hangwatch.detector.capture_due import doubled_pause
from hangwatch.detector.job_watch import JobWatch
from hangwatch.detector.known_pauses import EndedPause

ERRORS_BEFORE_SECONDS = 120.0  # XIDs and link errors, read each minute, may be the cause of a silence that begins later


def taught(watch: JobWatch, now: float, settings: Detector) -> JobWatch:
    """The watch of a job whose ranks were seen moving: what it draws now is work, and that is looked at again."""
    pause = 0.0 if watch.low_since is None else doubled_pause(watch, settings)
    gpus = {uuid: power_level.teach(gpu) for uuid, gpu in watch.gpus.items()}
    return replace(watch, gpus=gpus, low_since=now, relook_pause=pause)


def without_low_levels(watch: JobWatch, settings: Detector) -> JobWatch:
    """What was once shown to be work, under the ordinary line, is work no more when a look does not confirm it."""
    low = {uuid: gpu for uuid, gpu in watch.gpus.items() if power_level.is_low(gpu, settings)}
    return replace(watch, gpus=watch.gpus | {uuid: replace(gpu, taught_watts=None) for uuid, gpu in low.items()})


def ended_pause(watch: JobWatch) -> EndedPause | None:
    """What may be learnt once power is back; ranks that move while it is not are no end of a pause."""
    if watch.quiet_since is None or watch.back_since is None:
        return None
    return EndedPause(places=watch.places, began=watch.quiet_since, seconds=watch.back_since - watch.quiet_since)


def taught_by_pause(watch: JobWatch, now: float) -> JobWatch:
    """With the pause learnt that ended. Only now: whether ranks were replaced in it is what a later scan sees."""
    ended = watch.ended
    if ended is None:
        return watch
    if had_gpu_errors(watch, ended.began):
        return replace(watch, ended=None)
    return replace(watch, ended=None, pauses=known_pauses.learn(watch.pauses, ended, now))


def had_gpu_errors(watch: JobWatch, silent_since: float | None) -> bool:
    """Whether XIDs or link errors came on this node since shortly before the job fell silent."""
    errors = watch.gpu_errors_at
    return errors is not None and silent_since is not None and errors >= silent_since - ERRORS_BEFORE_SECONDS
