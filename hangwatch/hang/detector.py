"""Is a job making progress? A pure step function: (watch, what was seen, now) -> (watch, actions).

    starting -> training -> quiet -> suspected -> hung | stalled | waits_elsewhere | suspended | over
        -> recovered -> training
        -> ended
    starting, training, quiet, recovered -> unknown, without readings -> starting | training

`step` is fed once per power sample, `unsampled` where none has come, `captured` once per finished capture, `end` when
the ranks are gone. All times
are CLOCK_MONOTONIC seconds, so a clock that steps changes nothing. Power raises a suspicion; only stacks decide it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from msgspec.structs import replace

from hangwatch.config import Capture, Detector
from hangwatch.hang import pauses, power, stays
from hangwatch.hang.pauses import EndedPause
from hangwatch.hang.power import GpuPower
from hangwatch.hang.watched import (
    GLANCE_SECONDS,
    STALLED_STATES,
    JobWatch,
    MotionCount,
    pause_hold_seconds,
    quiet_seconds,
    time_out_seconds,
)
from hangwatch.model import (
    OPEN_STATES,
    GpuSample,
    JobState,
    RankId,
    Stay,
    Value,
)

RECOVERED_SHOWN_SECONDS = 60.0  # long enough for a Prometheus that scrapes every 15 or 30 s to see it
SAMPLE_GAP_SECONDS = 10.0  # longer without samples, and the gap does not count as quiet time
RELOOK_MAX_SECONDS = 3600.0  # longest pause before a job that draws little is glanced at again; the first is the hold
CAPTURE_LOST_SECONDS = 300.0  # a capture that was asked for and never came back
STANDSTILL_HOLDS = 2.0  # between so few places for so many holds, and a rank that looked moving cannot be judged
LOOK_SECONDS = Capture().usual_seconds
LAST_LOOK_SECONDS = 30.0  # so long before a job ends itself its last look should be over; a fresher one is not repeated
ERRORS_BEFORE_SECONDS = 120.0  # XIDs and link errors, read each minute, may be the cause of a silence that begins later


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

    job_id: str
    before: JobState
    state: JobState
    message: str


_RESTING_WORDS = {
    JobState.SUSPENDED: "all {} ranks are stopped or frozen",
    JobState.OVER: "training is over: of its {} ranks none is connected to another one",
}

_BY_POWER = frozenset({JobState.STARTING, JobState.TRAINING, JobState.QUIET, JobState.RECOVERED})
_NOT_KNOWN = "no GPU of it gives readings: whether it works is not known, and no hang of it is noticed"

Action: TypeAlias = TakeCapture | Transition


def step(
    watch: JobWatch,
    samples: Mapping[str, GpuSample],
    now: float,
    settings: Detector,
    *,
    idle: Mapping[str, float] | None = None,
    gap_seconds: float = SAMPLE_GAP_SECONDS,
    gpu_errors_at: float | None = None,
    look_seconds: float = LOOK_SECONDS,
) -> tuple[JobWatch, tuple[Action, ...]]:
    """Take one power sample of the GPUs that the job holds, by uuid; `idle` are idle levels in W, by uuid.

    A pause between samples that is longer than `gap_seconds` does not count as quiet time. `gpu_errors_at` is when XIDs
    or link errors last came on this node. `look_seconds` is how long a capture usually takes.
    """
    if watch.state is JobState.ENDED:
        return watch, ()
    levels = idle or {}
    gpus = {
        uuid: power.observe(watch.gpus.get(uuid, GpuPower()), sample, levels.get(uuid), now)
        for uuid, sample in samples.items()
    }
    # A GPU that vanished keeps its history for the report, but has no reading and so no vote.
    vanished = {uuid: replace(gpu, recent=()) for uuid, gpu in watch.gpus.items() if uuid not in gpus}
    gap = 0.0 if watch.sampled_at is None else now - watch.sampled_at
    watch = replace(watch, gpus=vanished | gpus, sampled_at=now, gpu_errors_at=gpu_errors_at)
    if gap > gap_seconds:
        watch = _forget_gap(watch, gap)
    if not watch.has_ranks:
        return _without_ranks(watch, now, settings)
    voters = [gpu for gpu in watch.gpus.values() if gpu.recent]
    if not voters:
        return _without_readings(watch, now, settings)
    watch = replace(watch, read_at=now)
    if watch.state is JobState.UNKNOWN:
        return _go(watch, watch.known_state, "its GPUs give readings again", now)
    watch, actions = _RULES[watch.state](watch, voters, now, settings)
    return (watch, actions) if actions else _last_look(watch, now, look_seconds)


def unsampled(watch: JobWatch, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """Take it that no power sample has come: after the hold it is not known how the job fares.

    Of a launcher without ranks no power is asked.
    """
    if not watch.has_ranks or watch.state not in _BY_POWER:
        return watch, ()
    silent_since = watch.since if watch.read_at is None else max(watch.since, watch.read_at)
    if now - silent_since < max(settings.hold_seconds, SAMPLE_GAP_SECONDS):
        return watch, ()
    known = JobState.STARTING if watch.state is JobState.STARTING else JobState.TRAINING
    return _go(replace(watch, known_state=known, ended=None), JobState.UNKNOWN, _NOT_KNOWN, now)


def captured(watch: JobWatch, seen: MotionCount, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """Take the outcome of a capture that `step` asked for."""
    saw_stacks = watch.saw_stacks or seen.frozen + seen.moving + seen.stacked > 0
    watch = replace(watch, capturing=False, captured_at=now, saw_stacks=saw_stacks, serves=seen.serves)
    if watch.state is not JobState.SUSPECTED and not watch.is_open:
        return watch, ()
    watch, seen = _with_other_looks(watch, seen, now, settings)
    if not watch.has_ranks:  # whether its launcher moves says nothing: the other node may be in a queue
        return _confirm(watch, JobState.STALLED, "its launcher still has no rank", now, settings)
    if seen.serves:
        return _well(watch, f"all {seen.total} ranks wait for clients: an idle service", now, settings)
    # Before it was ever at work a job has no connections either.
    if seen.resting is JobState.SUSPENDED or (seen.resting is JobState.OVER and watch.was_busy):
        watch = replace(watch, places=pauses.also(watch.places, frozenset({pauses.NOWHERE})))
        return _confirm(watch, seen.resting, _RESTING_WORDS[seen.resting].format(seen.total), now, settings)
    if seen.most_move:
        message = f"{seen.moving} of {seen.total} ranks are moving: what the job draws now is work"
        return _well(watch, message, now, settings)
    watch = _with_movers(watch, seen)
    if len(watch.moved) * 2 > seen.total:
        message = f"{len(watch.moved)} of {seen.total} ranks have moved meanwhile: what the job draws now is work"
        return _well(watch, message, now, settings)
    watch = replace(
        watch,
        frozen_captures=watch.frozen_captures + 1 if seen.frozen == seen.total > 0 else 0,
        places=pauses.also(watch.places, seen.places),
    )
    if _are_late(watch, seen, now, settings):
        message = f"{seen.absent} of {seen.total} ranks have not come yet"
        return _confirm(watch, JobState.STALLED, message, now, settings)
    if seen.frozen == seen.total > 0:
        needed = 2 if watch.state is JobState.STALLED else 1
        if watch.frozen_captures >= needed:
            if _only_waits(watch, seen):
                message = f"all {seen.total} ranks wait for ranks of other nodes: no hang of this node by itself"
                return _confirm(watch, JobState.WAITS_ELSEWHERE, message, now, settings)
            message = f"all {seen.total} ranks are frozen{_paused_before(watch, now, settings)}"
            return _confirm(watch, JobState.HUNG, message, now, settings)
        return _look_again(watch, now, settings), ()
    verb = "moves" if seen.moving == 1 else "move"
    moving = f"{seen.moving} of {seen.total} ranks {verb}"
    if not seen.moving:
        moving = f"{seen.unknown} of {seen.total} ranks could not be judged"
    if seen.who:
        moving = f"{moving}: {seen.who}"
    return _confirm(watch, JobState.STALLED, moving, now, settings)


def _only_waits(watch: JobWatch, seen: MotionCount) -> bool:
    """Whether a frozen job is no hang of this node: its ranks wait for others, and no GPU here has shown an error.

    Once hung it stays so: a page must not come and go.
    """
    return seen.waits_elsewhere and watch.state is not JobState.HUNG and not _had_gpu_errors(watch, watch.quiet_since)


def settled(watch: JobWatch, found: Mapping[RankId, Stay], now: float, settings: Detector) -> frozenset[RankId]:
    """The ranks of one more look that have stood between the same few lines for minutes, of whatever motion."""
    standstills = stays.followed(watch.standstills, found, now)
    return frozenset(stays.settled(standstills, now, STANDSTILL_HOLDS * settings.hold_seconds))


def _with_other_looks(
    watch: JobWatch, seen: MotionCount, now: float, settings: Detector
) -> tuple[JobWatch, MotionCount]:
    """What a look shows in the light of the ones before: who only went to and fro for minutes cannot be judged."""
    ranks = settled(watch, seen.stays, now, settings)
    to_and_fro = len(ranks & seen.movers)
    seen = replace(seen, moving=seen.moving - to_and_fro, unknown=seen.unknown + to_and_fro, settled=len(ranks))
    return replace(watch, standstills=stays.followed(watch.standstills, seen.stays, now)), seen


def _with_movers(watch: JobWatch, seen: MotionCount) -> JobWatch:
    """Ranks of a light job that move in turn are no hang, though each look finds most at the line where it waits."""
    if watch.was_busy or watch.state is JobState.HUNG:
        return watch
    return replace(watch, moved=watch.moved | (seen.movers - seen.stays.keys()))


def _well(watch: JobWatch, message: str, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """What the job draws now is no sign of a hang; that is learnt, and looked at again."""
    watch = _taught(watch, now, settings)
    if watch.is_open:
        return _go(replace(watch, ended=_ended_pause(watch)), JobState.RECOVERED, message, now)
    return _go(watch, JobState.TRAINING, message, now)


def _are_late(watch: JobWatch, seen: MotionCount, now: float, settings: Detector) -> bool:
    """Whether those who have no process were never there, in a job that starts: it may not be their turn yet."""
    all_known_live = len(watch.generation) - seen.came <= seen.total - seen.absent
    is_starting = not watch.was_busy and now - watch.began < settings.startup_stalled_hold_seconds
    return seen.absent > 0 and all_known_live and is_starting


def glanced(watch: JobWatch, seen: MotionCount, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """Take the outcome of a glance that `step` asked for: movement teaches, a standstill begins a suspicion.

    Where it tells neither, what the job was taught does not hold any more.
    """
    watch = replace(watch, glancing_since=None, glanced_at=now, serves=seen.serves)
    if watch.state is not JobState.TRAINING:
        return watch, ()
    watch, seen = _with_other_looks(watch, seen, now, settings)
    if seen.is_well:
        return replace(_taught(watch, now, settings), glance_pause=GLANCE_SECONDS), ()
    still = seen.frozen + seen.settled
    if still * 2 >= seen.total > 0:
        if not _is_still_down(watch, settings):
            return watch, ()
        stuck = {uuid: replace(gpu, stuck_watts=gpu.watts) for uuid, gpu in watch.gpus.items()}
        return _suspect(replace(watch, gpus=stuck), f"{still} of {seen.total} ranks stand still", now)
    if seen.stacked * 2 >= seen.total > 0:
        watch = _without_low_levels(watch, settings)
    return _shown_nothing(watch, settings), ()


def _without_low_levels(watch: JobWatch, settings: Detector) -> JobWatch:
    """What was once shown to be work, under the ordinary line, is work no more when a look does not confirm it."""
    low = {uuid: gpu for uuid, gpu in watch.gpus.items() if power.is_low(gpu, settings)}
    return replace(watch, gpus=watch.gpus | {uuid: replace(gpu, taught_watts=None) for uuid, gpu in low.items()})


def _paused_before(watch: JobWatch, now: float, settings: Detector) -> str:
    longest = pauses.longest_seconds(watch.pauses, watch.places, now)
    if longest is None:
        return ""
    hold = pause_hold_seconds(watch, now, settings)
    return f"; the job has paused here before, {longest:.0f} s at most: it pages after {hold:.0f} s of quiet"


def end(watch: JobWatch, message: str, now: float) -> tuple[JobWatch, tuple[Action, ...]]:
    """The ranks are gone, or replaced by a restart."""
    if watch.state is JobState.ENDED:
        return watch, ()
    return _go(watch, JobState.ENDED, message, now)


def _quorum(count: int, voters: list[GpuPower], settings: Detector) -> bool:
    return count >= settings.quorum * len(voters)


def _is_quiet(voters: list[GpuPower], settings: Detector) -> bool:
    return _quorum(sum(power.is_quiet(gpu, settings) for gpu in voters), voters, settings)


def _starting(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    if _quorum(sum(power.is_busy(gpu, settings) for gpu in voters), voters, settings):
        learnt = {uuid: power.learn(gpu, now, settings) for uuid, gpu in watch.gpus.items()}
        return _go(replace(watch, was_busy=True, gpus=learnt), JobState.TRAINING, "the GPUs are at work", now)
    watch = _timed_over_plain_line(watch, voters, now, settings)
    if watch.over_since is not None and now - watch.over_since >= settings.hold_seconds:
        ratio = settings.quiet_watts_ratio_of_limit
        return _go(watch, JobState.TRAINING, f"the GPUs draw more than {ratio:.0%} of their limit", now)
    if _is_start_over(watch, now, settings):
        return _suspect(watch, f"not busy, {now - watch.began:.0f} s after its start", now)
    return watch, ()


def _is_start_over(watch: JobWatch, now: float, settings: Detector) -> bool:
    """Whether a start has had its time. A daemon that was restarted beside an old job waits for the ordinary hold."""
    return now - watch.began >= settings.startup_hold_seconds and now - watch.since >= settings.hold_seconds


def _timed_over_plain_line(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> JobWatch:
    """By the plain line a job has something to fall from once it was over it for as long as a fall must last.

    A job that loads its model or downloads its data draws idle power in health, a moment of more notwithstanding.
    """
    if not _quorum(sum(power.is_over_plain_line(gpu, settings) for gpu in voters), voters, settings):
        return replace(watch, over_since=None)
    return watch if watch.over_since is not None else replace(watch, over_since=now)


def _training(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    if _is_quiet(voters, settings):
        return _fall_quiet(watch, voters, now, settings)
    # A job that never worked hard has no level to fall from: only a later look can tell that it stands still.
    low = not watch.was_busy or _is_down(voters, settings)
    is_busy = _quorum(sum(power.is_busy(gpu, settings) for gpu in voters), voters, settings)
    if is_busy:
        watch = replace(watch, serves=False)
    learnt = {} if watch.serves else {uuid: power.learn(gpu, now, settings) for uuid, gpu in watch.gpus.items()}
    watch = replace(
        watch,
        gpus=watch.gpus | learnt,
        was_busy=watch.was_busy or is_busy,
        standstills=watch.standstills if low or _has_fallen(voters, settings) else {},
        low_since=(watch.low_since if watch.low_since is not None else now) if low else None,
        relook_pause=watch.relook_pause if low else 0.0,
    )
    return _glance(watch, voters, now, settings)


def _glance(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    """Ask for a glance where power alone can tell nothing: it fell and is flat, or the job draws little anyway."""
    if watch.glancing_since is not None:
        is_lost = now - watch.glancing_since >= CAPTURE_LOST_SECONDS
        return (_shown_nothing(replace(watch, glancing_since=None, glanced_at=now), settings) if is_lost else watch), ()
    fallen = [gpu for gpu in voters if power.is_under_work(gpu, settings)]
    flat = sum(power.flat_seconds(gpu, now) >= settings.hold_seconds for gpu in fallen)
    if _quorum(flat, voters, settings) and _rested(watch.fall_glanced_at, now) >= watch.glance_pause:
        # Another level: what was seen at the last one says nothing.
        watch = replace(watch, low_since=None, relook_pause=0.0, fall_glanced_at=now)
        reason = f"its power fell and has been flat for {settings.hold_seconds:.0f} s"
    elif min(_rested(watch.glanced_at, now), _low_seconds(watch, now)) >= _relook_pause(watch, settings):
        reason = f"draws little, and it is {_low_seconds(watch, now):.0f} s since its ranks were last seen moving"
    else:
        return watch, ()
    wanted = TakeCapture(job_key=watch.job_key, reason=reason, is_glance=True)
    return replace(watch, glancing_since=now), (wanted,)


def _shown_nothing(watch: JobWatch, settings: Detector) -> JobWatch:
    """After a glance that nothing came of, the next one comes later."""
    glance_pause = min(2 * watch.glance_pause, RELOOK_MAX_SECONDS)
    return replace(watch, glance_pause=glance_pause, relook_pause=_doubled_pause(watch, settings))


def _rested(glanced_at: float | None, now: float) -> float:
    return math.inf if glanced_at is None else now - glanced_at


def _low_seconds(watch: JobWatch, now: float) -> float:
    return 0.0 if watch.low_since is None else now - watch.low_since


def _has_fallen(voters: list[GpuPower], settings: Detector) -> bool:
    return _quorum(sum(power.is_under_work(gpu, settings) for gpu in voters), voters, settings)


def _is_down(voters: list[GpuPower], settings: Detector) -> bool:
    """Whether the job draws less than it does at work, or was taught so."""
    down = sum(gpu.taught_watts is not None or power.is_low(gpu, settings) for gpu in voters)
    return _quorum(down, voters, settings)


def _is_still_down(watch: JobWatch, settings: Detector) -> bool:
    """Whether the power that a glance was for has lasted as long as the glance."""
    voters = [gpu for gpu in watch.gpus.values() if gpu.recent]
    return not watch.was_busy or _has_fallen(voters, settings) or _is_down(voters, settings)


def _taught(watch: JobWatch, now: float, settings: Detector) -> JobWatch:
    """The watch of a job whose ranks were seen moving: what it draws now is work, and that is looked at again."""
    pause = 0.0 if watch.low_since is None else _doubled_pause(watch, settings)
    gpus = {uuid: power.teach(gpu) for uuid, gpu in watch.gpus.items()}
    return replace(watch, gpus=gpus, low_since=now, relook_pause=pause)


def _relook_pause(watch: JobWatch, settings: Detector) -> float:
    return max(watch.relook_pause, settings.hold_seconds)


def _doubled_pause(watch: JobWatch, settings: Detector) -> float:
    return min(2 * _relook_pause(watch, settings), RELOOK_MAX_SECONDS)


def _quiet(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    if not _is_quiet(voters, settings):
        return _go(replace(watch, quiet_since=None), JobState.TRAINING, "power is back", now)
    watch = _only_the_same(watch, voters, now, settings)
    rested = watch.captured_at is None or now - watch.captured_at >= settings.cooldown_seconds
    if rested and quiet_seconds(watch, now) >= settings.hold_seconds:
        return _suspect(watch, f"quiet for {quiet_seconds(watch, now):.0f} s", now)
    return watch, ()


def _fall_quiet(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    quiet = _quiet_uuids(watch, settings)
    watch = replace(watch, quiet_since=now, quiet_gpus=quiet)
    return _go(watch, JobState.QUIET, f"{len(quiet)} of {len(voters)} GPUs are quiet", now)


def _only_the_same(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> JobWatch:
    """Only GPUs that were quiet all the time count: in a pipeline there is always somebody who waits."""
    quiet = _quiet_uuids(watch, settings)
    throughout = watch.quiet_gpus & quiet
    if _quorum(len(throughout), voters, settings):
        return replace(watch, quiet_gpus=throughout)
    return replace(watch, quiet_gpus=quiet, quiet_since=now)


def _quiet_uuids(watch: JobWatch, settings: Detector) -> frozenset[str]:
    return frozenset(uuid for uuid, gpu in watch.gpus.items() if power.is_quiet(gpu, settings))


def _suspected(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    if _is_back(watch, voters, settings):
        return _go(replace(watch, quiet_since=None), JobState.TRAINING, "power came back during the capture", now)
    return _unless_lost(watch, now, settings)


def _unless_lost(watch: JobWatch, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    if now - watch.since >= CAPTURE_LOST_SECONDS:
        message = f"its stacks could not be taken in {CAPTURE_LOST_SECONDS:g} s"
        return _confirm(replace(watch, capturing=False), JobState.STALLED, message, now, settings)
    return watch, ()


def _open(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    if _is_back(watch, voters, settings):
        watch = replace(watch, back_since=now if watch.back_since is None else watch.back_since)
        if watch.back_since is not None and now - watch.back_since >= settings.recover_seconds:
            return _go(replace(watch, ended=_ended_pause(watch)), JobState.RECOVERED, "power is back", now)
        return watch, ()
    return _look_when_due(replace(watch, back_since=None), now)


def _last_look(watch: JobWatch, now: float, look_seconds: float) -> tuple[JobWatch, tuple[Action, ...]]:
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


def _look_when_due(watch: JobWatch, now: float) -> tuple[JobWatch, tuple[Action, ...]]:
    if not watch.capturing and watch.capture_wanted_at is not None and now >= watch.capture_wanted_at:
        watch = replace(watch, capturing=True, capture_wanted_at=None)
        return watch, (TakeCapture(job_key=watch.job_key, reason=f"still {watch.state.value}"),)
    return watch, ()


def _recovered(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    if _is_quiet(voters, settings):
        return _fall_quiet(_taught_by_pause(watch, now), voters, now, settings)
    if now - watch.since >= RECOVERED_SHOWN_SECONDS:
        taught = _taught_by_pause(watch, now)
        learnt = ""
        if watch.ended is not None and taught.pauses != watch.pauses:
            learnt = f"; a pause of {watch.ended.seconds:.0f} s where it stood is known now"
        return _go(taught, JobState.TRAINING, f"the GPUs are at work{learnt}", now)
    return watch, ()


def _ended_pause(watch: JobWatch) -> EndedPause | None:
    """What may be learnt once power is back; ranks that move while it is not are no end of a pause."""
    if watch.quiet_since is None or watch.back_since is None:
        return None
    return EndedPause(places=watch.places, began=watch.quiet_since, seconds=watch.back_since - watch.quiet_since)


def _taught_by_pause(watch: JobWatch, now: float) -> JobWatch:
    """With the pause learnt that ended. Only now: whether ranks were replaced in it is what a later scan sees."""
    ended = watch.ended
    if ended is None:
        return watch
    if _had_gpu_errors(watch, ended.began):
        return replace(watch, ended=None)
    return replace(watch, ended=None, pauses=pauses.learn(watch.pauses, ended, now))


def _had_gpu_errors(watch: JobWatch, silent_since: float | None) -> bool:
    """Whether XIDs or link errors came on this node since shortly before the job fell silent."""
    errors = watch.gpu_errors_at
    return errors is not None and silent_since is not None and errors >= silent_since - ERRORS_BEFORE_SECONDS


def _without_readings(watch: JobWatch, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """No GPU of the job can be read: that is no sign of a hang, and no sign of work either."""
    if watch.state is JobState.QUIET:
        return _go(watch, JobState.TRAINING, "no GPU of the job can be read", now)
    return unsampled(watch, now, settings)


def _without_ranks(watch: JobWatch, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """A launcher without ranks has no power to judge by: it is looked at after the holds of a start."""
    if watch.state is JobState.STARTING and _is_start_over(watch, now, settings):
        return _suspect(watch, f"no rank, {now - watch.began:.0f} s after its launcher began to wait", now)
    if watch.state is JobState.SUSPECTED:
        return _unless_lost(watch, now, settings)
    return _look_when_due(watch, now) if watch.is_open else (watch, ())


_RULES = {
    JobState.STARTING: _starting,
    JobState.TRAINING: _training,
    JobState.QUIET: _quiet,
    JobState.SUSPECTED: _suspected,
    JobState.HUNG: _open,
    JobState.STALLED: _open,
    JobState.WAITS_ELSEWHERE: _open,
    JobState.SUSPENDED: _open,
    JobState.OVER: _open,
    JobState.RECOVERED: _recovered,
}


def _is_back(watch: JobWatch, voters: list[GpuPower], settings: Detector) -> bool:
    """Power is back: over the quiet line, or for a job that never rose, over what only work draws."""
    if (watch.was_busy or watch.fell) and any(power.quiet_line_watts(gpu, settings) is not None for gpu in voters):
        low = sum(power.is_quiet(gpu, settings) or power.is_low(gpu, settings) for gpu in voters)
        return not _quorum(low, voters, settings)
    return _quorum(sum(power.is_busy(gpu, settings) for gpu in voters), voters, settings)


def _suspect(watch: JobWatch, reason: str, now: float) -> tuple[JobWatch, tuple[Action, ...]]:
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
    watch, actions = _go(watch, JobState.SUSPECTED, reason, now)
    return watch, (*actions, TakeCapture(job_key=watch.job_key, reason=reason))


def _confirm(
    watch: JobWatch, state: JobState, message: str, now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    """Enter or stay in an open state, and plan the next look."""
    if watch.state is not state:
        # A hung job in which something moves once has stood still all the same: its page must not come and go.
        stood_since = watch.since if watch.state is JobState.HUNG else watch.stalled_since
        stalled_since = now if stood_since is None else stood_since
        watch = replace(watch, stalled_since=stalled_since if state in STALLED_STATES else None)
        watch, actions = _go(replace(watch, back_since=None, capture_pause=0.0), state, message, now)
    else:
        watch, actions = replace(watch, message=message), ()
    return _look_again(watch, now, settings), actions


def _look_again(watch: JobWatch, now: float, settings: Detector) -> JobWatch:
    pause = min(max(settings.recapture_seconds, 2 * watch.capture_pause), settings.recapture_max_seconds)
    return replace(watch, capture_pause=pause, capture_wanted_at=now + pause)


def _forget_gap(watch: JobWatch, gap: float) -> JobWatch:
    """Move what is being timed by the length of a gap in the samples: nobody knows what happened in it."""
    shifted = {
        name: getattr(watch, name) + gap
        for name in ("quiet_since", "back_since", "low_since", "over_since")
        if getattr(watch, name) is not None
    }
    return replace(
        watch,
        began=watch.began + gap if watch.is_starting else watch.began,
        gpus={uuid: power.forget_run(gpu) for uuid, gpu in watch.gpus.items()},
        **shifted,
    )


def _go(watch: JobWatch, state: JobState, message: str, now: float) -> tuple[JobWatch, tuple[Action, ...]]:
    move = Transition(job_id=watch.job_id, before=watch.state, state=state, message=message)
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
