"""The states of a job by its power: what each sample, and each that did not come, changes in them."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector import power_level
from hangwatch.detector.baseline import ended_pause, taught_by_pause
from hangwatch.detector.capture_due import LOOK_SECONDS, glance_when_due, last_look, look_when_due, unless_lost
from hangwatch.detector.gpu_quorum import has_fallen, has_quorum, is_back, is_down, is_quiet, quiet_uuids
from hangwatch.detector.job_watch import JobWatch, quiet_seconds
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.transitions import Action, go, suspect
from hangwatch.model import GpuSample, JobState

RECOVERED_SHOWN_SECONDS = 60.0  # long enough for a Prometheus that scrapes every 15 or 30 s to see it
SAMPLE_GAP_SECONDS = 10.0  # longer without samples, and the gap does not count as quiet time
_BY_POWER = frozenset({JobState.STARTING, JobState.TRAINING, JobState.QUIET, JobState.RECOVERED})
_NOT_KNOWN = "no GPU of it gives readings: whether it works is not known, and no hang of it is noticed"


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
        uuid: power_level.observe(watch.gpus.get(uuid, GpuPower()), sample, levels.get(uuid), now)
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
        return go(watch, watch.known_state, "its GPUs give readings again", now)
    watch, actions = _RULES[watch.state](watch, voters, now, settings)
    return (watch, actions) if actions else last_look(watch, now, look_seconds)


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
    return go(replace(watch, known_state=known, ended=None), JobState.UNKNOWN, _NOT_KNOWN, now)


def _without_readings(watch: JobWatch, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """No GPU of the job can be read: that is no sign of a hang, and no sign of work either."""
    if watch.state is JobState.QUIET:
        return go(watch, JobState.TRAINING, "no GPU of the job can be read", now)
    return unsampled(watch, now, settings)


def _without_ranks(watch: JobWatch, now: float, settings: Detector) -> tuple[JobWatch, tuple[Action, ...]]:
    """A launcher without ranks has no power to judge by: it is looked at after the holds of a start."""
    if watch.state is JobState.STARTING and _is_start_over(watch, now, settings):
        return suspect(watch, f"no rank, {now - watch.began:.0f} s after its launcher began to wait", now)
    if watch.state is JobState.SUSPECTED:
        return unless_lost(watch, now, settings)
    return look_when_due(watch, now) if watch.is_open else (watch, ())


def _starting(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    if has_quorum(sum(power_level.is_busy(gpu, settings) for gpu in voters), voters, settings):
        learnt = {uuid: power_level.learn(gpu, now, settings) for uuid, gpu in watch.gpus.items()}
        return go(replace(watch, was_busy=True, gpus=learnt), JobState.TRAINING, "the GPUs are at work", now)
    watch = _timed_over_plain_line(watch, voters, now, settings)
    if watch.over_since is not None and now - watch.over_since >= settings.hold_seconds:
        ratio = settings.quiet_watts_ratio_of_limit
        return go(watch, JobState.TRAINING, f"the GPUs draw more than {ratio:.0%} of their limit", now)
    if _is_start_over(watch, now, settings):
        return suspect(watch, f"not busy, {now - watch.began:.0f} s after its start", now)
    return watch, ()


def _is_start_over(watch: JobWatch, now: float, settings: Detector) -> bool:
    """Whether a start has had its time. A daemon that was restarted beside an old job waits for the ordinary hold."""
    return now - watch.began >= settings.startup_hold_seconds and now - watch.since >= settings.hold_seconds


def _timed_over_plain_line(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> JobWatch:
    """By the plain line a job has something to fall from once it was over it for as long as a fall must last.

    A job that loads its model or downloads its data draws idle power in health, a moment of more notwithstanding.
    """
    if not has_quorum(sum(power_level.is_over_plain_line(gpu, settings) for gpu in voters), voters, settings):
        return replace(watch, over_since=None)
    return watch if watch.over_since is not None else replace(watch, over_since=now)


def _training(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    if is_quiet(voters, settings):
        return _fall_quiet(watch, voters, now, settings)
    # A job that never worked hard has no level to fall from: only a later look can tell that it stands still.
    low = not watch.was_busy or is_down(voters, settings)
    is_busy = has_quorum(sum(power_level.is_busy(gpu, settings) for gpu in voters), voters, settings)
    if is_busy:
        watch = replace(watch, serves=False)
    learnt = {} if watch.serves else {uuid: power_level.learn(gpu, now, settings) for uuid, gpu in watch.gpus.items()}
    watch = replace(
        watch,
        gpus=watch.gpus | learnt,
        was_busy=watch.was_busy or is_busy,
        standstills=watch.standstills if low or has_fallen(voters, settings) else {},
        low_since=(watch.low_since if watch.low_since is not None else now) if low else None,
        relook_pause=watch.relook_pause if low else 0.0,
    )
    return glance_when_due(watch, voters, now, settings)


def _quiet(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    if not is_quiet(voters, settings):
        return go(replace(watch, quiet_since=None), JobState.TRAINING, "power is back", now)
    watch = _only_the_same(watch, voters, now, settings)
    rested = watch.captured_at is None or now - watch.captured_at >= settings.cooldown_seconds
    if rested and quiet_seconds(watch, now) >= settings.hold_seconds:
        return suspect(watch, f"quiet for {quiet_seconds(watch, now):.0f} s", now)
    return watch, ()


def _fall_quiet(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    quiet = quiet_uuids(watch, settings)
    watch = replace(watch, quiet_since=now, quiet_gpus=quiet)
    return go(watch, JobState.QUIET, f"{len(quiet)} of {len(voters)} GPUs are quiet", now)


def _only_the_same(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> JobWatch:
    """Only GPUs that were quiet all the time count: in a pipeline there is always somebody who waits."""
    quiet = quiet_uuids(watch, settings)
    throughout = watch.quiet_gpus & quiet
    if has_quorum(len(throughout), voters, settings):
        return replace(watch, quiet_gpus=throughout)
    return replace(watch, quiet_gpus=quiet, quiet_since=now)


def _suspected(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    if is_back(watch, voters, settings):
        return go(replace(watch, quiet_since=None), JobState.TRAINING, "power came back during the capture", now)
    return unless_lost(watch, now, settings)


def _open(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    if is_back(watch, voters, settings):
        watch = replace(watch, back_since=now if watch.back_since is None else watch.back_since)
        if watch.back_since is not None and now - watch.back_since >= settings.recover_seconds:
            return go(replace(watch, ended=ended_pause(watch)), JobState.RECOVERED, "power is back", now)
        return watch, ()
    return look_when_due(replace(watch, back_since=None), now)


def _recovered(
    watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector
) -> tuple[JobWatch, tuple[Action, ...]]:
    if is_quiet(voters, settings):
        return _fall_quiet(taught_by_pause(watch, now), voters, now, settings)
    if now - watch.since >= RECOVERED_SHOWN_SECONDS:
        taught = taught_by_pause(watch, now)
        learnt = ""
        if watch.ended is not None and taught.pauses != watch.pauses:
            learnt = f"; a pause of {watch.ended.seconds:.0f} s where it stood is known now"
        return go(taught, JobState.TRAINING, f"the GPUs are at work{learnt}", now)
    return watch, ()


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
        gpus={uuid: power_level.forget_run(gpu) for uuid, gpu in watch.gpus.items()},
        **shifted,
    )
