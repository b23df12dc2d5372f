"""Steps of the detector after a capture or a light capture: the stacks of the ranks change the state of the job."""

from collections.abc import Mapping

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector import known_pauses, sleepers
from hangwatch.detector.baseline import drop_low_baselines, had_gpu_errors, recover, with_learned_baseline
from hangwatch.detector.capture_due import delay_light_captures
from hangwatch.detector.gpu_quorum import has_fallen, is_down, is_quiet
from hangwatch.detector.job_watch import (
    JobWatch,
    MotionCount,
    longest_pause_seconds,
    pause_hold_seconds,
    with_capture_record,
    with_open_incident,
    with_power,
    with_suspicion,
)
from hangwatch.detector.on_progress import apply_confirming_capture, expect_progress, proves_nothing
from hangwatch.detector.transitions import Change, begin_suspicion, confirm_state, enter_state, plan_next_capture
from hangwatch.detector.watch_parts import GLANCE_SECONDS, Starting
from hangwatch.model import CodeRegion, JobState, RankId

# A rank that stays between the same few lines for this many holds is not judged
STANDSTILL_HOLDS = 2.0
# A job that enqueued a collective in this time is not suspected because it draws little power
PROGRESS_SECONDS = 10.0
_RESTING_WORDS = {
    JobState.SUSPENDED: "all {} ranks are stopped or frozen",
    JobState.OVER: "training is over: its {} ranks have disconnected and are idle",
}


def apply_capture(watch: JobWatch, seen: MotionCount, now: float, settings: Detector) -> Change:
    """Change the state of a job by the result of a capture. Return the changed watch and the actions."""
    watch = with_capture_record(with_power(watch, is_serving=seen.serves), capturing=False, captured_at=now)
    if watch.state is not JobState.SUSPECTED and not watch.is_open:
        return watch, ()
    if seen.frozen + seen.moving + seen.with_stack > 0:
        watch = with_suspicion(watch, saw_stacks=True)
    watch, seen = _correct_by_earlier_captures(watch, seen, now, settings)
    if not watch.identity.has_ranks:  # progress of a launcher proves nothing: the other node may wait in a queue
        return confirm_state(watch, JobState.STALLED, "its launcher still has no rank", now, settings)
    if seen.serves:
        return _learn_work(watch, f"all {seen.total} ranks are idle and wait for requests or tasks", now, settings)
    # A job that has not begun to work has no connections either.
    if watch.gap is not None and watch.state is JobState.SUSPECTED and proves_nothing(watch, seen, settings):
        message = f"{seen.moving} of {seen.total} ranks progress, and {seen.waiting} wait for other ranks"
        return _learn_work(watch, message, now, settings)
    if watch.gap is not None and watch.state is JobState.SUSPECTED and not watch.gap.is_at_hold:
        return apply_confirming_capture(watch, watch.gap, seen, now, settings)
    if seen.resting is JobState.SUSPENDED or (seen.resting is JobState.OVER and watch.has_worked):
        watch = _with_places(watch, frozenset({known_pauses.NOWHERE}))
        message = seen.traced_text or _RESTING_WORDS[seen.resting].format(seen.total)
        return confirm_state(watch, seen.resting, message, now, settings)
    if seen.most_move:
        message = f"{seen.moving} of {seen.total} ranks progress: the present power of the job is work"
        return _learn_work(watch, message, now, settings)
    watch = _with_movers(watch, seen)
    moved = watch.findings.moved_ranks
    if len(moved) * 2 > seen.total:
        message = f"{len(moved)} of {seen.total} ranks have progressed since then: the present power of the job is work"
        return _learn_work(watch, message, now, settings)
    is_first = watch.gap is not None and watch.state is JobState.SUSPECTED
    watch, actions = _judge(watch, seen, now, settings)
    watch = _capture_after_waking(watch, now, settings)
    if is_first and seen.with_stack < seen.total - seen.absent:
        # A light capture may miss stacks. After the hold, a capture may pause these ranks.
        watch = with_open_incident(watch, capture_wanted_at=max(now, watch.since))
    return watch, actions


def _capture_after_waking(watch: JobWatch, now: float, settings: Detector) -> JobWatch:
    """Return the watch with a capture planned for shortly after a sleeping rank wakes, if none is planned earlier."""
    woken_at = sleepers.next_capture_at(watch.findings.sleepers, now, settings.stalled_hold_seconds)
    planned_at = watch.incident.capture_wanted_at
    if woken_at is None or planned_at is None or planned_at <= woken_at:
        return watch
    return with_open_incident(watch, capture_wanted_at=woken_at)


def _judge(watch: JobWatch, seen: MotionCount, now: float, settings: Detector) -> Change:
    """Decide if a job is hung, stalled, or waits for other nodes. Return the changed watch and the actions.

    The job is not at rest, and at most half of its ranks progress.
    """
    frozen_captures = watch.findings.frozen_captures + 1 if seen.frozen == seen.total > 0 else 0
    watch = with_suspicion(watch, frozen_captures=frozen_captures, is_in_rendezvous=seen.is_in_rendezvous)
    watch = _with_places(watch, seen.places)
    if watch.state is JobState.HUNG and watch.gap is not None and watch.gap.permanent & seen.permanent:
        return confirm_state(watch, JobState.HUNG, watch.message, now, settings)
    if _are_late(watch, seen, now, settings):
        message = f"{seen.absent} of {seen.total} ranks have not started yet"
        return confirm_state(watch, JobState.STALLED, message, now, settings)
    if seen.frozen == seen.total > 0:
        if frozen_captures < 2 and watch.state is JobState.STALLED:
            return plan_next_capture(watch, now, settings), ()
        # A job that is already hung stays hung: its page must not come and go.
        if seen.waits_elsewhere and watch.state is not JobState.HUNG and not had_gpu_errors(watch, watch.quiet_since):
            message = f"all {seen.total} ranks wait for ranks of other nodes: this node does not cause the hang"
            return confirm_state(watch, JobState.WAITS_ELSEWHERE, message, now, settings)
        message = f"none of the {seen.total} ranks progresses{_describe_known_pause(watch, now, settings)}"
        return confirm_state(watch, JobState.HUNG, message, now, settings)
    verb = "progresses" if seen.moving == 1 else "progress"
    moving = f"{seen.moving} of {seen.total} ranks {verb}"
    if not seen.moving:
        moving = f"progress of {seen.unknown} of {seen.total} ranks is unknown"
    if names := seen.movers_text or seen.sleepers_text:
        moving = f"{moving}: {names}"
    return confirm_state(watch, JobState.STALLED, moving, now, settings)


def _with_movers(watch: JobWatch, seen: MotionCount) -> JobWatch:
    """Return the watch with the ranks that progress in this capture. It is unchanged if the job was ever busy.

    The ranks of a healthy job may progress in turn, so that each single capture finds most of them waiting.
    """
    if watch.power.was_busy or watch.state is JobState.HUNG:
        return watch
    return with_suspicion(watch, moved_ranks=watch.findings.moved_ranks | (seen.movers - seen.stays.keys()))


def _with_places(watch: JobWatch, places: frozenset[str]) -> JobWatch:
    """Return the watch with the places that one more capture found added to its suspicion."""
    return with_suspicion(watch, places=known_pauses.add_places(watch.findings.places, places))


def _learn_work(watch: JobWatch, message: str, now: float, settings: Detector) -> Change:
    """Learn that the present power is not a sign of a hang. End the suspicion. A later light capture verifies it."""
    if watch.gap is None or (watch.voters and is_quiet(watch.voters, settings)):
        watch = with_learned_baseline(watch, now, settings)
    if watch.is_open:
        return recover(watch, message, now)
    if watch.gap is not None:  # it progresses without a new collective
        watch = expect_progress(watch, now)
    return enter_state(watch, JobState.TRAINING, message, now)


def _are_late(watch: JobWatch, seen: MotionCount, now: float, settings: Detector) -> bool:
    """True if the absent ranks of a starting job have never existed, so that its launcher may still start them."""
    all_known_live = len(watch.identity.generation) - seen.started_since <= seen.total - seen.absent
    is_starting = not watch.has_worked and now - watch.identity.began < settings.startup_stalled_hold_seconds
    return seen.absent > 0 and all_known_live and is_starting


def _describe_known_pause(watch: JobWatch, now: float, settings: Detector) -> str:
    longest = longest_pause_seconds(watch, now)
    if longest is None:
        return ""
    hold = pause_hold_seconds(watch, now, settings)
    return f"; known pause at this place of at most {longest:.0f} s: hangwatch pages after {hold:.0f} s"


def apply_light_capture(watch: JobWatch, seen: MotionCount, now: float, settings: Detector) -> Change:
    """Change the state of a job by the result of a light capture. Return the changed watch and the actions.

    If most ranks progress, the present power becomes the learned baseline. If at least half of the ranks do not
    progress, a suspicion begins. In any other case, learned baselines under the usual threshold are dropped.
    """
    watch = with_power(watch, is_serving=seen.serves)
    watch = with_capture_record(watch, light_capture_since=None, light_captured_at=now)
    if isinstance(watch.phase, Starting):
        return _judge_start(watch, watch.phase, seen, now, settings), ()
    if watch.state is not JobState.TRAINING:
        return watch, ()
    watch, seen = _correct_by_earlier_captures(watch, seen, now, settings)
    if seen.is_well:
        return with_capture_record(with_learned_baseline(watch, now, settings), fall_pause_seconds=GLANCE_SECONDS), ()
    still = seen.frozen + seen.settled
    if watch.progress.is_known and watch.progress.gap_seconds(now) < PROGRESS_SECONDS:
        return delay_light_captures(watch, settings), ()
    if still * 2 >= seen.total > 0:
        # A job that was never at work has no other power to return to.
        if watch.power.was_busy and not (has_fallen(watch.voters, settings) or is_down(watch.voters, settings)):
            return watch, ()
        stuck = {uuid: replace(gpu, stuck_watts=gpu.watts) for uuid, gpu in watch.power.gpus.items()}
        return begin_suspicion(with_power(watch, gpus=stuck), f"{still} of {seen.total} ranks do not progress", now)
    if seen.with_stack * 2 >= seen.total > 0:
        watch = drop_low_baselines(watch, settings)
    return delay_light_captures(watch, settings), ()


def _judge_start(watch: JobWatch, start: Starting, seen: MotionCount, now: float, settings: Detector) -> JobWatch:
    """Return the watch of a starting job after a light capture. Power proves nothing yet, so nothing is learned."""
    is_frozen = seen.frozen == seen.total > 0 and not _are_late(watch, seen, now, settings)
    if is_frozen and not seen.serves and seen.resting is not JobState.SUSPENDED:
        return replace(watch, phase=replace(start, frozen_captures=start.frozen_captures + 1, capture_pause_seconds=0))
    pause = 2 * max(settings.hold_seconds, start.capture_pause_seconds)
    return replace(watch, phase=replace(start, frozen_captures=0, capture_pause_seconds=pause))


def find_settled_ranks(
    watch: JobWatch, regions: Mapping[RankId, CodeRegion], now: float, settings: Detector
) -> frozenset[RankId]:
    """Return the ranks that have stayed between the same few lines of code for minutes.

    `regions` are the lines of code that each rank did not leave during the present capture.
    """
    standstills = sleepers.follow_stays(watch.capture_record.standstills, regions, now)
    hold = STANDSTILL_HOLDS * settings.hold_seconds
    return frozenset(sleepers.find_settled(standstills, now, hold, max(hold, settings.stalled_hold_seconds)))


def _correct_by_earlier_captures(
    watch: JobWatch, seen: MotionCount, now: float, settings: Detector
) -> tuple[JobWatch, MotionCount]:
    """Return the watch and the result of a capture, corrected by earlier captures.

    A rank that has stayed between the same few lines of code counts as unknown, even if it seems to move.
    """
    ranks = find_settled_ranks(watch, seen.stays, now, settings)
    to_and_fro = len(ranks & seen.movers)
    seen = replace(seen, moving=seen.moving - to_and_fro, unknown=seen.unknown + to_and_fro, settled=len(ranks))
    standstills = sleepers.follow_stays(watch.capture_record.standstills, seen.stays, now)
    return with_capture_record(watch, standstills=standstills), seen
