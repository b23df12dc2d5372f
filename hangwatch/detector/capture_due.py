"""Which look at a job is due now: a glance, one more while an incident is open, the last one before its time-out."""

from __future__ import annotations

import math

from msgspec.structs import replace

from hangwatch.config import Capture, Detector
from hangwatch.detector import power_level
from hangwatch.detector.gpu_quorum import has_quorum
from hangwatch.detector.job_watch import JobWatch, quiet_seconds, time_out_seconds
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.transitions import Action, TakeCapture, confirm
from hangwatch.model import JobState

RELOOK_MAX_SECONDS = 3600.0  # longest pause before a job that draws little is glanced at again; the first is the hold
CAPTURE_LOST_SECONDS = 300.0  # a capture that was asked for and never came back
LOOK_SECONDS = Capture().usual_seconds
LAST_LOOK_SECONDS = 30.0  # so long before a job ends itself its last look should be over; a fresher one is not repeated


def glance_when_due(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    """Ask for a glance where power alone can tell nothing: it fell and is flat, or the job draws little anyway."""
    if watch.glancing_since is not None:
        is_lost = now - watch.glancing_since >= CAPTURE_LOST_SECONDS
        return (shown_nothing(replace(watch, glancing_since=None, glanced_at=now), settings) if is_lost else watch), ()
    fallen = [gpu for gpu in voters if power_level.is_under_work(gpu, settings)]
    flat = sum(power_level.flat_seconds(gpu, now) >= settings.hold_seconds for gpu in fallen)
    if has_quorum(flat, voters, settings) and _rested(watch.fall_glanced_at, now) >= watch.glance_pause:
        # Another level: what was seen at the last one says nothing.
        watch = replace(watch, low_since=None, relook_pause=0.0, fall_glanced_at=now)
        reason = f"its power fell and has been flat for {settings.hold_seconds:.0f} s"
    elif min(_rested(watch.glanced_at, now), _low_seconds(watch, now)) >= _relook_pause(watch, settings):
        reason = f"draws little, and it is {_low_seconds(watch, now):.0f} s since its ranks were last seen moving"
    else:
        return watch, ()
    wanted = TakeCapture(job_key=watch.job_key, reason=reason, is_glance=True)
    return replace(watch, glancing_since=now), (wanted,)


def shown_nothing(watch: JobWatch, settings: Detector) -> JobWatch:
    """After a glance that nothing came of, the next one comes later."""
    glance_pause = min(2 * watch.glance_pause, RELOOK_MAX_SECONDS)
    return replace(watch, glance_pause=glance_pause, relook_pause=doubled_pause(watch, settings))


def doubled_pause(watch: JobWatch, settings: Detector) -> float:
    """The pause in seconds after one more glance at a job that draws little."""
    return min(2 * _relook_pause(watch, settings), RELOOK_MAX_SECONDS)


def _relook_pause(watch: JobWatch, settings: Detector) -> float:
    return max(watch.relook_pause, settings.hold_seconds)


def _rested(glanced_at: float | None, now: float) -> float:
    return math.inf if glanced_at is None else now - glanced_at


def _low_seconds(watch: JobWatch, now: float) -> float:
    return 0.0 if watch.low_since is None else now - watch.low_since


def look_when_due(watch: JobWatch, now: float) -> tuple[JobWatch, tuple[Action, ...]]:
    """Ask for the next look at an open incident, where its time has come."""
    if not watch.capturing and watch.capture_wanted_at is not None and now >= watch.capture_wanted_at:
        watch = replace(watch, capturing=True, capture_wanted_at=None)
        return watch, (TakeCapture(job_key=watch.job_key, reason=f"still {watch.state.value}"),)
    return watch, ()


def last_look(watch: JobWatch, now: float, look_seconds: float) -> tuple[JobWatch, tuple[Action, ...]]:
    """One more look, once in a hang, before its time-out ends the job and takes what could be seen with it.

    Nobody knows when a job began to wait that was never at work. So short before its end that a look would meet dying
    ranks none begins.
    """
    may_end = watch.state in (JobState.HUNG, JobState.STALLED, JobState.WAITS_ELSEWHERE) and watch.was_busy
    time_out = time_out_seconds(watch)
    if not may_end or time_out is None or watch.last_look_at is not None or watch.capturing:
        return watch, ()
    left = time_out - quiet_seconds(watch, now)
    is_fresh = watch.captured_at is not None and now - watch.captured_at < LAST_LOOK_SECONDS
    if is_fresh or watch.back_since is not None or not look_seconds < left <= look_seconds + LAST_LOOK_SECONDS:
        return watch, ()
    source = "by its environment" if watch.recorded_seconds is None else "as its ranks recorded"
    reason = f"looked at once more: in {left:.0f} s its collective time-out may end the job ({source})"
    watch = replace(watch, capturing=True, capture_wanted_at=None, last_look_at=now)
    return watch, (TakeCapture(job_key=watch.job_key, reason=reason, is_told=True),)


def unless_lost(watch: JobWatch, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """Take it that a look which has not come back for so long never will: its job is stalled, and looked at again."""
    if now - watch.since >= CAPTURE_LOST_SECONDS:
        message = f"its stacks could not be taken in {CAPTURE_LOST_SECONDS:g} s"
        return confirm(replace(watch, capturing=False), JobState.STALLED, message, now, settings)
    return watch, ()
