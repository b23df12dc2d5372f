"""Steps of the detector after a power sample or a missing sample: power changes the state of the job."""

from collections.abc import Mapping

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector import idle_workers, power_level
from hangwatch.detector.baseline import end_pause, learn_pause, recover_when_back
from hangwatch.detector.capture_due import (
    LOOK_SECONDS,
    capture_before_timeout,
    capture_when_due,
    give_up_lost_capture,
    light_capture_at_start,
    light_capture_when_due,
)
from hangwatch.detector.gpu_quorum import has_fallen, has_quorum, is_back, is_down, is_quiet, quiet_uuids
from hangwatch.detector.job_watch import JobWatch, quiet_seconds, with_capture_record, with_open_incident, with_power
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.transitions import Change, begin_suspicion, enter_state
from hangwatch.detector.watch_parts import Recovered, Silence, Starting, Unknown
from hangwatch.model import OPEN_STATES, GpuSample, JobState

RECOVERED_SHOWN_SECONDS = 60.0  # long enough to be seen by a Prometheus that scrapes every 15 or 30 s
FROZEN_START_CAPTURES, FROZEN_START_HOLDS = 2, 2.5  # a page 300 s after the start, with the default hold of 120 s
# A job without ranks warns after this part of its hold, and pages after the whole of it
WARNED_RATIO = 0.5
SAMPLE_GAP_SECONDS = 10.0  # a longer gap between samples does not count as quiet time
_BY_POWER = frozenset({JobState.STARTING, JobState.TRAINING, JobState.QUIET, JobState.RECOVERED})
_BY_COUNTERS = "its ranks enqueue collectives; none of its GPUs can be read"
_NOT_KNOWN = "no GPU of it is read, and no new collective was counted; a hang is not detected: `hangwatch dump`"


def apply_sample(
    watch: JobWatch,
    samples: Mapping[str, GpuSample],
    now: float,
    settings: Detector,
    *,
    idle: Mapping[str, float] | None = None,
    gap_seconds: float = SAMPLE_GAP_SECONDS,
    gpu_errors_at: float | None = None,
    capture_seconds: float = LOOK_SECONDS,
) -> Change:
    """Change the state of a job by one power sample of its GPUs. Return the changed watch and the actions.

    `samples` and `idle` (idle levels in watts) are by uuid. A gap between samples of more than `gap_seconds` does
    not count as quiet time. `gpu_errors_at` is the time of the last XID or link error on this node; None if there
    was none. `capture_seconds` is the usual duration of a capture.
    """
    if watch.state is JobState.ENDED:
        return watch, ()
    levels = idle or {}
    gpus = {
        uuid: power_level.add_sample(watch.power.gpus.get(uuid, GpuPower()), sample, levels.get(uuid), now, settings)
        for uuid, sample in samples.items()
    }
    # A GPU that vanished keeps its history for the report. Without a reading it does not count in the quorum.
    vanished = {uuid: replace(gpu, recent=()) for uuid, gpu in watch.power.gpus.items() if uuid not in gpus}
    gap = 0.0 if watch.power.sampled_at is None else now - watch.power.sampled_at
    watch = with_power(watch, gpus=vanished | gpus, sampled_at=now, gpu_errors_at=gpu_errors_at)
    if gap > gap_seconds:
        watch = _shift_timers(watch, gap)
    if not watch.identity.has_ranks:
        # A launcher without ranks draws no power: a capture is due if its start takes too long.
        waited_seconds = now - watch.identity.began
        is_due = waited_seconds >= settings.startup_no_ranks_hold_seconds * WARNED_RATIO
        if watch.state is JobState.STARTING and is_due:
            return begin_suspicion(watch, f"no rank, {waited_seconds:.0f} s after its launcher began to wait", now)
        if watch.state is JobState.SUSPECTED:
            return give_up_lost_capture(watch, watch.since, now, settings)
        return capture_when_due(watch, now) if watch.is_open else (watch, ())
    voters = watch.voters
    if voters:
        watch = with_power(watch, read_at=now)
    if watch.is_counted:
        return watch, ()
    if not voters:  # this proves neither a hang nor work
        if watch.state is JobState.QUIET:
            return enter_state(watch, JobState.TRAINING, "no GPU of the job can be read", now)
        return apply_missing_sample(watch, now, settings)
    if watch.state is JobState.UNKNOWN:
        before = watch.phase.before if isinstance(watch.phase, Unknown) else JobState.STARTING
        return enter_state(watch, before, "its GPUs can be read again", now)
    watch, actions = _RULES[watch.state](watch, voters, now, settings)
    return (watch, actions) if actions else capture_before_timeout(watch, now, capture_seconds)


def apply_missing_sample(watch: JobWatch, now: float, settings: Detector) -> Change:
    """Change the state of a job without a power sample. After the hold, the state becomes unknown.

    A launcher without ranks is not affected, because it is judged by time only. A job with counters is judged by them.
    """
    if watch.is_counted:
        return watch, ()
    if watch.state is JobState.UNKNOWN and watch.progress.is_known:
        return enter_state(watch, JobState.TRAINING, _BY_COUNTERS, now)
    is_early = watch.state is JobState.SUSPECTED and watch.gap is not None
    if not watch.identity.has_ranks or not (watch.state in _BY_POWER or is_early):
        return watch, ()
    silent_since = watch.since if watch.power.read_at is None else max(watch.since, watch.power.read_at)
    if now - silent_since < max(settings.hold_seconds, SAMPLE_GAP_SECONDS):
        return watch, ()
    if watch.progress.is_known and watch.state is not JobState.TRAINING:
        return _end_recovery(watch, _BY_COUNTERS, now)
    if watch.progress.is_known or watch.is_counted_only:
        return watch, ()
    before = JobState.STARTING if watch.state is JobState.STARTING else JobState.TRAINING
    watch, actions = enter_state(watch, JobState.UNKNOWN, _NOT_KNOWN, now)
    return replace(watch, phase=Unknown(before=before)), actions


def _starting(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> Change:
    if has_quorum(sum(power_level.is_busy(gpu, settings) for gpu in voters), voters, settings):
        learnt = {uuid: power_level.count_as_work(gpu, now, settings) for uuid, gpu in watch.power.gpus.items()}
        watch = with_power(watch, was_busy=True, gpus=learnt)
        return enter_state(watch, JobState.TRAINING, "the GPUs are working", now)
    before = watch.phase if isinstance(watch.phase, Starting) else Starting()
    over_since: float | None = None
    if has_quorum(sum(power_level.is_over_fixed_threshold(gpu, settings) for gpu in voters), voters, settings):
        over_since = now if before.over_since is None else before.over_since
    start = replace(before, over_since=over_since)
    # Only after the hold: a job that loads its model or downloads data draws idle power with short peaks.
    if over_since is not None and now - over_since >= settings.hold_seconds:
        ratio = settings.low_power_ratio_of_limit
        return enter_state(watch, JobState.TRAINING, f"the GPUs draw more than {ratio:.0%} of their limit", now)
    if _is_start_over(watch, start, now, settings) and watch.progress.is_known:
        return enter_state(watch, JobState.TRAINING, "its ranks enqueue collectives", now)
    if _is_start_over(watch, start, now, settings):
        return begin_suspicion(watch, f"not busy, {now - watch.identity.began:.0f} s after its start", now)
    return light_capture_at_start(watch, start, now, settings)


def _is_start_over(watch: JobWatch, start: Starting, now: float, settings: Detector) -> bool:
    """True if the job's start has taken too long, and its state is at least `hold_seconds` old.

    It may take `startup_hold_seconds`, or 2.5 holds if no rank progressed in two consecutive light captures.
    """
    hold = settings.startup_hold_seconds
    if start.frozen_captures >= FROZEN_START_CAPTURES:
        hold = min(hold, FROZEN_START_HOLDS * settings.hold_seconds)
    return now - watch.identity.began >= hold and now - watch.since >= settings.hold_seconds


def _training(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> Change:
    if is_quiet(voters, settings):
        return _fall_quiet(watch, voters, now, settings)
    # The power of a job that was never busy cannot fall: only a later capture can show a standstill.
    power, looks = watch.power, watch.capture_record
    low = not power.was_busy or is_down(voters, settings)
    is_busy = has_quorum(sum(power_level.is_busy(gpu, settings) for gpu in voters), voters, settings)
    serves = power.is_serving and not is_busy
    learnt = power.gpus
    if not serves and looks.light_capture_since is None:  # else a capture shows soon if this power is work
        learnt = {uuid: power_level.count_as_work(gpu, now, settings) for uuid, gpu in power.gpus.items()}
    watch = with_power(watch, gpus=learnt, was_busy=power.was_busy or is_busy, is_serving=serves)
    watch = with_capture_record(
        watch,
        standstills=looks.standstills if low or has_fallen(voters, settings) else {},
        low_since=(looks.low_since if looks.low_since is not None else now) if low else None,
        low_power_pause_seconds=looks.low_power_pause_seconds if low else 0.0,
    )
    watch = with_power(watch, gpus=idle_workers.follow_work(watch.power.gpus, now, settings))
    return light_capture_when_due(watch, voters, now, settings)


def _quiet(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> Change:
    if not is_quiet(voters, settings):
        return enter_state(watch, JobState.TRAINING, "power is back", now)
    watch = _keep_quiet_gpus(watch, voters, now, settings)
    if watch.capture_record.gap_capture_since is not None:
        return watch, ()
    captured_at = watch.capture_record.captured_at
    rested = captured_at is None or now - captured_at >= settings.cooldown_seconds
    if rested and quiet_seconds(watch, now) >= settings.hold_seconds:
        return begin_suspicion(watch, f"quiet for {quiet_seconds(watch, now):.0f} s", now)
    return watch, ()


def _fall_quiet(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> Change:
    quiet = quiet_uuids(watch, settings)
    gpus = {uuid: idle_workers.forget_low_power(gpu) for uuid, gpu in watch.power.gpus.items()}
    watch = replace(with_power(watch, gpus=gpus), silence=Silence(since=now, gpus=quiet))
    return enter_state(watch, JobState.QUIET, f"{len(quiet)} of {len(voters)} GPUs are quiet", now)


def _keep_quiet_gpus(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> JobWatch:
    """Return the watch with only the GPUs that have been quiet without a break.

    If these are too few, the silence begins again: in a healthy pipeline, a different GPU may wait at each moment.
    """
    quiet = quiet_uuids(watch, settings)
    if watch.silence is not None and has_quorum(len(watch.silence.gpus & quiet), voters, settings):
        return replace(watch, silence=replace(watch.silence, gpus=watch.silence.gpus & quiet))
    return replace(watch, silence=Silence(since=now, gpus=quiet))


def _suspected(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> Change:
    if is_back(watch, voters, settings):
        return enter_state(learn_pause(watch, end_pause(watch, now), now), JobState.TRAINING, "power is back", now)
    # `on_progress` requests the captures of a suspicion before the hold.
    return (watch, ()) if watch.gap is not None else give_up_lost_capture(watch, watch.since, now, settings)


def _open(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> Change:
    if is_back(watch, voters, settings):
        return recover_when_back(watch, "power is back", now, settings)
    return capture_when_due(with_open_incident(watch, back_since=None), now)


def _recovered(watch: JobWatch, voters: list[GpuPower], now: float, settings: Detector) -> Change:
    if isinstance(watch.phase, Recovered) and not is_down(voters, settings):
        watch = replace(watch, phase=replace(watch.phase, is_back=True))
    if is_quiet(voters, settings):
        return _fall_quiet(learn_pause(watch, watch.ended_pause, now), voters, now, settings)
    if now - watch.since >= RECOVERED_SHOWN_SECONDS:
        return _end_recovery(watch, "the GPUs are working", now)
    return watch, ()


def _end_recovery(watch: JobWatch, message: str, now: float) -> Change:
    taught = learn_pause(watch, watch.ended_pause, now)
    learnt = ""
    if watch.ended_pause is not None and taught.pauses != watch.pauses:
        learnt = f"; the pause of {watch.ended_pause.seconds:.0f} s at this place is now a known pause"
    return enter_state(taught, JobState.TRAINING, f"{message}{learnt}", now)


_RULES = {
    JobState.STARTING: _starting,
    JobState.TRAINING: _training,
    JobState.QUIET: _quiet,
    JobState.SUSPECTED: _suspected,
    JobState.RECOVERED: _recovered,
    **dict.fromkeys(OPEN_STATES, _open),
}


def _shift_timers(watch: JobWatch, gap: float) -> JobWatch:
    """Return the watch with all timers moved by the length of a gap in the samples, because its power is unknown."""

    def moved(since: float | None) -> float | None:
        return None if since is None else since + gap

    gpus = {
        uuid: idle_workers.forget_low_power(power_level.end_flat_run(gpu)) for uuid, gpu in watch.power.gpus.items()
    }
    watch = with_capture_record(with_power(watch, gpus=gpus), low_since=moved(watch.capture_record.low_since))
    if isinstance(watch.phase, Starting):
        watch = replace(watch, phase=replace(watch.phase, over_since=moved(watch.phase.over_since)))
    if watch.is_counted:  # its counters decide, see `on_progress`
        return watch
    if watch.silence is not None:
        watch = replace(watch, silence=replace(watch.silence, since=watch.silence.since + gap))
    if watch.open_incident is not None:
        watch = with_open_incident(watch, back_since=moved(watch.open_incident.back_since))
    if watch.is_starting:
        watch = replace(watch, identity=replace(watch.identity, began=watch.identity.began + gap))
    return watch
