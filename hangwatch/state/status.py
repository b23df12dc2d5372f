"""The status of the node as one value: the output of /status and the source of `hangwatch status`. Pure."""

from collections.abc import Iterable

from hangwatch import words
from hangwatch.config import Detector
from hangwatch.detector.job_watch import quiet_seconds
from hangwatch.detector.power_level import low_power_threshold_watts
from hangwatch.model import ArrivalStatus, GpuSample, Incident, Job, JobName, JobState, NotMonitored, Value, sum_all
from hangwatch.state.arrival_status import build_arrival_status
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.unseen import Unseen, list_unseen
from hangwatch.verdict.timeout_forecast import forecast_timeout
from hangwatch.verdict.wording.short_paths import shorten_paths

_USUAL = Detector()
LONG_GAP_SECONDS = 60.0
# 2: absent_local_ranks is a list of [first, last], GpuStatus.jobs; 3: unseen replaces no_counters
SCHEMA_VERSION = 3


class JobStatus(JobName, frozen=True):
    """One job as /status shows it, without command lines and stacks. `job_name` is the name that its user chose.

    `power_watts` is the sum over its GPUs, `line_watts` the sum of their low-power thresholds. Each is null if one
    GPU has no reading or no threshold yet. `ends_itself_unix_seconds` is the time when its own collective timeout
    ends the job; null if unknown. The job does not page until `silenced_until_unix_seconds`; null: it is not silenced.

    `collectives_per_second` is the mean of its ranks. `progress_gap_seconds` is the time since they enqueued a
    collective, `usual_gap_seconds` the length that 99 % of these gaps do not exceed. Each is null if unknown.
    `quiet_seconds` is the time since the last progress of a quiet, suspected, hung or stalled job; else null.
    `arrival` tells if a rank enqueues its collectives late; null before the first reading.
    """

    owner: str
    launcher: str
    user: str | None
    state: JobState
    message: str
    seconds_in_state: float
    ranks: int
    world_size: int | None
    absent_local_ranks: tuple[tuple[int, int], ...]
    page: bool
    verdict: str | None = None
    incident: str | None = None
    job_name: str = ""
    program: str = ""
    power_watts: float | None = None
    line_watts: float | None = None
    ends_itself_unix_seconds: float | None = None
    silenced_until_unix_seconds: float | None = None
    silence_reason: str = ""
    collectives_per_second: float | None = None
    progress_gap_seconds: float | None = None
    usual_gap_seconds: float | None = None
    quiet_seconds: float | None = None
    arrival: ArrivalStatus | None = None


class EngineStatus(JobName, frozen=True):
    """One inference engine as /status shows it. `program` is its name: "vLLM". It is not monitored."""

    owner: str
    program: str
    workers: int


class GpuStatus(Value, frozen=True):
    """One GPU as /status shows it. `fault` is the reason if there are no readings.

    `jobs` are the jobs that hold the GPU: the jobs that claim it and that the driver lists on it. If the driver
    lists none of them, all jobs that claim it are shown.
    """

    index: int
    name: str | None
    power_watts: float | None
    power_limit_watts: float | None
    utilization_ratio: float | None
    jobs: tuple[JobName, ...] = ()
    fault: str | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None


class CheckLine(Value, frozen=True):
    """A check as /status shows it. `ran_unix_seconds` is the time of its run."""

    check: str
    status: str
    reason: str
    message: str
    ran_unix_seconds: float


class Status(Value, frozen=True, kw_only=True):
    """The status of a node: the output of /status. docs/json.md describes it."""

    schema_version: int = SCHEMA_VERSION
    node: str
    sampler: str
    gpus: tuple[GpuStatus, ...]
    jobs: tuple[JobStatus, ...]
    checks: tuple[CheckLine, ...]
    left_out: tuple[NotMonitored, ...] = ()
    unseen: tuple[Unseen, ...] = ()
    engines: tuple[EngineStatus, ...] = ()
    store: str = "ok"


def build_status(snapshot: Snapshot, node: str, now: float, settings: Detector = _USUAL) -> Status:
    """Return the status of a snapshot, without stacks and command lines. `now` is CLOCK_MONOTONIC in seconds."""
    sampler = snapshot.sampler
    silent = sampler.fault.detail if sampler.fault else "the driver has not responded yet"
    return Status(
        node=node,
        sampler="ok" if sampler.alive else silent,
        store=snapshot.store_problem or "ok",
        gpus=_gpus(snapshot),
        jobs=_jobs(snapshot, now, settings),
        left_out=snapshot.left_out,
        unseen=list_unseen(snapshot),
        engines=tuple(EngineStatus.copy_from(job, job_key=job.key, workers=len(job.ranks)) for job in snapshot.engines),
        checks=tuple(
            CheckLine.copy_from(result.verdict, result, status=result.verdict.status.name)
            for _, result in sorted(snapshot.checks.items())
        ),
    )


def _gpus(snapshot: Snapshot) -> tuple[GpuStatus, ...]:
    if snapshot.sweep is None:
        return ()
    jobs = [*(entry.job for entry in snapshot.living), *snapshot.engines]
    read = [
        GpuStatus.copy_from(gpu, jobs=tuple(job.name for job in _holders(gpu, jobs))) for gpu in snapshot.sweep.gpus
    ]
    unread = [
        GpuStatus(
            index=index,
            name=None,
            power_watts=None,
            power_limit_watts=None,
            utilization_ratio=None,
            fault=f"{fault.reason}: {fault.detail}",
        )
        for index, fault in snapshot.sweep.unread.items()
    ]
    return tuple(sorted((*read, *unread), key=lambda gpu: gpu.index))


def _holders(gpu: GpuSample, jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs that hold a GPU: those with processes that the driver lists on it, else all that claim it."""
    claims = [job for job in jobs if gpu.uuid in job.gpu_uuids]
    return [job for job in claims if not job.pids.isdisjoint(gpu.pids)] or claims


def _jobs(snapshot: Snapshot, now: float, settings: Detector) -> tuple[JobStatus, ...]:
    readings = {gpu.uuid: gpu.power_watts for gpu in (snapshot.sweep.gpus if snapshot.sweep else ())}
    return tuple(
        JobStatus.copy_from(
            entry.job,
            job_key=entry.job.key,
            state=entry.watch.state,
            message=_message(entry, now),
            seconds_in_state=now - entry.watch.since,
            ranks=len(entry.job.ranks),
            page=snapshot.pages(entry),
            verdict=verdict,
            incident=incident.incident_id if incident else None,
            power_watts=sum_all(readings.get(uuid) for uuid in entry.job.gpu_uuids),
            line_watts=sum_all(
                low_power_threshold_watts(gpu, settings) if (gpu := entry.watch.power.gpus.get(uuid)) else None
                for uuid in entry.job.gpu_uuids
            ),
            ends_itself_unix_seconds=ends.at_unix_seconds if ends else None,
            silenced_until_unix_seconds=silence.until_unix_seconds if silence else None,
            silence_reason=silence.reason if silence else "",
            collectives_per_second=_rate(entry, now),
            progress_gap_seconds=progress.gap_seconds(now) if progress.progressed_at is not None else None,
            usual_gap_seconds=progress.usual_seconds,
            quiet_seconds=quiet_seconds(entry.watch, now) if entry.watch.silence is not None else None,
            arrival=build_arrival_status(entry.arrival_order, entry.job) if entry.arrival_order else None,
        )
        for entry in snapshot.jobs.values()
        for incident, progress in [(_present_incident(entry), entry.watch.progress)]
        for verdict in [_present_message(entry, incident)]
        for ends in [forecast_timeout(incident) if incident else None]
        for silence in [snapshot.silences.get(entry.job.key)]
    )


def _message(entry: JobEntry, now: float) -> str:
    """Return the message of the detector, or how far it has learned the usual gaps of a job, and a long gap now."""
    progress, message, gap_seconds = entry.watch.progress, entry.watch.message, _untold_gap_seconds(entry, now)
    if entry.watch.state is JobState.STARTING and progress.progressed_at is not None:
        message = f"learning: {words.count(round(progress.total), 'collective')} so far"
    silent = f"no new collective for {words.duration(gap_seconds)}: `hangwatch dump` looks now; "
    return f"{silent if gap_seconds else ''}{message}"


def _untold_gap_seconds(entry: JobEntry, now: float) -> float:
    """Return the time without a collective of a job with usual gaps that are not known yet; 0 up to a minute."""
    is_untold = entry.watch.state in (JobState.STARTING, JobState.UNKNOWN) and not entry.watch.progress.is_known
    gap_seconds = entry.watch.progress.gap_seconds(now)
    return gap_seconds if is_untold and gap_seconds > LONG_GAP_SECONDS else 0.0


def _rate(entry: JobEntry, now: float) -> float | None:
    """Return the collectives per second: 0 from the suspicion on, not the mean of the time before it."""
    progress = entry.watch.progress
    is_over = entry.watch.gap or entry.watch.state is JobState.ENDED or _untold_gap_seconds(entry, now)
    return None if progress.progressed_at is None else 0.0 if is_over else round(progress.per_second, 3)


def _present_message(entry: JobEntry, incident: Incident | None) -> str | None:
    """Return the message of the incident, or of the suspicion if the job has no incident yet."""
    look = incident or (entry.suspected if entry.watch.state is JobState.SUSPECTED else None)
    was = "it works again; before: " if entry.watch.state is JobState.RECOVERED else ""
    return None if look is None else was + shorten_paths(look.verdict.message, look.grouping)


def _present_incident(entry: JobEntry) -> Incident | None:
    """Return the open incident, or a closed one while the job is recovered or ended, but not in a new quiet phase."""
    is_over = entry.watch.state in (JobState.RECOVERED, JobState.ENDED)
    return entry.incident if is_over else entry.open_incident
