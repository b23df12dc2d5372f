"""Learn from a job: the power at which its ranks progress (the learned baseline), and its pauses at each place."""

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector import known_pauses, power_level
from hangwatch.detector.capture_due import double_pause
from hangwatch.detector.job_watch import JobWatch, with_capture_record, with_open_incident, with_power
from hangwatch.detector.known_pauses import EndedPause
from hangwatch.detector.transitions import Change, enter_state
from hangwatch.detector.watch_parts import Recovered
from hangwatch.model import JobState

# XIDs and link errors are read each minute; the job may fall silent after the error
ERRORS_BEFORE_SECONDS = 120.0


def with_learned_baseline(watch: JobWatch, now: float, settings: Detector) -> JobWatch:
    """Return the watch with the present power, at which ranks progress, as baseline. A light capture verifies it."""
    pause = 0.0 if watch.capture_record.low_since is None else double_pause(watch, settings)
    every = watch.power.gpus.items()
    gpus = {uuid: gpu if gpu.watts is None else replace(gpu, learned_watts=gpu.watts) for uuid, gpu in every}
    return with_capture_record(with_power(watch, gpus=gpus), low_since=now, low_power_pause_seconds=pause)


def drop_low_baselines(watch: JobWatch, settings: Detector) -> JobWatch:
    """Return the watch without the learned baselines under the usual threshold: no capture has confirmed them."""
    gpus = watch.power.gpus
    low = {uuid: replace(gpu, learned_watts=None) for uuid, gpu in gpus.items() if power_level.is_low(gpu, settings)}
    return with_power(watch, gpus=gpus | low)


def recover(watch: JobWatch, message: str, now: float) -> Change:
    """Return the watch in state `recovered`, because the job works again. `learn_pause` stores the pause at its end."""
    back_since = watch.incident.back_since
    is_back = back_since is not None or watch.is_counted  # counters measure the pause by themselves
    ended = end_pause(watch, back_since if is_back else now)
    watch, actions = enter_state(watch, JobState.RECOVERED, message, now)
    return replace(watch, phase=Recovered(ended=ended, is_back=is_back)), actions


def recover_when_back(watch: JobWatch, message: str, now: float, settings: Detector) -> Change:
    """Note that an open job works again. After `recover_seconds` it is recovered."""
    back_since = now if watch.incident.back_since is None else watch.incident.back_since
    watch = with_open_incident(watch, back_since=back_since)
    return recover(watch, message, now) if now - back_since >= settings.recover_seconds else (watch, ())


def end_pause(watch: JobWatch, at: float | None) -> EndedPause | None:
    """Return the pause of a job that works again since `at`; None without such a time."""
    if watch.silence is None or watch.suspicion is None or at is None:
        return None
    return EndedPause(places=watch.suspicion.places, began=watch.silence.since, seconds=at - watch.silence.since)


def learn_pause(watch: JobWatch, ended: EndedPause | None, now: float) -> JobWatch:
    """Return the watch with the ended pause as a known pause. A pause during GPU errors is not learned.

    For a hang, the detector calls this function when the state `recovered` ends. Only then has a scan shown if ranks
    were replaced during the pause.
    """
    if ended is None or had_gpu_errors(watch, ended.began):
        return watch
    return replace(watch, pauses=known_pauses.add_pause(watch.pauses, ended, now))


def had_gpu_errors(watch: JobWatch, silent_since: float | None) -> bool:
    """True if the job is silent, and this node had XIDs or link errors since 120 s before it became silent."""
    errors = watch.power.gpu_errors_at
    return errors is not None and silent_since is not None and errors >= silent_since - ERRORS_BEFORE_SECONDS
