"""The states of a job by the stacks of its ranks: what a capture and a glance change in them."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector import known_pauses, standstill
from hangwatch.detector.baseline import ended_pause, had_gpu_errors, taught, without_low_levels
from hangwatch.detector.capture_due import shown_nothing
from hangwatch.detector.gpu_quorum import is_still_down
from hangwatch.detector.job_watch import GLANCE_SECONDS, JobWatch, MotionCount, pause_hold_seconds
from hangwatch.detector.transitions import Action, confirm, go, look_again, suspect
from hangwatch.model import JobState, RankId, Stay

STANDSTILL_HOLDS = 2.0  # between so few places for so many holds, and a rank that looked moving cannot be judged
_RESTING_WORDS = {
    JobState.SUSPENDED: "all {} ranks are stopped or frozen",
    JobState.OVER: "training is over: of its {} ranks none is connected to another one",
}


def captured(watch: JobWatch, seen: MotionCount, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """Take the outcome of a capture that `step` asked for."""
    saw_stacks = watch.saw_stacks or seen.frozen + seen.moving + seen.stacked > 0
    watch = replace(watch, capturing=False, captured_at=now, saw_stacks=saw_stacks, serves=seen.serves)
    if watch.state is not JobState.SUSPECTED and not watch.is_open:
        return watch, ()
    watch, seen = _with_other_looks(watch, seen, now, settings)
    if not watch.has_ranks:  # whether its launcher moves says nothing: the other node may be in a queue
        return confirm(watch, JobState.STALLED, "its launcher still has no rank", now, settings)
    if seen.serves:
        return _well(watch, f"all {seen.total} ranks wait for clients: an idle service", now, settings)
    # Before it was ever at work a job has no connections either.
    if seen.resting is JobState.SUSPENDED or (seen.resting is JobState.OVER and watch.was_busy):
        watch = replace(watch, places=known_pauses.also(watch.places, frozenset({known_pauses.NOWHERE})))
        return confirm(watch, seen.resting, _RESTING_WORDS[seen.resting].format(seen.total), now, settings)
    if seen.most_move:
        message = f"{seen.moving} of {seen.total} ranks are moving: what the job draws now is work"
        return _well(watch, message, now, settings)
    watch = _with_movers(watch, seen)
    if len(watch.moved) * 2 > seen.total:
        message = f"{len(watch.moved)} of {seen.total} ranks have moved meanwhile: what the job draws now is work"
        return _well(watch, message, now, settings)
    return _judged(watch, seen, now, settings)


def _judged(watch: JobWatch, seen: MotionCount, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """What a job is that has no reason to rest, and of which few or no ranks move: hung, stalled, waiting elsewhere."""
    watch = replace(
        watch,
        frozen_captures=watch.frozen_captures + 1 if seen.frozen == seen.total > 0 else 0,
        places=known_pauses.also(watch.places, seen.places),
    )
    if _are_late(watch, seen, now, settings):
        message = f"{seen.absent} of {seen.total} ranks have not come yet"
        return confirm(watch, JobState.STALLED, message, now, settings)
    if seen.frozen == seen.total > 0:
        needed = 2 if watch.state is JobState.STALLED else 1
        if watch.frozen_captures >= needed:
            if _only_waits(watch, seen):
                message = f"all {seen.total} ranks wait for ranks of other nodes: no hang of this node by itself"
                return confirm(watch, JobState.WAITS_ELSEWHERE, message, now, settings)
            message = f"all {seen.total} ranks are frozen{_paused_before(watch, now, settings)}"
            return confirm(watch, JobState.HUNG, message, now, settings)
        return look_again(watch, now, settings), ()
    verb = "moves" if seen.moving == 1 else "move"
    moving = f"{seen.moving} of {seen.total} ranks {verb}"
    if not seen.moving:
        moving = f"{seen.unknown} of {seen.total} ranks could not be judged"
    if seen.who:
        moving = f"{moving}: {seen.who}"
    return confirm(watch, JobState.STALLED, moving, now, settings)


def _only_waits(watch: JobWatch, seen: MotionCount) -> bool:
    """Whether a frozen job is no hang of this node: its ranks wait for others, and no GPU here has shown an error.

    Once hung it stays so: a page must not come and go.
    """
    return seen.waits_elsewhere and watch.state is not JobState.HUNG and not had_gpu_errors(watch, watch.quiet_since)


def _with_movers(watch: JobWatch, seen: MotionCount) -> JobWatch:
    """Ranks of a light job that move in turn are no hang, though each look finds most at the line where it waits."""
    if watch.was_busy or watch.state is JobState.HUNG:
        return watch
    return replace(watch, moved=watch.moved | (seen.movers - seen.stays.keys()))


def _well(watch: JobWatch, message: str, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """What the job draws now is no sign of a hang; that is learnt, and looked at again."""
    watch = taught(watch, now, settings)
    if watch.is_open:
        return go(replace(watch, ended=ended_pause(watch)), JobState.RECOVERED, message, now)
    return go(watch, JobState.TRAINING, message, now)


def _are_late(watch: JobWatch, seen: MotionCount, now: float, settings: Detector) -> bool:
    """Whether those who have no process were never there, in a job that starts: it may not be their turn yet."""
    all_known_live = len(watch.generation) - seen.came <= seen.total - seen.absent
    is_starting = not watch.was_busy and now - watch.began < settings.startup_stalled_hold_seconds
    return seen.absent > 0 and all_known_live and is_starting


def _paused_before(watch: JobWatch, now: float, settings: Detector) -> str:
    longest = known_pauses.longest_seconds(watch.pauses, watch.places, now)
    if longest is None:
        return ""
    hold = pause_hold_seconds(watch, now, settings)
    return f"; the job has paused here before, {longest:.0f} s at most: it pages after {hold:.0f} s of quiet"


def glanced(watch: JobWatch, seen: MotionCount, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """Take the outcome of a glance that `step` asked for: movement teaches, a standstill begins a suspicion.

    Where it tells neither, what the job was taught does not hold any more.
    """
    watch = replace(watch, glancing_since=None, glanced_at=now, serves=seen.serves)
    if watch.state is not JobState.TRAINING:
        return watch, ()
    watch, seen = _with_other_looks(watch, seen, now, settings)
    if seen.is_well:
        return replace(taught(watch, now, settings), glance_pause=GLANCE_SECONDS), ()
    still = seen.frozen + seen.settled
    if still * 2 >= seen.total > 0:
        if not is_still_down(watch, settings):
            return watch, ()
        stuck = {uuid: replace(gpu, stuck_watts=gpu.watts) for uuid, gpu in watch.gpus.items()}
        return suspect(replace(watch, gpus=stuck), f"{still} of {seen.total} ranks stand still", now)
    if seen.stacked * 2 >= seen.total > 0:
        watch = without_low_levels(watch, settings)
    return shown_nothing(watch, settings), ()


def settled(watch: JobWatch, found: Mapping[RankId, Stay], now: float, settings: Detector) -> frozenset[RankId]:
    """The ranks of one more look that have stood between the same few lines for minutes, of whatever motion."""
    standstills = standstill.followed(watch.standstills, found, now)
    return frozenset(standstill.settled(standstills, now, STANDSTILL_HOLDS * settings.hold_seconds))


def _with_other_looks(
    watch: JobWatch, seen: MotionCount, now: float, settings: Detector
) -> tuple[JobWatch, MotionCount]:
    """What a look shows in the light of the ones before: who only went to and fro for minutes cannot be judged."""
    ranks = settled(watch, seen.stays, now, settings)
    to_and_fro = len(ranks & seen.movers)
    seen = replace(seen, moving=seen.moving - to_and_fro, unknown=seen.unknown + to_and_fro, settled=len(ranks))
    return replace(watch, standstills=standstill.followed(watch.standstills, seen.stays, now)), seen
