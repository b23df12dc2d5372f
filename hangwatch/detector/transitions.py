"""Transitions between the states of a job, and the captures that they request."""

from typing import Literal, TypeAlias

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector.job_watch import STALLED_STATES, JobWatch, with_capture_record, with_open_incident, with_power
from hangwatch.detector.watch_parts import OpenIncident, Silence, Starting, Suspicion
from hangwatch.model import OPEN_STATES, JobName, JobState, Value


class TakeCapture(Value, frozen=True):
    """A request to capture every rank, without a pause if `is_light`. `is_in_timeline`: the timeline shows it."""

    job_key: str
    reason: str
    is_light: bool = False
    result: Literal["state", "low_power", "gap"] = "state"  # the question that it answers
    is_in_timeline: bool = False


class Transition(Value, frozen=True):
    """A change of a job's state from `before` to `state`, or a warning if they are equal. `message` is the reason."""

    job: JobName
    before: JobState
    state: JobState
    message: str


Action: TypeAlias = TakeCapture | Transition
Change: TypeAlias = tuple[JobWatch, tuple[Action, ...]]
"""The result of a step: the changed watch of a job, and the actions."""


def begin_capture(watch: JobWatch, reason: str, *, is_light: bool = False, is_in_timeline: bool = False) -> Change:
    """Return the watch with a running capture, and the request for it."""
    key = watch.identity.name.job_key
    wanted = TakeCapture(job_key=key, reason=reason, is_light=is_light, is_in_timeline=is_in_timeline)
    return with_capture_record(watch, capturing=True), (wanted,)


def enter_state(watch: JobWatch, state: JobState, message: str, now: float) -> Change:
    """Return the watch in `state`, and the transition. Only quiet, suspected and open states keep the last silence."""
    move = Transition(job=watch.identity.name, before=watch.state, state=state, message=message)
    if state not in (JobState.QUIET, JobState.SUSPECTED) and state not in OPEN_STATES:
        time_out = replace(watch.timeout, recorded_seconds=None)
        watch = replace(watch, silence=None, suspicion=None, open_incident=None, timeout=time_out)
        gpus = {uuid: replace(gpu, stuck_watts=None) for uuid, gpu in watch.power.gpus.items()}
        watch = with_power(watch, gpus=gpus)
    phase = Starting() if state is JobState.STARTING else None
    return replace(watch, state=state, since=now, message=message, phase=phase), (move,)


def begin_suspicion(watch: JobWatch, reason: str, now: float) -> Change:
    """Return the watch in state suspected, and a request to capture every rank.

    It is silent since its power fell. A job that was never busy is silent since its last collective, or its start.
    """
    last = (watch.progress.progressed_at if watch.progress.advances else None) or watch.identity.began
    since = last if watch.capture_record.low_since is None else watch.capture_record.low_since
    silence = Silence(since=since) if watch.silence is None else watch.silence
    watch = replace(watch, silence=silence, suspicion=Suspicion(fell=watch.state is not JobState.STARTING))
    watch, actions = enter_state(watch, JobState.SUSPECTED, reason, now)
    watch, wanted = begin_capture(watch, reason)
    return watch, (*actions, *wanted)


def confirm_state(watch: JobWatch, state: JobState, message: str, now: float, settings: Detector) -> Change:
    """Return the watch in an open state, which may be its state already, with the next capture planned."""
    if watch.state is state:
        return plan_next_capture(replace(watch, message=message), now, settings), ()
    # A hung job that becomes stalled keeps its start time: its page must not come and go.
    kept = watch.since if watch.state is JobState.HUNG else watch.incident.stalled_since
    began = watch.silence.since if watch.is_counted and watch.silence is not None else now  # a gap: last collective
    stalled_since = began if kept is None else kept
    begun = OpenIncident(stalled_since=stalled_since if state in STALLED_STATES else None)
    watch, actions = enter_state(replace(watch, open_incident=begun), state, message, now)
    return plan_next_capture(watch, now, settings), actions


def plan_next_capture(watch: JobWatch, now: float, settings: Detector) -> JobWatch:
    """Return the watch with the next capture planned. Each pause is twice the previous one, up to a limit."""
    twice = 2 * watch.incident.capture_pause_seconds
    pause = min(max(settings.recapture_seconds, twice), settings.recapture_max_seconds)
    return with_open_incident(watch, capture_pause_seconds=pause, capture_wanted_at=now + pause)


def end_watch(watch: JobWatch, message: str, now: float) -> Change:
    """Return the watch in state ended: its ranks are gone, or a restart has replaced them."""
    if watch.state is JobState.ENDED:
        return watch, ()
    return enter_state(watch, JobState.ENDED, message, now)
