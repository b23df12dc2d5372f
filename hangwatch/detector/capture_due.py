"""Decide which capture is due: a light capture, the next capture of an open incident, or a capture before a timeout."""

import math

from msgspec.structs import replace

from hangwatch.config import Capture, Detector
from hangwatch.detector import power_level
from hangwatch.detector.gpu_quorum import has_quorum
from hangwatch.detector.job_watch import (
    JobWatch,
    quiet_seconds,
    with_capture_record,
    with_open_incident,
    with_suspicion,
)
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.transitions import Change, TakeCapture, begin_capture, confirm_state
from hangwatch.detector.watch_parts import Starting
from hangwatch.model import JobState

# Longest pause between light captures of a job with low power; the first is the hold
RELOOK_MAX_SECONDS = 3600.0
CAPTURE_LOST_SECONDS = 300.0  # a capture that has not ended after this time is abandoned
LOOK_SECONDS = Capture().usual_seconds
# Longest time between the last capture and the timeout; a newer capture is not repeated
LAST_LOOK_SECONDS = 30.0


def light_capture_when_due(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> Change:
    """Request a light capture if it is due: power fell and has been flat for the hold, or the job always draws little.

    In both cases the power alone shows neither work nor a hang.
    """
    looks = watch.capture_record
    if looks.light_capture_since is not None:
        ended = give_up_lost_light_capture(watch, now)
        return (watch if ended is watch else delay_light_captures(ended, settings)), ()
    fallen = [gpu for gpu in voters if power_level.is_under_work(gpu, settings)]
    flat = sum(power_level.flat_seconds(gpu, now) >= settings.hold_seconds for gpu in fallen)
    if has_quorum(flat, voters, settings) and _seconds_since(looks.fall_captured_at, now) >= looks.fall_pause_seconds:
        # A new power level: captures at the previous level prove nothing about it.
        watch = with_capture_record(watch, low_since=None, low_power_pause_seconds=0.0, fall_captured_at=now)
        reason = f"its power fell and has been flat for {settings.hold_seconds:.0f} s"
    elif min(_seconds_since(looks.light_captured_at, now), _low_seconds(watch, now)) >= _low_power_pause(
        watch, settings
    ):
        reason = f"its power is low, and no rank was seen progressing for {_low_seconds(watch, now):.0f} s"
    else:
        return watch, ()
    return _request_light_capture(watch, reason, now)


def _request_light_capture(watch: JobWatch, reason: str, now: float) -> Change:
    wanted = TakeCapture(job_key=watch.identity.name.job_key, reason=reason, is_light=True, result="low_power")
    return with_capture_record(watch, light_capture_since=now), (wanted,)


def give_up_lost_light_capture(watch: JobWatch, now: float) -> JobWatch:
    """Return the watch without a light capture that has not ended after 300 s."""
    since = watch.capture_record.light_capture_since
    if since is None or now - since < CAPTURE_LOST_SECONDS:
        return watch
    return with_capture_record(watch, light_capture_since=None, light_captured_at=now)


def delay_light_captures(watch: JobWatch, settings: Detector) -> JobWatch:
    """Return the watch after a light capture without a result. The next one is due after twice the last pause."""
    pause = min(2 * watch.capture_record.fall_pause_seconds, RELOOK_MAX_SECONDS)
    return with_capture_record(watch, fall_pause_seconds=pause, low_power_pause_seconds=double_pause(watch, settings))


def double_pause(watch: JobWatch, settings: Detector) -> float:
    """Return the pause before the next light capture of a job with low power: twice the last pause, in seconds."""
    return min(2 * _low_power_pause(watch, settings), RELOOK_MAX_SECONDS)


def _low_power_pause(watch: JobWatch, settings: Detector) -> float:
    return max(watch.capture_record.low_power_pause_seconds, settings.hold_seconds)


def _seconds_since(glanced_at: float | None, now: float) -> float:
    return math.inf if glanced_at is None else now - glanced_at


def _low_seconds(watch: JobWatch, now: float) -> float:
    return 0.0 if watch.capture_record.low_since is None else now - watch.capture_record.low_since


def light_capture_at_start(watch: JobWatch, start: Starting, now: float, settings: Detector) -> Change:
    """Request a light capture of a starting job if it is due: after `hold_seconds`, then again and again."""
    watch = replace(give_up_lost_light_capture(watch, now), phase=start)
    looks, began = watch.capture_record, watch.identity.began
    last = max(began, watch.since, looks.light_captured_at or 0.0)
    if looks.light_capture_since is not None or now - last < max(settings.hold_seconds, start.capture_pause_seconds):
        return watch, ()
    return _request_light_capture(watch, f"it is not busy, {now - began:.0f} s after its start", now)


def capture_when_due(watch: JobWatch, now: float) -> Change:
    """Request the next capture of an open incident if it is due."""
    wanted_at = watch.incident.capture_wanted_at
    if not watch.capture_record.capturing and wanted_at is not None and now >= wanted_at:
        return begin_capture(with_open_incident(watch, capture_wanted_at=None), f"still {watch.state.value}")
    return watch, ()


def capture_before_timeout(watch: JobWatch, now: float, capture_seconds: float) -> Change:
    """Request one more capture, once per hang, shortly before the collective timeout ends the job.

    After the timeout, the processes and their stacks are gone. A job that was never busy is skipped, because it is
    unknown when it began to wait. No capture is requested if less than `capture_seconds`, the usual duration of a
    capture, remain.
    """
    may_end = watch.state in (JobState.HUNG, JobState.STALLED, JobState.WAITS_ELSEWHERE) and watch.has_worked
    time_out, looks = watch.timeout.seconds, watch.capture_record
    if not may_end or time_out is None or watch.findings.timeout_capture_at is not None or looks.capturing:
        return watch, ()
    remaining_seconds = time_out - quiet_seconds(watch, now)
    is_fresh = looks.captured_at is not None and now - looks.captured_at < LAST_LOOK_SECONDS
    is_back = watch.incident.back_since is not None
    if is_fresh or is_back or not capture_seconds < remaining_seconds <= capture_seconds + LAST_LOOK_SECONDS:
        return watch, ()
    source = "by its environment" if watch.timeout.recorded_seconds is None else "as its ranks recorded"
    reason = f"captured once more: in {remaining_seconds:.0f} s its collective timeout may end the job ({source})"
    watch = with_suspicion(with_open_incident(watch, capture_wanted_at=None), timeout_capture_at=now)
    return begin_capture(watch, reason, is_in_timeline=True)


def give_up_lost_capture(watch: JobWatch, asked_at: float, now: float, settings: Detector) -> Change:
    """Abandon a capture that has not ended after 300 s. The job is then stalled, and a new capture is planned."""
    if now - asked_at < CAPTURE_LOST_SECONDS:
        return watch, ()
    message = f"its stacks could not be taken within {CAPTURE_LOST_SECONDS:g} s"
    return confirm_state(with_capture_record(watch, capturing=False), JobState.STALLED, message, now, settings)
