"""The watch of one job: everything that the detector remembers about the job between two steps.

All times are CLOCK_MONOTONIC seconds, so setting the clock of the node has no effect. `hangwatch.detector` shows
the transitions between states.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import field
from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector import known_pauses, power_level
from hangwatch.detector.known_pauses import EndedPause, Pause
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.progress_gaps import ProgressRecord
from hangwatch.detector.watch_parts import (
    CaptureRecord,
    CollectiveTimeout,
    GapSuspicion,
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
from hangwatch.model import OPEN_STATES, RESTING_STATES, CodeRegion, Incident, Job, JobState, RankId, Value

STALLED_STATES = frozenset({JobState.STALLED, JobState.WAITS_ELSEWHERE}) | RESTING_STATES


class MotionCount(Value, frozen=True):
    """The result of a capture: the numbers of ranks that are frozen (no progress), moving, or unknown (not judged).

    * `movers`: the moving ranks. `movers_text`: the same as text.
    * `with_stack`: number of ranks with a stack. `absent`: number of frozen ranks without a process.
      `started_since`: number of ranks with a process that started after the capture began.
    * `resting`: suspended or over; None for a job that must be judged. `traced_text`: a text on the ranks that a
      debugger has stopped. `serves`: the job is an inference server that waits for requests, or a worker group of Ray
      that waits for a task.
    * `places`: the places of the awaited ranks, see `known_pauses`.
    * `stays`: the ranks that stay between a few lines of code. Only several captures show if these ranks progress.
      `settled`: number of ranks that have stayed there for minutes.
    * `waits_elsewhere`: all ranks wait for ranks of other nodes, see `verdict.remote_wait`. `is_in_rendezvous`: all
      ranks wait for other ranks to join.
    * `sleepers_text`: a text on the sleeping ranks, which are not judged until they wake.
    * `waiting`: number of ranks that wait for other ranks. `permanent`: the ranks in a state that cannot end by itself,
      while others wait for them. `seconds`: the duration of the capture.
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
    is_in_rendezvous: bool = False
    sleepers_text: str = ""
    waiting: int = 0
    permanent: frozenset[RankId] = frozenset()
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Number of ranks that were judged or should have been judged."""
        return self.frozen + self.moving + self.unknown

    @property
    def is_well(self) -> bool:
        """True if the present power of the job is not a sign of a hang."""
        return self.most_move or self.serves

    @property
    def most_move(self) -> bool:
        """True if more than half of the ranks are moving."""
        return self.moving * 2 > self.total


class JobWatch(Value, frozen=True):
    """Everything that the detector remembers about one job.

    `since` is the time at which the state began, `message` the reason for it. `pauses` are the known pauses, `progress`
    the counters of its ranks. Each of these parts is set only in its states:
    * `phase`: starting, recovered and unknown.
    * `silence`: quiet, suspected and the open states.
    * `suspicion`: suspected and the open states.
    * `open_incident`: the open states.
    """

    identity: JobIdentity
    state: JobState = JobState.STARTING
    since: float = 0.0
    message: str = "waiting for the first sign of work"
    timeout: CollectiveTimeout = CollectiveTimeout()
    power: PowerRecord = PowerRecord()
    capture_record: CaptureRecord = CaptureRecord()
    pauses: tuple[Pause, ...] = ()
    progress: ProgressRecord = ProgressRecord()
    phase: Starting | Recovered | Unknown | None = Starting()
    silence: Silence | None = None
    suspicion: Suspicion | None = None
    open_incident: OpenIncident | None = None

    @property
    def findings(self) -> Suspicion:
        """The part `suspicion`, without any findings if the job is not suspected."""
        return self.suspicion or Suspicion()

    @property
    def incident(self) -> OpenIncident:
        """The part `open_incident`, without any times if no incident is open."""
        return self.open_incident or OpenIncident()

    @property
    def voters(self) -> list[GpuPower]:
        """The GPUs with a reading, which decide together."""
        return [gpu for gpu in self.power.gpus.values() if gpu.recent]

    @property
    def is_open(self) -> bool:
        """True if an incident of this job is open."""
        return self.state in OPEN_STATES

    @property
    def is_starting(self) -> bool:
        """True if the job is starting. Also true in state unknown, if the job was starting before."""
        return (self.phase.before if isinstance(self.phase, Unknown) else self.state) is JobState.STARTING

    @property
    def has_worked(self) -> bool:
        """True if the job has been at work, by its power or by its counters."""
        return self.power.was_busy or self.progress.is_known or self.is_counted

    @property
    def is_counted_only(self) -> bool:
        """True if no GPU of the job was ever read and its ranks enqueue collectives: only counters can show a hang."""
        return self.power.read_at is None and self.progress.progressed_at is not None and self.progress.advances > 0

    @property
    def ended_pause(self) -> EndedPause | None:
        """The pause to learn when the state recovered ends; None in other states, or if power is not back."""
        return self.phase.ended if isinstance(self.phase, Recovered) and self.phase.is_back else None

    @property
    def gap(self) -> GapSuspicion | None:
        """The part of a suspicion that began before the hold; None if it began at the hold."""
        return self.findings.gap

    @property
    def is_counted(self) -> bool:
        """True if a gap between collectives made the job suspected, so that its counters decide, not its power."""
        return self.gap is not None and not self.gap.by_power

    @property
    def quiet_since(self) -> float | None:
        """The time at which the low power, or the gap between collectives, began; None if there is neither."""
        return None if self.silence is None else self.silence.since


def with_power(watch: JobWatch, **changes: Any) -> JobWatch:
    """Return the watch with these fields of its part `power` changed."""
    return replace(watch, power=replace(watch.power, **changes))


def with_capture_record(watch: JobWatch, **changes: Any) -> JobWatch:
    """Return the watch with these fields of its part `capture_record` changed."""
    return replace(watch, capture_record=replace(watch.capture_record, **changes))


def with_suspicion(watch: JobWatch, **changes: Any) -> JobWatch:
    """Return the watch with these fields of its part `suspicion` changed. If that part is None, it is created first."""
    return replace(watch, suspicion=replace(watch.findings, **changes))


def with_open_incident(watch: JobWatch, **changes: Any) -> JobWatch:
    """Return the watch with these fields of its part `open_incident` changed. If it is None, it is created first."""
    return replace(watch, open_incident=replace(watch.incident, **changes))


def begin_watch(job: Job, now: float, started: float | None = None, earlier: JobWatch | None = None) -> JobWatch:
    """Return a new watch for a job that a scan has just found.

    `started` is the time at which its processes began, None if unknown. `earlier` is the watch of the same job before a
    restart. Its known pauses are kept.
    """
    began = now if started is None else min(now, started)
    generation = frozenset(job.processes)
    identity = JobIdentity.copy_from(job, generation=generation, began=began, has_ranks=job.waiting is None)
    return JobWatch(
        identity=identity,
        since=now,
        message="its launcher has started no rank" if job.waiting else "waiting for the first sign of work",
        timeout=CollectiveTimeout(environment_seconds=read_timeouts(job, job.environ).collective_seconds),
        pauses=earlier.pauses if earlier else (),
    )


def resume_watch(watch: JobWatch, incident: Incident, now: float, unix_now: float, settings: Detector) -> JobWatch:
    """Return the watch of a job with an incident from an earlier daemon, which did not close it.

    A capture is due at once. `now` is CLOCK_MONOTONIC and `unix_now` the same moment as Unix time, both in seconds.
    """

    def then(unix_seconds: float) -> float:
        return now - max(0.0, unix_now - unix_seconds)

    opened = fell = incident.opened_unix_seconds
    for line in reversed(incident.timeline):
        if line.state not in OPEN_STATES:
            break
        opened = line.unix_seconds
    gpus = {
        series.uuid: GpuPower(limit_watts=series.limit_watts, busy_watts=series.busy_watts) for series in incident.power
    }
    was_busy = watch.power.was_busy or any(power_level.has_worked(gpu, settings) for gpu in gpus.values())
    identity = replace(
        watch.identity,
        name=incident.job.name,
        generation=watch.identity.generation | frozenset(incident.job.processes),
    )
    watch = with_power(watch, gpus=watch.power.gpus | gpus, was_busy=was_busy)
    gap = GapSuspicion(
        advances=watch.progress.advances,
        asked_at=now,
        is_at_hold=True,
        pages_at_once=incident.state is JobState.HUNG,
    )
    watch = with_suspicion(
        watch,
        gap=gap if incident.by_counters else None,
        saw_stacks=any(group.frames for group in incident.grouping.groups),
        # A job that pages must not stop paging because the daemon was restarted.
        frozen_captures=len(incident.captures) if incident.state is JobState.HUNG else 0,
    )
    stalled_since = then(fell if incident.by_counters else opened) if incident.state in STALLED_STATES else None
    return replace(
        with_capture_record(watch, capturing=False),
        identity=identity,
        state=incident.state,
        since=then(opened),
        message=incident.timeline[-1].message if incident.timeline else watch.message,
        phase=None,
        silence=Silence(since=then(fell)),
        open_incident=OpenIncident(stalled_since=stalled_since, capture_wanted_at=now),
    )


def is_restart(watch: JobWatch, job: Job) -> bool:
    """True if the job has new processes, and some of the processes in the watch are gone.

    Also true if a launcher without ranks now has ranks, or the reverse. Its pid may be the same: execve(2) keeps it.
    """
    if watch.identity.has_ranks != (job.waiting is None):
        return True
    present, known = frozenset(job.processes), watch.identity.generation
    return bool(present - known) and bool(known - present)


def update_identity(watch: JobWatch, job: Job) -> JobWatch:
    """Return the watch with the job's present name, key, timeout and processes. Processes that are gone stay, too."""
    identity = replace(
        watch.identity,
        name=job.name,
        has_ranks_on_other_nodes=job.has_ranks_on_other_nodes,
        generation=watch.identity.generation.union(job.processes),
    )
    environment_seconds = read_timeouts(job, job.environ).collective_seconds
    return replace(watch, identity=identity, timeout=replace(watch.timeout, environment_seconds=environment_seconds))


def merge_watches(watch: JobWatch, other: JobWatch) -> JobWatch:
    """Return `watch` with the processes and GPUs of `other`, because a scan has shown that both are one job."""
    first, second = watch.identity, other.identity
    identity = replace(first, generation=first.generation | second.generation, began=min(first.began, second.began))
    return replace(with_power(watch, gpus={**other.power.gpus, **watch.power.gpus}), identity=identity)


def should_page(watch: JobWatch, now: float, settings: Detector) -> bool:
    """True if the job should page now: it is hung, or has been stalled for longer than its hold.

    * A hung job pages after `confirming_captures` consecutive captures in which all ranks were frozen. At the place
      of a known pause it pages later, see `known_pauses`. If its counters showed the hang, it pages after the hold, or
      at once if two captures found what cannot end by itself.
    * A stalled job pages only after a capture that found a stack or judged a rank.
    * A job at rest (suspended, over) pages like a stalled job, but only if other nodes have ranks of the job.
    * A job that waits for other nodes pages like a stalled job, and at the latest before its collective timeout. At its
      start, and as a launcher without ranks, it pages `startup_no_ranks_hold_seconds` after it began.
    """
    if watch.gap is not None and watch.gap.pages_at_once and watch.is_open:
        return True
    if watch.gap is not None and watch.incident.back_since is not None:
        now = watch.incident.back_since  # its ranks enqueue collectives again: no page begins now
    if watch.state is JobState.HUNG:
        is_confirmed = watch.suspicion is not None and watch.findings.frozen_captures >= settings.confirming_captures
        least_seconds = 0.0 if watch.gap is None else settings.hold_seconds
        hold_seconds = max(least_seconds, pause_hold_seconds(watch, now, settings))
        return is_confirmed and quiet_seconds(watch, now) >= hold_seconds
    stalled_since = watch.incident.stalled_since
    if watch.state not in STALLED_STATES or stalled_since is None or not watch.findings.saw_stacks:
        return False
    if watch.state in RESTING_STATES and not watch.identity.has_ranks_on_other_nodes:
        return False
    waits_to_join = watch.state is JobState.WAITS_ELSEWHERE and watch.findings.is_in_rendezvous
    if not watch.identity.has_ranks or (waits_to_join and not watch.power.was_busy):  # torchrun waits ten minutes
        return now - watch.identity.began >= settings.startup_no_ranks_hold_seconds
    hold = settings.stalled_hold_seconds if watch.has_worked else settings.startup_stalled_hold_seconds
    return now - stalled_since >= hold or _ends_itself_soon(watch, now)


def _ends_itself_soon(watch: JobWatch, now: float) -> bool:
    """True if a job that waits for other nodes times out in two minutes: a later page would find no process."""
    time_out = watch.timeout.seconds
    if watch.state is not JobState.WAITS_ELSEWHERE or time_out is None or not watch.has_worked:
        return False
    return quiet_seconds(watch, now) >= time_out - known_pauses.END_MARGIN_SECONDS


def pause_hold_seconds(watch: JobWatch, now: float, settings: Detector) -> float:
    """Return the seconds for which a hang must last before it pages; 0 without a known pause at this place."""
    return known_pauses.hold_seconds(
        longest_pause_seconds(watch, now), settings.stalled_hold_seconds, watch.timeout.seconds
    )


def longest_pause_seconds(watch: JobWatch, now: float) -> float | None:
    """Return the longest known pause in seconds at the present places of the job; None if there is none."""
    return known_pauses.longest_seconds(watch.pauses, watch.findings.places, now)


def quiet_seconds(watch: JobWatch, now: float) -> float:
    """Return the seconds for which the job has been quiet; 0 if it is not quiet."""
    return 0.0 if watch.silence is None else max(0.0, now - watch.silence.since)
