"""What the detector remembers of one job: from when it is found, over joins and restarts, to whether it pages now.

All times are CLOCK_MONOTONIC seconds, so a clock that steps changes nothing. How one state follows another:
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
    CollectiveTimeout,
    JobIdentity,
    LookRecord,
    OpenIncident,
    PowerRecord,
    Recovered,
    Silence,
    Starting,
    Suspicion,
    Unknown,
)
from hangwatch.jobs.collective_timeout import patience
from hangwatch.model import OPEN_STATES, RESTING_STATES, Incident, Job, JobState, ProcessId, RankId, Stay, Value

STALLED_STATES = frozenset({JobState.STALLED, JobState.WAITS_ELSEWHERE}) | RESTING_STATES


class MotionCount(Value, frozen=True):
    """What a capture found: how many ranks are frozen, moving, or could not be judged; `who` moves, in words.

    `stacked` of them gave a stack, `absent` of the frozen have no process; `came`: so many have one only since the look
    began. `resting` is the state of a job that stands still and is not hung; one that `serves` waits for clients.
    `places` are where those stand for whom the others wait, see `pauses`. `movers` are those that move; of those in
    `stays` only several looks tell whether they do; `settled` of these have stood so in the looks before, too.
    `waits_elsewhere`: all wait for ranks of other nodes, see `hang.elsewhere`.
    """

    frozen: int
    moving: int
    unknown: int = 0
    stacked: int = 0
    absent: int = 0
    came: int = 0
    who: str = ""
    resting: JobState | None = None
    serves: bool = False
    places: frozenset[str] = frozenset()
    movers: frozenset[RankId] = frozenset()
    stays: Mapping[RankId, Stay] = field(default_factory=dict)
    settled: int = 0
    waits_elsewhere: bool = False

    @property
    def total(self) -> int:
        """All ranks that should have been seen."""
        return self.frozen + self.moving + self.unknown

    @property
    def is_well(self) -> bool:
        """Whether what the job draws is no sign of a hang."""
        return self.most_move or self.serves

    @property
    def most_move(self) -> bool:
        """Whether more than half of them move, not just half."""
        return self.moving * 2 > self.total


class JobWatch(Value, frozen=True):
    """What the detector remembers of one job.

    `since`: its state began; `message` says why. `pauses` are those that ended by themselves. A part is set exactly in
    its states: `phase` in starting, recovered and unknown; `silence` in quiet, suspected and the open states;
    `suspicion` in suspected and the open states; `open` in the open states.
    """

    identity: JobIdentity
    state: JobState = JobState.STARTING
    since: float = 0.0
    message: str = "waiting for the first sign of work"
    time_out: CollectiveTimeout = CollectiveTimeout()
    power: PowerRecord = PowerRecord()
    looks: LookRecord = LookRecord()
    pauses: tuple[Pause, ...] = ()
    phase: Starting | Recovered | Unknown | None = Starting()
    silence: Silence | None = None
    suspicion: Suspicion | None = None
    open: OpenIncident | None = None

    @property
    def is_open(self) -> bool:
        """Whether an incident of this job is open."""
        return self.state in OPEN_STATES

    @property
    def is_starting(self) -> bool:
        """Whether it has shown no work yet, as far as its GPUs could be read."""
        return (self.phase.before if isinstance(self.phase, Unknown) else self.state) is JobState.STARTING

    @property
    def quiet_since(self) -> float | None:
        """Since when the job is silent; None when it is not."""
        return None if self.silence is None else self.silence.since


def with_power(watch: JobWatch, **changes: Any) -> JobWatch:
    """The watch with these fields of its power changed."""
    return replace(watch, power=replace(watch.power, **changes))


def with_looks(watch: JobWatch, **changes: Any) -> JobWatch:
    """The watch with these fields of its looks changed."""
    return replace(watch, looks=replace(watch.looks, **changes))


def with_suspicion(watch: JobWatch, **changes: Any) -> JobWatch:
    """The watch with these fields of its suspicion changed."""
    return replace(watch, suspicion=replace(watch.suspicion or Suspicion(), **changes))


def with_open(watch: JobWatch, **changes: Any) -> JobWatch:
    """The watch of an open incident with these fields of it changed."""
    return replace(watch, open=replace(watch.open or OpenIncident(), **changes))


def begin(job: Job, now: float, started: float | None = None, earlier: JobWatch | None = None) -> JobWatch:
    """A new watch for a job that was just found; `started` is when its processes began, where that is known.

    It keeps the pauses of an `earlier` watch, of the processes that were started again.
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
        time_out=CollectiveTimeout(environment_seconds=patience(job, job.environ).collective_seconds),
        pauses=earlier.pauses if earlier else (),
    )


def resumed(watch: JobWatch, incident: Incident, now: float, unix_now: float, settings: Detector) -> JobWatch:
    """The watch of a job whose open incident was left by an earlier daemon: as it was then, and looked at at once.

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
    watch = with_suspicion(watch, saw_stacks=any(group.frames for group in incident.grouping.groups))
    is_stalled = incident.state in STALLED_STATES
    return replace(
        with_looks(watch, capturing=False),
        identity=identity,
        state=incident.state,
        since=then(opened),
        message=incident.timeline[-1].message if incident.timeline else watch.message,
        phase=None,
        silence=Silence(since=then(fell)),
        open=OpenIncident(stalled_since=then(opened) if is_stalled else None, capture_wanted_at=now),
    )


def generation(job: Job) -> frozenset[ProcessId]:
    """The processes that are the job; one that is not in an earlier generation means that the job was restarted."""
    return frozenset(job.processes)


def is_restart(watch: JobWatch, job: Job) -> bool:
    """Whether ranks run that the watch has never seen while ranks that it knew are gone.

    Ranks are none of a launcher that had none, nor it one of theirs, though it be one process: execve(2) keeps the pid.
    """
    if watch.identity.has_ranks != (job.waiting is None):
        return True
    present = generation(job)
    known = watch.identity.generation
    return bool(present - known) and bool(known - present)


def joined(watch: JobWatch, job: Job) -> JobWatch:
    """The watch by the job's name and key; ranks that came later in start-up belong to the generation, ranks that went
    stay in it."""
    identity = replace(
        watch.identity,
        job_id=job.job_id,
        job_key=job.key,
        is_elsewhere_too=job.is_elsewhere_too,
        generation=watch.identity.generation | generation(job),
    )
    environment_seconds = patience(job, job.environ).collective_seconds
    return replace(watch, identity=identity, time_out=replace(watch.time_out, environment_seconds=environment_seconds))


def merged(watch: JobWatch, other: JobWatch) -> JobWatch:
    """The first of two watches whose processes turned out to be one job, with what the other knows of its GPUs."""
    first, second = watch.identity, other.identity
    identity = replace(first, generation=first.generation | second.generation, began=min(first.began, second.began))
    return replace(with_power(watch, gpus={**other.power.gpus, **watch.power.gpus}), identity=identity)


def pages(watch: JobWatch, now: float, settings: Detector) -> bool:
    """Whether the on-call should be paged now: hung, or stalled for longer than its hold. Never without any stack.

    Hung where the job has paused before it pages later, see `pauses`. A job that rests is paged for as a stalled one
    where ranks on other nodes may wait for it; one that waits for other nodes as well, and before its collective ends.
    """
    if watch.state is JobState.HUNG:
        return quiet_seconds(watch, now) >= pause_hold_seconds(watch, now, settings)
    stalled_since = None if watch.open is None else watch.open.stalled_since
    if watch.state not in STALLED_STATES or stalled_since is None:
        return False
    if watch.suspicion is None or not watch.suspicion.saw_stacks:
        return False
    if watch.state in RESTING_STATES and not watch.identity.is_elsewhere_too:
        return False
    hold = settings.stalled_hold_seconds if watch.power.was_busy else settings.startup_stalled_hold_seconds
    return now - stalled_since >= hold or _ends_itself_soon(watch, now)


def _ends_itself_soon(watch: JobWatch, now: float) -> bool:
    """Whether what a job at work waits in on other nodes times out before long: then nobody is left to be paged for."""
    time_out = watch.time_out.seconds
    if watch.state is not JobState.WAITS_ELSEWHERE or time_out is None or not watch.power.was_busy:
        return False
    return quiet_seconds(watch, now) >= time_out - known_pauses.END_MARGIN_SECONDS


def pause_hold_seconds(watch: JobWatch, now: float, settings: Detector) -> float:
    """For how long a hang pages not yet, because the job has paused at this place before; see `pauses`."""
    return known_pauses.hold_seconds(
        longest_pause_seconds(watch, now), settings.stalled_hold_seconds, watch.time_out.seconds
    )


def longest_pause_seconds(watch: JobWatch, now: float) -> float | None:
    """The longest pause that is known of the places where the job stands; None where there is none."""
    places = frozenset[str]() if watch.suspicion is None else watch.suspicion.places
    return known_pauses.longest_seconds(watch.pauses, places, now)


def quiet_seconds(watch: JobWatch, now: float) -> float:
    """For how long the job has been quiet; 0 when it is not."""
    return 0.0 if watch.silence is None else max(0.0, now - watch.silence.since)
