"""Steps of the detector before the hold: a gap between collectives, or low power if no counters are known.

A job that has enqueued no collective for an unusually long time is captured, without pausing a process. If its ranks do
not progress, it is suspected, with a verdict and without a page. From then on its counters decide, not its power: a
new collective ends the suspicion. Without one, a capture that ends at the hold decides if the job is hung or stalled.
Without known counters, low power takes the place of the gap, and power ends the suspicion.
"""

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from hangwatch.config import Detector, Progress
from hangwatch.detector import known_pauses
from hangwatch.detector.baseline import end_pause, learn_pause, recover_when_back
from hangwatch.detector.capture_due import (
    CAPTURE_LOST_SECONDS,
    capture_before_timeout,
    capture_when_due,
    give_up_lost_capture,
)
from hangwatch.detector.gpu_quorum import is_quiet
from hangwatch.detector.job_watch import (
    JobWatch,
    MotionCount,
    quiet_seconds,
    should_page,
    with_capture_record,
    with_open_incident,
    with_suspicion,
)
from hangwatch.detector.progress_gaps import HOUR_SECONDS, follow_counters, skip_time
from hangwatch.detector.transitions import Change, TakeCapture, begin_capture, confirm_state, enter_state
from hangwatch.detector.watch_parts import GapSuspicion, Silence, Suspicion
from hangwatch.model import JobState, ProcessId
from hangwatch.model.flight_records import ProgressCounter

LOW_POWER_SECONDS = 15.0  # of a job without known counters, before its first light capture
OLD_POWER_SECONDS = 10.0  # an older reading of power does not show that it is still low
BETWEEN_CAPTURES_SECONDS = 20.0  # from the start of one capture to the start of the one that confirms it
# A gap is unusual after so many holds while usual gaps are not known, as at a start
NEW_JOB_HOLDS = 2.5
_MAY_BE_SUSPECTED = frozenset(
    {JobState.STARTING, JobState.TRAINING, JobState.QUIET, JobState.UNKNOWN, JobState.RECOVERED}
)


def apply_counters(
    watch: JobWatch,
    counters: Mapping[ProcessId, ProgressCounter],
    ranks: Collection[ProcessId],
    now: float,
    settings: Detector,
    progress: Progress,
    *,
    capture_seconds: float,
    gap_seconds: float,
) -> Change:
    """Change the state of a job by one reading of the counters of its ranks. Return the changed watch and the actions.

    If they are not known, the length of its low power decides if a capture is due, and power ends the suspicion. A time
    of more than `gap_seconds` without a reading does not count. `capture_seconds` is the usual duration of a capture.
    """
    if watch.state is JobState.ENDED or not watch.identity.has_ranks:
        return watch, ()
    unread = 0.0 if watch.progress.read_at is None else now - watch.progress.read_at
    if unread > gap_seconds:
        watch = _skip_time(watch, unread)
    learns = watch.state is not JobState.HUNG  # the gap before a verdict "hung" did not end by itself
    watch = replace(watch, progress=follow_counters(watch.progress, counters, ranks, now, learns=learns))
    gap = watch.gap
    if gap is None:
        return _capture_gap(watch, now, settings, progress, capture_seconds)
    if gap.by_power:
        is_due = watch.state is JobState.SUSPECTED and _has_reading(watch, now)
        return _suspected(watch, gap, now, settings, capture_seconds) if is_due else (watch, ())
    if watch.progress.advances > gap.advances:
        unusual = watch.progress.unusual_seconds(progress.shortest_gap_seconds, settings.hold_seconds)
        if not watch.is_open or unusual is None or watch.progress.gap_seconds(now) < unusual:
            return _continue(watch, now, settings)
        watch, gap = _stop_again(watch, gap, now, settings)
    if watch.state is JobState.SUSPECTED:
        return _suspected(watch, gap, now, settings, capture_seconds)
    watch, actions = capture_when_due(with_open_incident(watch, back_since=None), now)
    return (watch, actions) if actions else capture_before_timeout(watch, now, capture_seconds)


def _skip_time(watch: JobWatch, seconds: float) -> JobWatch:
    watch = replace(watch, progress=skip_time(watch.progress, seconds))
    gap = watch.gap
    if gap is None or gap.by_power or watch.silence is None:
        return watch
    watch = replace(watch, silence=replace(watch.silence, since=watch.silence.since + seconds))
    return with_suspicion(watch, gap=replace(gap, asked_at=gap.asked_at + seconds))


def _capture_gap(watch: JobWatch, now: float, settings: Detector, progress: Progress, capture_seconds: float) -> Change:
    """Request a light capture if the present gap is unusual, or has lasted `LOW_POWER_SECONDS` if power measures it.

    Before the hold, the number of these captures is limited. After one in which the job progressed, the next one is
    due when the gap has lasted twice as long.
    """
    looks, by_power = watch.capture_record, _is_by_power(watch, now)
    gap_seconds = quiet_seconds(watch, now) if by_power else watch.progress.gap_seconds(now)
    if looks.gap_capture_since is not None:
        is_lost = now - looks.gap_capture_since >= CAPTURE_LOST_SECONDS
        return (expect_progress(with_capture_record(watch, gap_capture_since=None), now) if is_lost else watch), ()
    if watch.state not in _MAY_BE_SUSPECTED or gap_seconds < progress.shortest_gap_seconds:
        return watch, ()
    unusual_seconds = watch.progress.unusual_seconds(progress.shortest_gap_seconds, settings.hold_seconds)
    last_seconds = settings.hold_seconds - capture_seconds  # a later capture is the one at the hold
    if by_power:
        if gap_seconds >= last_seconds:
            return watch, ()  # low power requests the capture at the hold
        unusual_seconds = LOW_POWER_SECONDS
    elif unusual_seconds is None:
        if not watch.is_counted_only:
            return watch, ()
        unusual_seconds = last_seconds = NEW_JOB_HOLDS * settings.hold_seconds
    # after a capture in which the job progressed
    next_seconds = looks.next_gap_seconds if looks.gap_in_progress == watch.progress.advances else 0.0
    if gap_seconds < max(min(unusual_seconds, last_seconds), next_seconds):
        return watch, ()
    counted = f"no new collective for {gap_seconds:.0f} s; its usual gaps are shorter than {unusual_seconds:.0f} s"
    reason = f"quiet for {gap_seconds:.0f} s" if by_power else counted
    if gap_seconds >= last_seconds:
        gap = GapSuspicion(advances=watch.progress.advances, asked_at=now)
        watch, actions = _begin_suspicion(watch, gap, reason, now)
        watch, more = _ask_at_hold(watch, gap, reason, now)
        return watch, (*actions, *more)
    recent = tuple(at for at in looks.gap_captures if now - at < HOUR_SECONDS)
    if len(recent) >= progress.captures_per_hour:
        return watch, ()
    watch = with_capture_record(watch, gap_capture_since=now, gap_captures=(*recent, now))
    return watch, (TakeCapture(job_key=watch.identity.name.job_key, reason=reason, is_light=True, result="gap"),)


def _is_by_power(watch: JobWatch, now: float) -> bool:
    """True if the power of a job, not its counters, shows how long it has not progressed."""
    return watch.state is JobState.QUIET and not watch.progress.is_known and _has_reading(watch, now)


def _has_reading(watch: JobWatch, now: float) -> bool:
    return watch.power.read_at is not None and now - watch.power.read_at < OLD_POWER_SECONDS


def _begin_suspicion(
    watch: JobWatch, gap: GapSuspicion, message: str, now: float, places: frozenset[str] = frozenset()
) -> Change:
    silence = watch.silence if gap.by_power else Silence(since=now - watch.progress.gap_seconds(now))
    watch = learn_pause(watch, watch.ended_pause, now)
    watch = replace(watch, silence=silence, suspicion=Suspicion(fell=True, places=places, gap=gap))
    return enter_state(watch, JobState.SUSPECTED, message, now)


def _ask_at_hold(watch: JobWatch, gap: GapSuspicion, reason: str, now: float) -> Change:
    """Request the capture that ends at the hold, and decides if the job is hung."""
    watch = with_suspicion(watch, gap=replace(gap, asked_at=now, is_at_hold=True))
    return begin_capture(watch, reason, is_light=True)


def apply_gap_capture(watch: JobWatch, seen: MotionCount, now: float, settings: Detector) -> Change:
    """Change the state of a job by the result of a light capture of its gap. Return the changed watch and the actions.

    A gap proves nothing if most ranks progress, or if the power is not low and no rank waits for another one: the job
    may work without collectives. Low power proves nothing if any rank may progress: the others may wait for it.
    """
    asked_at, by_power = watch.capture_record.gap_capture_since, _is_by_power(watch, now)
    watch = with_capture_record(watch, gap_capture_since=None)
    progressed_at = watch.quiet_since if by_power else watch.progress.progressed_at
    if asked_at is None or progressed_at is None or progressed_at > asked_at or watch.state not in _MAY_BE_SUSPECTED:
        return watch, ()
    if not seen.total or proves_nothing(watch, seen, settings) or (by_power and seen.frozen < seen.total):
        return expect_progress(watch, now), ()
    gap = GapSuspicion(
        advances=watch.progress.advances, asked_at=now - seen.seconds, permanent=seen.permanent, by_power=by_power
    )
    what = "quiet" if by_power else "no new collective"
    message = f"{what} for {now - progressed_at:.0f} s, and its ranks do not progress"
    return _begin_suspicion(watch, gap, message, now, seen.places)


def proves_nothing(watch: JobWatch, seen: MotionCount, settings: Detector) -> bool:
    """True if a job may work without collectives: most ranks progress, or none waits while the power is not low."""
    return seen.is_well or (not seen.waiting and not (watch.voters and is_quiet(watch.voters, settings)))


def expect_progress(watch: JobWatch, now: float) -> JobWatch:
    """Return the watch after a capture without a result or with progress. The next one is due after twice the gap."""
    twice = 2 * max(quiet_seconds(watch, now), watch.progress.gap_seconds(now))
    return with_capture_record(watch, next_gap_seconds=twice, gap_in_progress=watch.progress.advances)


def _suspected(watch: JobWatch, gap: GapSuspicion, now: float, settings: Detector, capture_seconds: float) -> Change:
    """Request the next capture of a suspected job if it is due.

    It is due so that its last round ends at the hold. It is due earlier if the first capture found what cannot end by
    itself.
    """
    if watch.capture_record.capturing:
        return give_up_lost_capture(watch, gap.asked_at, now, settings)
    if quiet_seconds(watch, now) >= settings.hold_seconds - capture_seconds:
        what = "quiet for" if gap.by_power else "still no new collective after"
        return _ask_at_hold(watch, gap, f"{what} {quiet_seconds(watch, now):.0f} s", now)
    if not gap.permanent or now - gap.asked_at < BETWEEN_CAPTURES_SECONDS:
        return watch, ()
    watch = with_suspicion(watch, gap=replace(gap, asked_at=now))
    return begin_capture(watch, "a second capture must confirm what the first one found", is_light=True)


def apply_confirming_capture(
    watch: JobWatch, gap: GapSuspicion, seen: MotionCount, now: float, settings: Detector
) -> Change:
    """Change the state of a suspected job by a capture before the hold: hung if it confirms the first one."""
    confirmed = gap.permanent & seen.permanent
    places = known_pauses.add_places(watch.findings.places, seen.places)
    gap = replace(gap, permanent=seen.permanent, asked_at=now - seen.seconds, pages_at_once=bool(confirmed))
    watch = with_suspicion(watch, gap=gap, places=places, frozen_captures=settings.confirming_captures)
    if not confirmed:
        return watch, ()
    message = f"none of the {seen.total} ranks progresses, and this cannot end by itself"
    return confirm_state(watch, JobState.HUNG, message, now, settings)


def _stop_again(watch: JobWatch, gap: GapSuspicion, now: float, settings: Detector) -> tuple[JobWatch, GapSuspicion]:
    """Return the watch of an open job that has enqueued a few collectives and has stopped again. A page stays."""
    gap = replace(gap, advances=watch.progress.advances, pages_at_once=should_page(watch, now, settings))
    silence = Silence(since=now - watch.progress.gap_seconds(now))
    return with_suspicion(replace(watch, silence=silence), gap=gap), gap


def _continue(watch: JobWatch, now: float, settings: Detector) -> Change:
    """Change the state of a suspected or open job that enqueues collectives again."""
    if watch.state is not JobState.SUSPECTED:
        return recover_when_back(watch, "its ranks enqueue collectives again", now, settings)
    message = f"it enqueues collectives again after {quiet_seconds(watch, now):.0f} s"
    return enter_state(learn_pause(watch, end_pause(watch, now), now), JobState.TRAINING, message, now)
