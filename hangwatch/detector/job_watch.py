"""What the detector remembers of one job: from when it is found, over joins and restarts, to whether it pages now.

All times are CLOCK_MONOTONIC seconds, so a clock that steps changes nothing. How one state follows another:
`hang.detector`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import field
from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector import known_pauses, power_level
from hangwatch.detector.known_pauses import EndedPause, Pause
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.standstill import Standstill
from hangwatch.jobs.collective_timeout import patience
from hangwatch.model import OPEN_STATES, RESTING_STATES, Incident, Job, JobState, ProcessId, RankId, Stay, Value

GLANCE_SECONDS = 300.0  # least time between two glances at power that fell and is flat
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
    """What the detector remembers of one job. `generation` are the ranks' processes: a restart begins a new watch.

    `has_ranks` is false for a launcher that has none: it draws no power, and only time tells. Times are
    CLOCK_MONOTONIC seconds, None where they mean nothing:

    * `began`: the job; `since`: its state; `sampled_at`: the last power sample; `captured_at`: the last capture.
    * `quiet_since` is set in quiet, suspected and the open states, and in no other; in quiet, `quiet_gpus` are those
      that have been quiet since then.
    * `stalled_since` is set in stalled, waits_elsewhere, suspended and over, and nowhere else; `back_since` at most in
      the open states, while power is back and not yet for long enough; `capture_wanted_at` at most there, while no
      capture is under way.
    * `capturing` is set in suspected, and while a capture of an open incident is under way. `capture_pause` seconds lie
      before the next one; `frozen_captures` in a row found everybody frozen; `saw_stacks`: one of them found any stack.
    * `read_at`: the last power sample with a reading of a GPU of the job; `known_state` is the state before unknown.
    * `over_since`: set at most in starting, since when the job draws more than the plain line of the settings.
    * `fell`: the suspicion began with a fall of power, so power that is over the line again ends it.
    * `low_since`: since when the job draws little without being quiet (it was taught that level, or has never worked
      hard), and was last seen moving; `relook_pause` seconds later, or after the hold, it is glanced at again.
    * `glancing_since`: a glance is under way; `glanced_at`: the last one ended. A glance that finds the job standing
      still begins a suspicion. `fall_glanced_at`: the last one at power that had fallen was asked for; `glance_pause`
      seconds lie before the next, and more after one that showed nothing.
    * `pauses` are those that ended by themselves; `places` are where the looks of this silence found the awaited ranks;
      `ended` is set at most in recovered: the pause that is learnt from there. `gpu_errors_at`: when XIDs or link
      errors last came on this node. `collective_seconds`: what a collective of the job waits by its
      environment, None for ever; `recorded_seconds`: as the last look found it recorded, which stands above that.
    * `last_look_at`: the look of this hang that was asked for since the job is going to end itself.

    `standstills` are the ranks that the last looks found between the same few lines; `moved` those that were seen
    moving since the suspicion, of a job that never worked hard: its power proves nothing.

    `is_elsewhere_too`: other nodes have ranks of it. `serves`: as the last look found it; its power is no measure of
    work until it is busy.
    """

    job_id: str
    job_key: str
    generation: frozenset[ProcessId]
    began: float
    has_ranks: bool
    state: JobState = JobState.STARTING
    since: float = 0.0
    message: str = "waiting for the first sign of work"
    gpus: dict[str, GpuPower] = field(default_factory=dict)
    was_busy: bool = False
    sampled_at: float | None = None
    read_at: float | None = None
    known_state: JobState = JobState.STARTING
    quiet_since: float | None = None
    quiet_gpus: frozenset[str] = frozenset()
    back_since: float | None = None
    stalled_since: float | None = None
    capture_wanted_at: float | None = None
    capture_pause: float = 0.0
    capturing: bool = False
    captured_at: float | None = None
    saw_stacks: bool = False
    frozen_captures: int = 0
    over_since: float | None = None
    fell: bool = False
    low_since: float | None = None
    relook_pause: float = 0.0
    glancing_since: float | None = None
    glanced_at: float | None = None
    fall_glanced_at: float | None = None
    glance_pause: float = GLANCE_SECONDS
    is_elsewhere_too: bool = False
    pauses: tuple[Pause, ...] = ()
    places: frozenset[str] = frozenset()
    ended: EndedPause | None = None
    gpu_errors_at: float | None = None
    collective_seconds: float | None = None
    recorded_seconds: float | None = None
    last_look_at: float | None = None
    serves: bool = False
    standstills: Mapping[RankId, Standstill] = field(default_factory=dict)
    moved: frozenset[RankId] = frozenset()

    @property
    def is_open(self) -> bool:
        """Whether an incident of this job is open."""
        return self.state in OPEN_STATES

    @property
    def is_starting(self) -> bool:
        """Whether it has shown no work yet, as far as its GPUs could be read."""
        return (self.known_state if self.state is JobState.UNKNOWN else self.state) is JobState.STARTING


def time_out_seconds(watch: JobWatch) -> float | None:
    """How long a collective of the job waits before the job ends itself, as far as is known; None for ever."""
    return watch.collective_seconds if watch.recorded_seconds is None else watch.recorded_seconds


def begin(job: Job, now: float, started: float | None = None, earlier: JobWatch | None = None) -> JobWatch:
    """A new watch for a job that was just found; `started` is when its processes began, where that is known.

    It keeps the pauses of an `earlier` watch, of the processes that were started again.
    """
    began = now if started is None else min(now, started)
    return JobWatch(
        job_id=job.job_id,
        job_key=job.key,
        generation=generation(job),
        began=began,
        has_ranks=job.waiting is None,
        since=now,
        message="its launcher has started no rank" if job.waiting else "waiting for the first sign of work",
        is_elsewhere_too=job.is_elsewhere_too,
        pauses=earlier.pauses if earlier else (),
        collective_seconds=patience(job, job.environ).collective_seconds,
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
    return replace(
        watch,
        job_id=incident.job.job_id,
        job_key=incident.job.key,
        generation=watch.generation | generation(incident.job),
        state=incident.state,
        since=then(opened),
        message=incident.timeline[-1].message if incident.timeline else watch.message,
        gpus=gpus | {uuid: gpu for uuid, gpu in watch.gpus.items() if uuid not in gpus},
        was_busy=watch.was_busy or any(power_level.has_worked(gpu, settings) for gpu in gpus.values()),
        quiet_since=then(fell),
        stalled_since=then(opened) if incident.state in STALLED_STATES else None,
        back_since=None,
        over_since=None,
        capturing=False,
        capture_wanted_at=now,
        saw_stacks=any(group.frames for group in incident.grouping.groups),
    )


def generation(job: Job) -> frozenset[ProcessId]:
    """The processes that are the job; one that is not in an earlier generation means that the job was restarted."""
    return frozenset(job.processes)


def is_restart(watch: JobWatch, job: Job) -> bool:
    """Whether ranks run that the watch has never seen while ranks that it knew are gone.

    Ranks are none of a launcher that had none, nor it one of theirs, though it be one process: execve(2) keeps the pid.
    """
    if watch.has_ranks != (job.waiting is None):
        return True
    present = generation(job)
    return bool(present - watch.generation) and bool(watch.generation - present)


def joined(watch: JobWatch, job: Job) -> JobWatch:
    """The watch by the job's name and key; ranks that came later in start-up belong to the generation, ranks that went
    stay in it."""
    return replace(
        watch,
        job_id=job.job_id,
        job_key=job.key,
        is_elsewhere_too=job.is_elsewhere_too,
        generation=watch.generation | generation(job),
        collective_seconds=patience(job, job.environ).collective_seconds,
    )


def merged(watch: JobWatch, other: JobWatch) -> JobWatch:
    """The first of two watches whose processes turned out to be one job, with what the other knows of its GPUs."""
    return replace(
        watch,
        generation=watch.generation | other.generation,
        began=min(watch.began, other.began),
        gpus={**other.gpus, **watch.gpus},
    )


def pages(watch: JobWatch, now: float, settings: Detector) -> bool:
    """Whether the on-call should be paged now: hung, or stalled for longer than its hold. Never without any stack.

    Hung where the job has paused before it pages later, see `pauses`. A job that rests is paged for as a stalled one
    where ranks on other nodes may wait for it; one that waits for other nodes as well, and before its collective ends.
    """
    if watch.state is JobState.HUNG:
        return quiet_seconds(watch, now) >= pause_hold_seconds(watch, now, settings)
    if watch.state not in STALLED_STATES or watch.stalled_since is None or not watch.saw_stacks:
        return False
    if watch.state in RESTING_STATES and not watch.is_elsewhere_too:
        return False
    hold = settings.stalled_hold_seconds if watch.was_busy else settings.startup_stalled_hold_seconds
    return now - watch.stalled_since >= hold or _ends_itself_soon(watch, now)


def _ends_itself_soon(watch: JobWatch, now: float) -> bool:
    """Whether what a job at work waits in on other nodes times out before long: then nobody is left to be paged for."""
    time_out = time_out_seconds(watch)
    if watch.state is not JobState.WAITS_ELSEWHERE or time_out is None or not watch.was_busy:
        return False
    return quiet_seconds(watch, now) >= time_out - known_pauses.END_MARGIN_SECONDS


def pause_hold_seconds(watch: JobWatch, now: float, settings: Detector) -> float:
    """For how long a hang pages not yet, because the job has paused at this place before; see `pauses`."""
    longest = known_pauses.longest_seconds(watch.pauses, watch.places, now)
    return known_pauses.hold_seconds(longest, settings.stalled_hold_seconds, time_out_seconds(watch))


def quiet_seconds(watch: JobWatch, now: float) -> float:
    """For how long the job has been quiet; 0 when it is not."""
    return 0.0 if watch.quiet_since is None else max(0.0, now - watch.quiet_since)
