"""How a job goes from one state to another, and the looks that it asks for on its way."""

from __future__ import annotations

from typing import TypeAlias

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector.job_watch import STALLED_STATES, JobWatch
from hangwatch.model import OPEN_STATES, JobName, JobState, Value


class TakeCapture(Value, frozen=True):
    """Take the stacks of every rank of this job now; a glance, before there is a suspicion, pauses nothing.

    `is_told`: the reason is worth a line in the job's timeline.
    """

    job_key: str
    reason: str
    is_glance: bool = False
    is_told: bool = False


class Transition(Value, frozen=True):
    """The job went from one state to another, and why, in one sentence."""

    job: JobName
    before: JobState
    state: JobState
    message: str


Action: TypeAlias = TakeCapture | Transition


def go(watch: JobWatch, state: JobState, message: str, now: float) -> tuple[JobWatch, tuple[Action, ...]]:
    """Enter a state. What is timed in a silence is forgotten where that is over."""
    name = JobName(job_id=watch.job_id, job_key=watch.job_key)
    move = Transition(job=name, before=watch.state, state=state, message=message)
    if state not in (JobState.QUIET, JobState.SUSPECTED) and state not in OPEN_STATES:
        watch = replace(
            watch,
            quiet_since=None,
            stalled_since=None,
            capture_wanted_at=None,
            back_since=None,
            over_since=None,
            recorded_seconds=None,
        )
        watch = replace(watch, gpus={uuid: replace(gpu, stuck_watts=None) for uuid, gpu in watch.gpus.items()})
    return replace(watch, state=state, since=now, message=message), (move,)


def suspect(watch: JobWatch, reason: str, now: float) -> tuple[JobWatch, tuple[Action, ...]]:
    """Begin a suspicion, and ask for the stacks of every rank."""
    since = watch.quiet_since if watch.quiet_since is not None else watch.low_since
    watch = replace(
        watch,
        capturing=True,
        frozen_captures=0,
        saw_stacks=False,
        last_look_at=None,
        places=frozenset(),
        moved=frozenset(),
        fell=watch.state is not JobState.STARTING,
        quiet_since=watch.began if since is None else since,
    )
    watch, actions = go(watch, JobState.SUSPECTED, reason, now)
    return watch, (*actions, TakeCapture(job_key=watch.job_key, reason=reason))


def confirm(
    watch: JobWatch, state: JobState, message: str, now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    """Enter or stay in an open state, and plan the next look."""
    if watch.state is not state:
        # A hung job in which something moves once has stood still all the same: its page must not come and go.
        stood_since = watch.since if watch.state is JobState.HUNG else watch.stalled_since
        stalled_since = now if stood_since is None else stood_since
        watch = replace(watch, stalled_since=stalled_since if state in STALLED_STATES else None)
        watch, actions = go(replace(watch, back_since=None, capture_pause=0.0), state, message, now)
    else:
        watch, actions = replace(watch, message=message), ()
    return look_again(watch, now, settings), actions


def look_again(watch: JobWatch, now: float, settings: Detector) -> JobWatch:
    """Plan the next look at an open incident: at doubling pauses."""
    pause = min(max(settings.recapture_seconds, 2 * watch.capture_pause), settings.recapture_max_seconds)
    return replace(watch, capture_pause=pause, capture_wanted_at=now + pause)


def end(watch: JobWatch, message: str, now: float) -> tuple[JobWatch, tuple[Action, ...]]:
    """The ranks are gone, or replaced by a restart."""
    if watch.state is JobState.ENDED:
        return watch, ()
    return go(watch, JobState.ENDED, message, now)
