"""The memory of the detector: all that it knows of one job, from the first scan, over restarts, to its page.

All times are CLOCK_MONOTONIC seconds, so a clock that steps changes nothing. The transitions between states:
`hangwatch.detector`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import field
from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector import known_pauses, power_level
from hangwatch.detector.known_pauses import Pause
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.watch_parts import (
    CaptureRecord,
    CollectiveTimeout,
    JobIdentity,
    OpenIncident,
    PowerRecord,
    Recovered,
    Silence,
    Starting,
    Suspicion,
    Unknown,
)
from hangwatch.jobs.collective_timeout import read_timeouts
from hangwatch.model import OPEN_STATES, RESTING_STATES, CodeRegion, Incident, Job, JobState, ProcessId, RankId, Value

STALLED_STATES = frozenset({JobState.STALLED, JobState.WAITS_ELSEWHERE}) | RESTING_STATES


class MotionCount(Value, frozen=True):
    """The result of a capture: how many ranks are frozen (do not progress), moving (progress), or unknown (not judged).

    * `movers_text`: the moving ranks, in words. `movers`: the same ranks.
    * `with_stack`: the ranks that gave a stack. `absent`: the frozen ranks without a process. `started_since`: the
      ranks of which the process started after the capture began.
    * `resting`: the state of a job that does not progress and is not hung. `traced_text`: the ranks that a debugger has
      stopped, in words. `serves`: an idle server waits for requests.
    * `places`: where the ranks are that the others wait for, see `known_pauses`.
    * `stays`: the ranks that stay between a few lines; only several captures tell if these progress. `settled`: how
      many of them stayed there in earlier captures, too.
    * `waits_elsewhere`: all ranks wait for ranks of other nodes, see `verdict.remote_wait`.
    * `sleepers_text`: the ranks that are unknown until they wake, in words.
    """

    frozen: int
    moving: int
    unknown: int = 0
    with_stack: int = 0
    absent: int = 0
    started_since: int = 0
    movers_text: str = ""
    resting: JobState | None = None
    traced_text: str = ""
    serves: bool = False
    places: frozenset[str] = frozenset()
    movers: frozenset[RankId] = frozenset()
    stays: Mapping[RankId, CodeRegion] = field(default_factory=dict)
    settled: int = 0
    waits_elsewhere: bool = False
    sleepers_text: str = ""

    @property
    def total(self) -> int:
        """The number of ranks that should have been seen."""
        return self.frozen + self.moving + self.unknown

    @property
    def is_well(self) -> bool:
        """True if the present power of the job is no sign of a hang."""
        return self.most_move or self.serves

    @property
    def most_move(self) -> bool:
        """True if more than half of the ranks progress."""
        return self.moving * 2 > self.total


class JobWatch(Value, frozen=True):
    """The memory of the detector for one job.

    `since` is when the state began, `message` the reason. `pauses` are the known pauses, which ended by themselves. A
    part is set exactly in its states: `phase` in starting, recovered and unknown; `silence` in quiet, suspected and the
    open states; `suspicion` in suspected and the open states; `open_incident` in the open states.
    """

    identity: JobIdentity
    state: JobState = JobState.STARTING
    since: float = 0.0
    message: str = "waiting for the first sign of work"
    timeout: CollectiveTimeout = CollectiveTimeout()
    power: PowerRecord = PowerRecord()
    capture_record: CaptureRecord = CaptureRecord()
    pauses: tuple[Pause, ...] = ()
    phase: Starting | Recovered | Unknown | None = Starting()
    silence: Silence | None = None
    suspicion: Suspicion | None = None
    open_incident: OpenIncident | None = None

    @property
    def is_open(self) -> bool:
        """True if an incident of this job is open."""
        return self.state in OPEN_STATES

    @property
    def is_starting(self) -> bool:
        """True if the job has shown no work yet, as far as its GPUs could be read."""
        return (self.phase.before if isinstance(self.phase, Unknown) else self.state) is JobState.STARTING

    @property
    def quiet_since(self) -> float | None:
        """The time at which the silence began; None if the job is not silent."""
        return None if self.silence is None else self.silence.since


def with_power(watch: JobWatch, **changes: Any) -> JobWatch:
    """Return the watch with these fields of its power changed."""
    return replace(watch, power=replace(watch.power, **changes))


def with_capture_record(watch: JobWatch, **changes: Any) -> JobWatch:
    """Return the watch with these fields of its capture record changed."""
    return replace(watch, capture_record=replace(watch.capture_record, **changes))


def with_suspicion(watch: JobWatch, **changes: Any) -> JobWatch:
    """Return the watch with these fields of its suspicion changed."""
    return replace(watch, suspicion=replace(watch.suspicion or Suspicion(), **changes))


def with_open_incident(watch: JobWatch, **changes: Any) -> JobWatch:
    """Return the watch with these fields of its open incident changed."""
    return replace(watch, open_incident=replace(watch.open_incident or OpenIncident(), **changes))


def begin_watch(job: Job, now: float, started: float | None = None, earlier: JobWatch | None = None) -> JobWatch:
    """Return a new watch for a job that was just found.

    `started` is the time at which its processes began, if known. The known pauses of an `earlier` watch are kept if the
    processes were started again.
    """
    began = now if started is None else min(now, started)
    identity = JobIdentity(
        job_id=job.job_id,
        job_key=job.key,
        generation=generation(job),
        began=began,
        has_ranks=job.waiting is None,
        is_elsewhere_too=job.is_elsewhere_too,
    )
    return JobWatch(
        identity=identity,
        since=now,
        message="its launcher has started no rank" if job.waiting else "waiting for the first sign of work",
        timeout=CollectiveTimeout(environment_seconds=read_timeouts(job, job.environ).collective_seconds),
        pauses=earlier.pauses if earlier else (),
    )


def resume_watch(watch: JobWatch, incident: Incident, now: float, unix_now: float, settings: Detector) -> JobWatch:
    """Return the watch of a job of which an earlier daemon left an incident open. The next capture is due at once.

    `now` is CLOCK_MONOTONIC, `unix_now` the same moment by the clock that wrote the incident, both in seconds.
    """

    def then(unix_seconds: float) -> float:
        return now - max(0.0, unix_now - unix_seconds)

    opened = fell = incident.opened_unix_seconds
    lines = list(incident.timeline)
    while lines and lines[-1].state in OPEN_STATES:
        opened = fell = lines.pop().unix_seconds
    while lines and lines[-1].state in (JobState.QUIET, JobState.SUSPECTED):
        fell = lines.pop().unix_seconds
    gpus = {
        series.uuid: GpuPower(limit_watts=series.limit_watts, busy_watts=series.busy_watts) for series in incident.power
    }
    was_busy = watch.power.was_busy or any(power_level.has_worked(gpu, settings) for gpu in gpus.values())
    identity = replace(
        watch.identity,
        job_id=incident.job.job_id,
        job_key=incident.job.key,
        generation=watch.identity.generation | generation(incident.job),
    )
    gpus |= {uuid: gpu for uuid, gpu in watch.power.gpus.items() if uuid not in gpus}
    watch = with_power(watch, gpus=gpus, was_busy=was_busy)
    watch = with_suspicion(
        watch,
        saw_stacks=any(group.frames for group in incident.grouping.groups),
        # A job that pages must not stop paging because the daemon was restarted.
        frozen_captures=len(incident.captures) if incident.state is JobState.HUNG else 0,
    )
    is_stalled = incident.state in STALLED_STATES
    return replace(
        with_capture_record(watch, capturing=False),
        identity=identity,
        state=incident.state,
        since=then(opened),
        message=incident.timeline[-1].message if incident.timeline else watch.message,
        phase=None,
        silence=Silence(since=then(fell)),
        open_incident=OpenIncident(stalled_since=then(opened) if is_stalled else None, capture_wanted_at=now),
    )


def generation(job: Job) -> frozenset[ProcessId]:
    """Return the processes that form the job.

    A process that is not in an earlier generation shows that the job was restarted.
    """
    return frozenset(job.processes)


def is_restart(watch: JobWatch, job: Job) -> bool:
    """True if ranks run that the watch has never seen, while ranks that it knew are gone.

    Also true if a launcher without ranks now has ranks, or the reverse, even in one process: execve(2) keeps the pid.
    """
    if watch.identity.has_ranks != (job.waiting is None):
        return True
    present = generation(job)
    known = watch.identity.generation
    return bool(present - known) and bool(known - present)


def update_identity(watch: JobWatch, job: Job) -> JobWatch:
    """Return the watch with the job's present name and key.

    Ranks that started later are added to the generation. Ranks that are gone stay in it.
    """
    identity = replace(
        watch.identity,
        job_id=job.job_id,
        job_key=job.key,
        is_elsewhere_too=job.is_elsewhere_too,
        generation=watch.identity.generation | generation(job),
    )
    environment_seconds = read_timeouts(job, job.environ).collective_seconds
    return replace(watch, identity=identity, timeout=replace(watch.timeout, environment_seconds=environment_seconds))


def merge_watches(watch: JobWatch, other: JobWatch) -> JobWatch:
    """Return the first of two watches of which the processes are one job, with the GPUs that only the other knows."""
    first, second = watch.identity, other.identity
    identity = replace(first, generation=first.generation | second.generation, began=min(first.began, second.began))
    return replace(with_power(watch, gpus={**other.power.gpus, **watch.power.gpus}), identity=identity)


def should_page(watch: JobWatch, now: float, settings: Detector) -> bool:
    """True if the job should page now: hung, or stalled for longer than its hold.

    * A hung job needs `confirming_captures` captures in a row in which all ranks were frozen. With a known pause at
      this place it pages later, see `known_pauses`.
    * A stalled job pages only after a capture that found a stack or judged a rank.
    * A job at rest (suspended, over) pages like a stalled one if ranks on other nodes may wait for it.
    * A job that waits for other nodes pages like a stalled one, and in any case before its collective timeout.
    """
    if watch.state is JobState.HUNG:
        is_confirmed = watch.suspicion is not None and watch.suspicion.frozen_captures >= settings.confirming_captures
        return is_confirmed and quiet_seconds(watch, now) >= pause_hold_seconds(watch, now, settings)
    stalled_since = None if watch.open_incident is None else watch.open_incident.stalled_since
    if watch.state not in STALLED_STATES or stalled_since is None:
        return False
    if watch.suspicion is None or not watch.suspicion.saw_stacks:
        return False
    if watch.state in RESTING_STATES and not watch.identity.is_elsewhere_too:
        return False
    hold = settings.stalled_hold_seconds if watch.power.was_busy else settings.startup_stalled_hold_seconds
    return now - stalled_since >= hold or _ends_itself_soon(watch, now)


def _ends_itself_soon(watch: JobWatch, now: float) -> bool:
    """True if a job waits for other nodes and its collective will time out soon. A page after that finds no process."""
    time_out = watch.timeout.seconds
    if watch.state is not JobState.WAITS_ELSEWHERE or time_out is None or not watch.power.was_busy:
        return False
    return quiet_seconds(watch, now) >= time_out - known_pauses.END_MARGIN_SECONDS


def pause_hold_seconds(watch: JobWatch, now: float, settings: Detector) -> float:
    """Return for how long a hang must last before it pages, if the place has a known pause; see `known_pauses`."""
    return known_pauses.hold_seconds(
        longest_pause_seconds(watch, now), settings.stalled_hold_seconds, watch.timeout.seconds
    )


def longest_pause_seconds(watch: JobWatch, now: float) -> float | None:
    """Return the longest known pause at the places where the job is now; None if there is none."""
    places = frozenset[str]() if watch.suspicion is None else watch.suspicion.places
    return known_pauses.longest_seconds(watch.pauses, places, now)


def quiet_seconds(watch: JobWatch, now: float) -> float:
    """Return for how long the job has been quiet; 0 if it is not."""
    return 0.0 if watch.silence is None else max(0.0, now - watch.silence.since)
