"""The state of a job and its incident, from the first capture to the end, by the pure steps of the board."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch.capture import rank_dumps
from hangwatch.config import Detector, Jobs
from hangwatch.detector import TakeCapture, job_watch
from hangwatch.jobs import discovery as jobs
from hangwatch.model import (
    CheckResult,
    CheckStatus,
    CheckVerdict,
    Died,
    EndedProcess,
    EnqueuedOperation,
    Frame,
    GpuSample,
    GpuSweep,
    Group,
    Grouping,
    GroupRecords,
    Incident,
    Job,
    JobState,
    Member,
    Motion,
    Point,
    PowerSeries,
    Process,
    ProcessId,
    Rank,
    RankId,
    RecorderState,
    SamplerStatus,
    Signature,
    Value,
    Verdict,
    Worker,
)
from hangwatch.state import steps
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.incident_timeline import CAPTURES_KEPT
from hangwatch.state.on_crash import CRASHES_SHOWN_PER_SHARE
from hangwatch.state.restored_incidents import STARTED_AGAIN
from hangwatch.state.steps import Action, ReadCrashArtifacts, SaveIncident
from hangwatch.verdict.diagnosis import Diagnosis
from tests import samples

RULES = Detector(confirming_captures=1, hold_seconds=20, recover_seconds=2)
ALL_WAIT = Verdict(kind="AllWaiting", message="all wait")


def job(pid: int = 100, ranks: int = 2, job_id: str = "42") -> Job:
    return Job(
        job_id=job_id,
        launcher="torchrun",
        launcher_id=None,
        ranks=tuple(
            Rank(id=ProcessId(pid=pid + i, start_ticks=pid), rank=i, local_rank=i, gpu_uuids=(f"GPU-{i}",))
            for i in range(ranks)
        ),
    )


def grouping(motion: Motion = Motion.FROZEN, gone: bool = False) -> Grouping:
    members = tuple(Member(id=RankId(node="n1", rank=i), motion=motion) for i in range(2))
    return Grouping(groups=(Group(key="k", activity="collective_wait", members=members, gone=gone),))


class Life:
    """A replacement of the daemon for one job: it calls the pure steps and records their actions."""

    def __init__(self, now: float = 1000.0, rules: Detector = RULES) -> None:
        self.snapshot, self.now, self.rules = Snapshot(), now, rules
        self.saved: list[Incident] = []
        self.moves: list[JobState | None] = []
        self.looks: list[str] = []

    def discover(self, *jobs: Job) -> None:
        self._take(steps.record_scan(self.snapshot, jobs, self.now, self.unix))

    def power(self, watts: float, seconds: int) -> None:
        self.sample(
            seconds, *(GpuSample(index=i, uuid=f"GPU-{i}", power_watts=watts, power_limit_watts=700) for i in range(2))
        )

    def sample(self, seconds: int, *gpus: GpuSample) -> None:
        alive = SamplerStatus(alive=True)
        for _ in range(seconds):
            self.now += 1
            sweep = GpuSweep(taken_monotonic_seconds=self.now, taken_unix_seconds=self.unix, gpus=gpus)
            self._take(
                steps.record_sample(self.snapshot, sweep, alive, now=self.now, settings=self.rules, gap_seconds=10)
            )

    def look(self, seen: Grouping, job_id: str = "42", uid: int | None = None, verdict: Verdict = ALL_WAIT) -> None:
        facts = {"job_id": job_id, "job_key": job_id, "started_unix_seconds": self.unix, "ranks": ()}
        capture = replace(samples.loader_hang().captures[0], **facts)
        look = Diagnosis(capture=capture, grouping=seen, verdict=verdict, judged_unix_seconds=self.unix, uid=uid)
        self._take(self.captured(look, job_id))

    def captured(
        self, look: Diagnosis | None, job_id: str = "42", **wanted: str
    ) -> tuple[Snapshot, tuple[Action, ...]]:
        wanted_capture = TakeCapture(job_key=job_id, reason="", **wanted)
        return steps.record_capture(
            self.snapshot, wanted_capture, look, now=self.now, unix_now=self.unix, settings=self.rules
        )

    @property
    def unix(self) -> float:
        return self.now + 1e9

    @property
    def entry(self) -> JobEntry:
        return self.snapshot.jobs["42"]

    @property
    def state(self) -> JobState:
        return self.entry.watch.state

    @property
    def captures(self) -> int:
        return len(self.looks)

    def resume(self, *incidents: Incident, living: Job | None = None) -> None:
        alive = frozenset(living.processes if living else ())
        left = incidents or self.snapshot.unresumed_incidents
        self._take(
            steps.restore_incidents(self.snapshot, left, alive, now=self.now, unix_now=self.unix, settings=self.rules)
        )

    def _take(self, outcome: tuple[Snapshot, tuple[Action, ...]]) -> None:
        self.snapshot, actions = outcome
        saves = [action for action in actions if isinstance(action, SaveIncident)]
        self.saved += [action.incident for action in saves]
        self.moves += [action.moved_to for action in saves]
        self.looks += [action.reason for action in actions if isinstance(action, TakeCapture)]


def at_work(**changes: object) -> Life:
    """Return the state of a job that works."""
    life = Life()
    life.discover(replace(job(), **changes))
    life.power(600, 60)
    return life


def quiet(**changes: object) -> Life:
    """Return the state of a job that worked before and is now suspected. Its capture is running."""
    life = at_work(**changes)
    life.power(110, 26)
    assert life.state is JobState.SUSPECTED
    return life


def hung() -> Life:
    life = quiet()
    assert life.captures == 1
    life.look(grouping())
    assert life.state is JobState.HUNG
    return life


def test_an_incident_opens_and_closes() -> None:
    life = hung()
    assert life.entry.page
    opened = life.saved[-1]
    assert (opened.state, opened.closed_unix_seconds) == (JobState.HUNG, None)
    assert [line.state for line in opened.timeline][-4:] == [
        JobState.QUIET,
        JobState.SUSPECTED,
        JobState.HUNG,
        JobState.HUNG,
    ]
    assert opened.paged_unix_seconds == opened.timeline[-1].unix_seconds == life.unix
    (start,) = (line for line in opened.timeline if line.message == "the last progress of the job")
    assert (start.unix_seconds, start.state) == (opened.opened_unix_seconds, JobState.TRAINING)
    life.power(600, 10)
    closed = life.saved[-1]
    assert closed.incident_id == opened.incident_id
    assert closed.state is JobState.RECOVERED
    assert closed.closed_unix_seconds is not None
    assert not life.entry.page
    life.power(600, 70)
    assert life.entry.incident is None, "back at work, the board forgets it; the store keeps it"


def test_a_move_is_told_once_and_what_a_hook_came_to_is_no_move() -> None:
    life = hung()
    assert life.moves == [JobState.HUNG]
    life.look(grouping())
    incident = life.saved[-1]
    life._take(steps.record_note(life.snapshot, incident, "hook on_hung ended", unix_now=life.unix))
    life.power(600, 10)
    assert [move for move in life.moves if move] == [JobState.HUNG, JobState.RECOVERED]
    assert "hook on_hung ended" in [line.message for line in life.saved[-1].timeline]
    before = life.snapshot
    later = steps.record_note(before, replace(incident, incident_id="another"), "x", unix_now=life.unix)
    assert later == (before, ()), "the incident is not this job's any more"


def test_incident_ended_without_daemon_changes_state_after_restart() -> None:
    left = hung().saved[-1]
    gone, again = Life(), Life()
    gone.resume(left)
    assert gone.moves == [JobState.ENDED]
    again.discover(job())
    again.resume(left, living=job())
    assert again.moves == [None]


def test_a_second_hang_is_a_second_incident() -> None:
    life = hung()
    first = life.saved[-1].incident_id
    life.power(600, 90)
    life.power(110, 26)
    life.look(grouping())
    assert life.state is JobState.HUNG
    assert life.saved[-1].incident_id != first


def test_an_elastic_restart_ends_the_incident_and_begins_anew() -> None:
    life = hung()
    life.discover(job(pid=900))
    assert life.saved[-1].state is JobState.ENDED
    assert life.saved[-1].timeline[-1].message == "its ranks were replaced by new ones"
    assert life.state is JobState.STARTING
    assert (life.entry.incident, life.entry.timeline) == (None, ())


def test_a_rank_that_went_is_absent_although_nothing_said_how_many_there_should_be() -> None:
    life = hung()
    life.discover(job(ranks=1))
    assert life.entry.job.absent_local_ranks == ((1, 1),)
    assert life.state is JobState.HUNG


def test_a_gone_rank_counts_as_frozen() -> None:
    life = quiet()
    waiting, gone = grouping().groups[0], grouping(Motion.UNKNOWN, gone=True).groups[0]
    life.look(Grouping(groups=(waiting, replace(gone, key="gone", members=gone.members[1:]))))
    assert life.state is JobState.HUNG


def test_a_job_of_which_nothing_is_left_is_not_hung() -> None:
    life = quiet()
    life.look(grouping(Motion.UNKNOWN, gone=True))
    assert life.state is JobState.STALLED
    assert not life.entry.page


def test_a_job_keeps_its_name_while_its_ranks_live() -> None:
    """This occurs if the allocation gets a second job, or if the launcher is killed."""
    life = hung()
    renamed, other = replace(job(), job_id="42-p100"), job(pid=500, job_id="42-p500")
    life.discover(renamed, other)
    assert life.state is JobState.HUNG
    assert life.entry.page
    assert life.snapshot.jobs["42-p500"].watch.state is JobState.STARTING
    life.discover(other)
    assert life.state is JobState.ENDED
    assert life.snapshot.jobs["42-p500"].watch.state is JobState.STARTING


def apart() -> Job:
    """Return the same job under another key, as a scan returns it if a second job has a better claim to the key."""
    return replace(job(), job_id="42-p100", job_key="42-p100")


def test_key_moves_to_job_that_holds_a_gpu() -> None:
    """Else an older process with copied variables would have this key on all nodes."""
    life = at_work()
    real = replace(job(pid=500), holds_gpu=True)
    life.discover(job(), replace(real, job_id="42-p500", job_key="42-p500", holds_gpu=False))
    life.power(600, 5)
    began = life.snapshot.jobs["42-p500"].watch
    life.discover(apart(), real)
    taken, given = life.entry, life.snapshot.jobs["42-p100"]
    assert (taken.job.ranks, given.job.ranks) == (real.ranks, job().ranks)
    assert (taken.watch.identity.name.job_id, taken.watch.identity.name.job_key) == ("42", "42")
    assert taken.watch.state == began.state
    assert taken.watch.since == began.since
    assert taken.watch.power.gpus == began.power.gpus
    assert (given.watch.state, given.watch.identity.name.job_key) == (JobState.TRAINING, "42-p100"), (
        "a watch follows its processes"
    )
    assert set(life.snapshot.jobs) == {"42", "42-p100"}
    life.discover(job(), replace(real, job_id="42-p500", job_key="42-p500"))
    assert life.entry.job.ranks == real.ranks, "and is not taken back"


@pytest.mark.parametrize("claim", [False, True])
def test_job_that_held_a_gpu_keeps_its_key(claim: bool) -> None:
    life = at_work(holds_gpu=True)
    before = life.entry.watch
    life.discover(apart(), replace(job(pid=500), holds_gpu=claim))
    assert life.entry.watch == before
    assert {entry.job.job_id for entry in life.snapshot.jobs.values()} == {"42", "42-p500"}
    life.discover(replace(apart(), holds_gpu=False), replace(job(pid=500), holds_gpu=claim))
    assert life.entry.watch == before, "also while the driver does not list it"


def test_temporary_claimant_does_not_restart_the_job() -> None:
    life = Life()
    life.discover(job())
    before = life.entry.watch
    for number in range(4):
        life.now += 10
        life.discover(apart(), replace(job(pid=500 + number), holds_gpu=True))
        life.now += 10
        life.discover(job())
        after = life.entry.watch
        assert (after.identity.began, after.since, after.state) == (before.identity.began, before.since, before.state)


def test_at_its_start_a_job_takes_the_name_that_the_scan_finds_later_and_goes_on() -> None:
    life = Life()
    life.discover(replace(job(), job_id="pid100", job_key="pid100"))
    life.now += 10
    life.discover(job())
    assert life.entry.watch.since == 1000.0
    assert set(life.snapshot.jobs) == {"42"}


@pytest.mark.parametrize("open_one", [100, 500])
def test_two_pods_that_become_one_job_lose_neither_incident_nor_page(open_one: int) -> None:
    # Ranks in two pods count as two jobs until they have connected to their store. Then both become one job.
    life = hung()
    other = replace(job(pid=500, ranks=1), job_id="42-p500", job_key="42-p500")
    life.discover(job(), other)
    joined = replace(job(), ranks=(*job().ranks, *other.ranks))
    if open_one == 500:
        entry = life.entry
        later = steps.record_scan(Snapshot(), [other], life.now, life.unix)[0].jobs["42-p500"]
        generation = later.watch.identity.generation
        identity = replace(entry.watch.identity, name=other.name, generation=generation)
        watch = replace(entry.watch, identity=identity)
        moved = replace(entry, job=other, watch=watch)
        fresh = steps.record_scan(Snapshot(), [job()], life.now, life.unix)[0].jobs["42"]
        life.snapshot = life.snapshot.with_job(moved).with_job(fresh)
    life.discover(joined)
    (alive,) = (entry for entry in life.snapshot.jobs.values() if entry.watch.state is not JobState.ENDED)
    assert (alive.watch.state, alive.page, len(alive.job.ranks)) == (JobState.HUNG, True, 3)
    assert alive.incident is not None and alive.incident.closed_unix_seconds is None
    life.power(110, 5)
    life.discover(joined)
    assert life.snapshot.jobs[alive.job.key].page


def test_pods_that_become_one_job_while_a_rank_is_gone_are_not_restarted() -> None:
    life = hung()
    other = replace(job(pid=500, ranks=1), job_id="42-p500", job_key="42-p500")
    life.discover(job(ranks=1), other)
    life.discover(replace(job(), ranks=(*job(ranks=1).ranks, *other.ranks)))
    assert life.state is JobState.HUNG
    ended = life.snapshot.jobs["42-p500"].watch
    assert (ended.state, ended.message) == (JobState.ENDED, "its ranks now belong to job 42")


def test_open_incident_keeps_its_key_despite_another_claimant() -> None:
    life = hung()
    mine, claimant = replace(job(), job_id="42-p100", job_key="42-p100"), job(pid=500, job_id="42")
    life.discover(mine, claimant)
    assert life.state is JobState.HUNG
    assert life.entry.page
    assert {rank.id.pid for rank in life.entry.job.ranks} == {rank.id.pid for rank in mine.ranks}
    assert len(life.snapshot.jobs) == 2


def test_a_capture_that_fails_as_a_whole_is_tried_again() -> None:
    life = quiet()
    life._take(life.captured(None))
    assert life.state is JobState.STALLED
    life.power(110, 40)
    assert life.captures == 2
    life.look(grouping())
    life.power(110, 80)
    life.look(grouping())
    assert life.state is JobState.HUNG


def test_moving_ranks_open_no_incident() -> None:
    life = quiet()
    life.look(grouping(Motion.MOVING))
    assert life.state is JobState.TRAINING
    assert life.saved == []
    assert life.snapshot.captures == {"moving": 1}


def test_later_looks_are_bounded_and_the_first_is_kept() -> None:
    life = hung()
    first = life.saved[0].captures[0]
    for _ in range(10):
        life.now += 10
        life.look(grouping())
    captures = life.saved[-1].captures
    assert len(captures) == CAPTURES_KEPT
    assert captures[0] == first


def test_a_look_at_a_job_that_is_gone_changes_nothing() -> None:
    life = hung()
    before = replace(life.snapshot)
    life.look(grouping(), job_id="nobody")
    assert life.snapshot == before


def test_jobs_do_not_disturb_each_other() -> None:
    life = hung()
    other = replace(job(pid=500, job_id="43"), ranks=())
    life.discover(job(), other)
    assert life.snapshot.jobs["43"].watch.state is JobState.STARTING
    assert life.state is JobState.HUNG


def test_ranks_with_a_stack_count_as_seen() -> None:
    """Then the job pages after the stalled hold."""
    members = tuple(Member(id=RankId(node="n1", rank=i), signature=Signature.SPINS) for i in range(2))
    stack = (Frame(function="step", file="mine.py", line=7),)
    seen = steps.count_motion(Grouping(groups=(Group(key="k", activity="unknown", members=members, frames=stack),)))
    assert (seen.frozen, seen.moving, seen.unknown, seen.with_stack) == (0, 0, 2, 2)


def test_moving_ranks_are_described_with_activity() -> None:
    loading = Member(id=RankId(node="n1", rank=2, pid=7), motion=Motion.MOVING)
    seen = steps.count_motion(
        Grouping(
            groups=(
                *grouping(Motion.MOVING).groups,
                Group(key="l", activity="data_loading", members=(loading,)),
                Group(key="u", activity="unknown", members=(Member(id=RankId(rank=3), motion=Motion.FROZEN),)),
            )
        )
    )
    assert seen.movers_text == "ranks 0-1 on n1 in collective wait; rank 2 (n1, pid 7) in data loading"
    assert (seen.moving, seen.frozen) == (3, 1)


@pytest.mark.parametrize(
    ("looks", "reader"), [((7, 7), 7), ((None, 7), None), ((7, None), None)], ids=["his", "first not", "second not"]
)
def test_incident_with_capture_of_another_user_is_unreadable(looks: tuple[int | None, ...], reader: int | None) -> None:
    # A rank is captured once as a setuid program and once as the user's program: execve(2) keeps the pid.
    life = quiet(uid=7)
    for uid in looks:
        life.look(grouping(), uid=uid)
        life.power(110, 120)
    incident = life.entry.incident
    assert (len(incident.captures), incident.job.uid) == (2, reader)


def rank_in_pod(pod: str, pid: int, rank: int, start_ticks: int, parent_pid: int = 1) -> Process:
    return Process(
        id=ProcessId(pid=pid, start_ticks=start_ticks),
        parent_pid=parent_pid,
        comm="python3",
        state="S",
        cmdline=("python3", "train.py"),
        environ={"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4"}
        | {"MASTER_ADDR": "master-0", "MASTER_PORT": "23456"},
        uid=0,
        cgroups=(f"/kubepods/pod{pod}/c1",),
    )


MINE = [rank_in_pod("8c1f0a52-6d1e", 100 + rank, rank, 500) for rank in range(2)]
STORE = "10.0.0.5 port 23456"


class Stranger(Value, frozen=True):
    """A process of a user in another pod, with the data that this user can control."""

    pid: int
    rank: int
    start_ticks: int
    on_gpu: bool
    is_connected: bool


_strangers = st.lists(
    st.builds(
        Stranger,
        pid=st.integers(200, 205),
        rank=st.integers(0, 3),
        start_ticks=st.sampled_from([1, 900]),
        on_gpu=st.booleans(),
        is_connected=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda one: one.pid,
)


class Shared(Life):
    """A job in a pod, on a node where other users run processes."""

    def scan(self, strangers: list[Stranger], mine: list[Process], is_listed: bool = True) -> None:
        processes = [*mine, *(rank_in_pod("f00dcafe-0000", one.pid, one.rank, one.start_ticks) for one in strangers)]
        held = [(process.id.pid,) for process in mine if is_listed] or [(), ()]
        gpus = [*held, tuple(one.pid for one in strangers if one.on_gpu)]
        sweep = GpuSweep(
            taken_monotonic_seconds=1e6,
            taken_unix_seconds=0.0,
            gpus=tuple(GpuSample(index=i, uuid=f"GPU-{i}", pids=pids) for i, pids in enumerate(gpus)),
        )
        endpoints = {process.id: STORE for process in mine}
        endpoints |= {
            process.id: "10.6.6.6 port 23456"
            for process in processes
            if any(process.id.pid == one.pid and one.is_connected for one in strangers)
        }
        self.discover(*jobs.find_jobs(processes, sweep, node="n1", endpoints=endpoints).jobs)

    @property
    def mine(self) -> JobEntry:
        (entry,) = (
            entry for entry in self.snapshot.jobs.values() if MINE[0].id in {rank.id for rank in entry.job.ranks}
        )
        return entry

    def live(self, strangers: list[list[Stranger]], before: list[list[Stranger]]) -> list[tuple[JobState, bool, str]]:
        """Start, work, hang, capture and resume. Between the steps, scan with the next processes of strangers."""
        for beside in before:
            self.scan(beside, [])
            self.power(60, 2)
        coming = iter(strangers)
        told = []
        phases = ((60, 5), (600, 5), (600, 55), (600, 5), (110, 10), (110, 16), (0, 0), (110, 5), (600, 3), (600, 70))
        for number, (watts, seconds) in enumerate(phases):
            self.scan(next(coming, []), MINE, is_listed=number % 3 != 2)
            if watts:
                self.power(watts, seconds)
            else:
                self.look(grouping(), self.mine.job.key)
            told.append((self.mine.watch.state, self.mine.page, self.mine.job.key))
        return told


def states(rows: list[tuple[JobState, bool, str]]) -> list[tuple[JobState, bool]]:
    return [(state, page) for state, page, _ in rows]


@settings(max_examples=60, deadline=None)
@given(st.lists(_strangers, max_size=10))
def test_later_strangers_do_not_change_key_state_or_page(strangers: list[list[Stranger]]) -> None:
    alone = Shared().live([], [])
    assert states(alone)[7] == (JobState.HUNG, True)
    assert Shared().live([[], *strangers], []) == alone


@settings(max_examples=60, deadline=None)
@given(st.lists(_strangers, max_size=10), st.lists(_strangers, min_size=1, max_size=3))
def test_early_strangers_change_no_state_or_page(strangers: list[list[Stranger]], before: list[list[Stranger]]) -> None:
    # The strangers start first. They may take the key only with a GPU: no data shows which uid-0 pod is genuine.
    alone, told = Shared().live([], []), Shared().live(strangers, before)
    assert states(told) == states(alone)
    if not any(one.on_gpu for beside in (*before, *strangers) for one in beside):
        assert told == alone


def started_again(saved: Incident, *jobs: Job, seconds_later: float = 30) -> Life:
    """Return a restarted daemon, which has found `jobs` and has read `saved`, the incident of the old daemon."""
    life = Life(saved.timeline[-1].unix_seconds - 1e9 + seconds_later)
    life.discover(*jobs)
    life.resume(saved, living=job())
    return life


def test_an_incident_goes_on_in_the_next_daemon_and_is_looked_at_at_once() -> None:
    before = hung()
    left = before.saved[-1]
    life = started_again(left, job())
    entry = life.entry
    assert (life.state, entry.page) == (JobState.HUNG, True), "no start-up hold, no moment without a page"
    assert life.saved[-1].incident_id == left.incident_id
    assert life.saved[-1].captures == left.captures
    assert life.saved[-1].timeline[: len(left.timeline)] == left.timeline
    assert life.saved[-1].timeline[-1].message == STARTED_AGAIN
    assert left.opened_unix_seconds < left.captured_unix_seconds, "it begins with the last progress"
    assert job_watch.quiet_seconds(entry.watch, life.now) == life.unix - left.opened_unix_seconds, "before the restart"
    life.power(110, 1)
    assert life.captures == 1
    life.look(grouping())
    assert life.state is JobState.HUNG
    assert life.saved[-1].incident_id == left.incident_id
    assert len(life.saved[-1].captures) == 2


def test_a_daemon_that_is_started_again_and_again_writes_one_line() -> None:
    left = hung().saved[-1]
    before = [line.message for line in left.timeline]
    for _ in range(5):
        left = started_again(left, job()).saved[-1]
    assert [line.message for line in left.timeline] == [*before, STARTED_AGAIN]


def test_power_that_came_back_during_a_restart_ends_the_incident() -> None:
    life = started_again(hung().saved[-1], job())
    life.power(600, 10)
    assert life.state is JobState.RECOVERED
    assert life.saved[-1].closed_unix_seconds is not None


def test_the_job_keeps_the_name_that_is_on_the_page() -> None:
    renamed, claimant = replace(job(), job_id="42-p100"), job(pid=500)
    life = started_again(hung().saved[-1], renamed, claimant)
    assert life.state is JobState.HUNG
    assert {rank.id.pid for rank in life.entry.job.ranks} == {100, 101}
    life.discover(renamed, claimant)
    assert life.state is JobState.HUNG
    assert len(life.snapshot.jobs) == 2


def test_what_no_scan_has_found_yet_waits_and_is_closed_once_it_is_gone() -> None:
    left = hung().saved[-1]
    life = started_again(left)
    assert life.snapshot.unresumed_incidents == (left,)
    life.discover(job())
    life.resume(living=job())
    assert (life.state, life.snapshot.unresumed_incidents) == (JobState.HUNG, ())

    gone = started_again(left)
    gone.resume()
    assert gone.snapshot.unresumed_incidents == ()
    closed = gone.saved[-1]
    assert (closed.incident_id, closed.state) == (left.incident_id, JobState.ENDED)
    assert closed.timeline[-1].message == "its processes had ended when hangwatch restarted"


def test_ranks_that_were_replaced_during_the_restart_are_another_job() -> None:
    left = hung().saved[-1]
    mixed = replace(job(), ranks=(job().ranks[0], job(pid=900).ranks[1]))
    life = started_again(left, mixed)
    assert life.state is JobState.STARTING
    assert "replaced by new ones" in life.saved[-1].timeline[-1].message


def test_of_two_incidents_of_the_same_processes_the_later_goes_on() -> None:
    left = hung().saved[-1]
    life = started_again(left, job())
    life.resume(replace(left, incident_id="earlier"), living=job())
    assert life.state is JobState.HUNG
    assert (life.saved[-1].incident_id, life.saved[-1].state) == ("earlier", JobState.ENDED)


def test_a_stalled_job_does_not_wait_anew_for_its_page() -> None:
    before = quiet()
    both = grouping().groups[0]
    one_moves = replace(
        both,
        frames=(Frame(function="f", file="f.py", line=1),),
        members=(both.members[0], replace(both.members[1], motion=Motion.MOVING)),
    )
    before.look(Grouping(groups=(one_moves,)))
    assert before.state is JobState.STALLED
    left = replace(
        before.saved[-1],
        power=tuple(
            PowerSeries(uuid=f"GPU-{i}", index=i, unix_seconds=(), watts=(), limit_watts=700, busy_watts=600)
            for i in range(2)
        ),
    )
    early = started_again(left, job(), seconds_later=RULES.stalled_hold_seconds - 10)
    assert (early.state, early.entry.page) == (JobState.STALLED, False)
    early.look(grouping())
    assert early.state is JobState.STALLED, "a second capture must show that no rank progresses"
    late = started_again(left, job(), seconds_later=RULES.stalled_hold_seconds + 1)
    assert (late.state, late.entry.page) == (JobState.STALLED, True)


def result(check: str, status: CheckStatus = CheckStatus.OK, xids: int = 0) -> CheckResult:
    point = Point(name="xid_errors_total", value=xids, help="", labels=(("pci", "c1"), ("xid", "79")))
    return CheckResult(
        check=check,
        verdict=CheckVerdict(status=status, reason="R", message="m"),
        success=True,
        duration_seconds=0.1,
        ran_unix_seconds=0.0,
        points=(point,) if check == "xid" else (),
    )


def errors_at(*results: CheckResult) -> float | None:
    snapshot = Snapshot()
    for second, one in enumerate(results):
        snapshot = steps.record_check(snapshot, one, now=float(second))
        assert snapshot.checks[one.check] == one
    return snapshot.gpu_errors_at


def test_xids_are_timed_when_they_come_not_while_the_log_remembers_them() -> None:
    sick = CheckStatus.CRITICAL
    assert errors_at(result("xid", sick, xids=3), result("xid", sick, xids=3)) is None
    assert errors_at(result("xid", xids=3), result("xid", sick, xids=4), result("xid", sick, xids=4)) == 1.0


def test_link_errors_are_timed_while_the_check_warns() -> None:
    assert errors_at(result("nvlink_status", CheckStatus.UNKNOWN)) is None
    assert errors_at(result("nvlink_status", CheckStatus.WARNING), result("nvlink_status")) == 0.0
    assert errors_at(result("storage", CheckStatus.CRITICAL)) is None


def life_with_a_pause(*after: Job, checks: tuple[CheckResult, ...] = ()) -> Life:
    """Return the state of a job that trained, paused for 40 s, trained again, and now pauses again.

    Rank 0 waits for a server in both pauses. `checks` are recorded in the first pause. `after` are the jobs that a
    scan finds between the pauses.
    """
    life = at_work()
    life.power(80, 25)
    life.look(AT_A_SERVER)
    for check in checks:
        life.snapshot = steps.record_check(life.snapshot, check, now=life.now)
    life.power(80, 15)
    life.power(600, 30)
    for found in after:
        life.discover(found)
    life.power(600, 60)
    life.power(80, 25)
    life.look(AT_A_SERVER)
    return life


AT_A_SERVER = Grouping(
    groups=tuple(
        Group(
            key=key,
            activity=key,
            members=(Member(id=RankId(node="n1", rank=rank), motion=Motion.FROZEN),),
            waits_for=waits_for,
            frames=(Frame(function=key, file="a.py"),),
        )
        for rank, (key, waits_for) in enumerate([("network", "nothing"), ("collective_wait", "ranks")])
    )
)


def test_known_pause_delays_the_page_and_is_in_the_message() -> None:
    life = life_with_a_pause()
    entry = life.entry
    assert (entry.watch.state, entry.page) == (JobState.HUNG, False)
    assert (
        "known pause at this place of at most 40 s: hangwatch pages after 80 s" in entry.incident.timeline[-1].message
    )
    life.power(80, 60)
    assert life.entry.page


def test_the_time_out_that_an_open_operation_recorded_is_the_jobs() -> None:
    waiting = EnqueuedOperation(
        number=6, operation="all_reduce", order=6, created_unix_seconds=1e9, stays_open=True, timeout_seconds=140.0
    )
    records = GroupRecords(
        library="gloo", name="0", description="default_pg", number=6, operations=(replace(waiting, stays_open=False),)
    )
    recorded = [
        (RecorderState(library="gloo", groups=(replace(records, operations=(one,)),)),)
        for one in (replace(waiting, stays_open=False, timeout_seconds=1.0), waiting)
    ]
    groups = tuple(
        replace(
            group, members=(replace(group.members[0], recorder=replace(group.members[0].recorder, libraries=told)),)
        )
        for group, told in zip(AT_A_SERVER.groups, recorded, strict=True)
    )
    life = life_with_a_pause()
    assert (life.entry.watch.timeout.seconds, life.entry.page) == (600.0, False)
    life.look(Grouping(groups=groups))
    assert (life.entry.watch.timeout.seconds, life.entry.page) == (140.0, True)
    life.discover(life.entry.job)
    assert life.entry.watch.timeout.seconds == 140.0, "a scan knows its environment only"


def test_the_timeline_of_an_incident_says_why_it_was_looked_at_before_the_time_out() -> None:
    life = hung()
    life.power(110, 20)
    before = life.captures
    entry = life.entry
    recorded_seconds = job_watch.quiet_seconds(entry.watch, life.now) + 40.0
    told = replace(entry.watch, timeout=replace(entry.watch.timeout, recorded_seconds=recorded_seconds))
    told = job_watch.with_capture_record(told, captured_at=life.now - 60)
    life.snapshot = life.snapshot.with_job(replace(entry, watch=told))
    life.power(110, 5)
    assert life.captures == before + 1
    entry = life.entry
    line = entry.incident.timeline[-1]
    assert (line.state, line.unix_seconds) == (JobState.HUNG, life.unix - 4)
    assert line.message == (
        "captured once more: in 39 s its collective timeout may end the job (as its ranks recorded)"
    )
    assert entry.timeline[-1] == line
    assert (life.saved[-1], life.moves[-1]) == (entry.incident, None), "it is on disk before the job is gone"


def test_pause_of_replaced_ranks_is_not_learned() -> None:
    life = life_with_a_pause(job(pid=500))
    assert life.entry.watch.pauses == ()
    assert life.entry.page


def test_pause_with_a_link_warning_is_not_learned() -> None:
    life = life_with_a_pause(checks=(result("nvlink_status", CheckStatus.WARNING),))
    assert life.entry.watch.pauses == ()
    assert life.entry.page


def test_processes_that_are_gone_are_remembered_and_bounded() -> None:
    """Remember the pids of dead ranks and workers for the kernel's log, up to a limit: each epoch has new workers."""
    life, all_here = Life(), job(ranks=2)
    life.discover(all_here)
    first, second = all_here.ranks
    for number in range(100):
        worker = Worker(id=ProcessId(pid=5000 + number, start_ticks=1), comm="pt_data_worker")
        life.discover(replace(all_here, ranks=(replace(first, workers=(worker,)), second)))
    life.discover(replace(all_here, ranks=(first,)))
    ended = life.entry.job.ended
    assert [one.id.pid for one in ended if not one.is_worker] == [second.id.pid]
    assert [one.id.pid for one in ended if one.is_worker] == list(range(5036, 5100))
    assert {one.rank for one in ended if one.is_worker} == {0}
    assert all(one.gone_unix_seconds == life.unix for one in ended)


def dead_ranks_to_read(life: Life, *jobs: Job) -> list[tuple[list[int], int]]:
    """Record a scan that found `jobs`. For each job with dead ranks, return their pids and the number of live ranks."""
    life.snapshot, actions = steps.record_scan(life.snapshot, jobs, life.now, life.unix)
    reads = [action.job for action in actions if isinstance(action, ReadCrashArtifacts)]
    return [([one.id.pid for one in read.ended], len(read.ranks)) for read in reads]


def test_what_a_rank_left_is_read_once_it_is_gone() -> None:
    life, whole = Life(), job(ranks=3)
    first, second, third = whole.ranks
    assert dead_ranks_to_read(life, whole) == []
    assert dead_ranks_to_read(life, whole) == []
    assert dead_ranks_to_read(life, replace(whole, ranks=(first, third))) == [([second.id.pid], 2)]
    assert dead_ranks_to_read(life, replace(whole, ranks=(first, third))) == []
    assert dead_ranks_to_read(life) == [([second.id.pid, first.id.pid, third.id.pid], 0)]
    assert dead_ranks_to_read(life) == []


def test_why_a_rank_died_is_known_of_the_job_that_goes_on_without_it() -> None:
    """Keep the cause of a rank's death over later scans. If the other ranks hang, their verdict has it."""
    life, whole = Life(), job(ranks=3)
    dead_ranks_to_read(life, whole)
    without = replace(whole, ranks=whole.ranks[:2])
    life.snapshot, actions = steps.record_scan(life.snapshot, [without], life.now, life.unix)
    (dead,) = (action.job for action in actions if isinstance(action, ReadCrashArtifacts))
    died = Died(text="ValueError: empty shard, according to its error file", unix_seconds=1.0, is_first=True)
    told = replace(dead, ended=(replace(dead.ended[0], died=died),))
    life.snapshot, _ = steps.record_crash(life.snapshot, replace(crash(1), job=told), now=life.now)
    life.discover(without)
    entry = life.entry
    assert [one.died for one in entry.job.ended] == [died]
    assert [dump.died for dump in rank_dumps.absent_ranks(entry.job, "n1")] == [died]


def test_what_ranks_left_is_read_when_others_take_their_place() -> None:
    life, whole = Life(), job()
    dead_ranks_to_read(life, whole)
    assert dead_ranks_to_read(life, job(pid=900)) == [([rank.id.pid for rank in whole.ranks], 0)]


def test_of_ranks_that_die_together_none_is_lost() -> None:
    # All ranks except one die together, then the last rank dies. Read the artifacts of all of them.
    life, whole = Life(), job(ranks=Jobs().max_ranks_per_owner)
    dead_ranks_to_read(life, whole)
    survivor = whole.ranks[0]
    (first,) = dead_ranks_to_read(life, replace(whole, ranks=(survivor,)))
    assert first == ([rank.id.pid for rank in whole.ranks[1:]], 1)
    (second,) = dead_ranks_to_read(life)
    assert second == ([*first[0], survivor.id.pid], 0)


def crash(number: int, *gone: int, share: str = "uid 1000") -> Incident:
    ended = tuple(
        EndedProcess(id=ProcessId(pid=pid, start_ticks=1), rank=0, local_rank=0, gone_unix_seconds=0.0) for pid in gone
    )
    return Incident(
        incident_id=f"i{number}-{len(gone)}",
        node="n1",
        job=replace(job(job_id=str(number)), ended=ended, share=share),
        opened_unix_seconds=float(number),
        state=JobState.ENDED,
        verdict=Verdict(kind="Crashed", message=f"{len(gone)}"),
        grouping=Grouping(groups=()),
    )


def test_a_crash_of_the_same_processes_is_one_incident_told_anew() -> None:
    snapshot, actions = steps.record_crash(Snapshot(), crash(1, 100), now=0.0)
    assert [action.moved_to for action in actions if isinstance(action, SaveIncident)] == [JobState.ENDED]
    snapshot, actions = steps.record_crash(snapshot, crash(1, 100, 101), now=5.0)
    (one,) = snapshot.crashes
    assert (one.incident.incident_id, one.incident.verdict.message, one.found_monotonic_seconds) == ("i1-1", "2", 0.0)
    assert snapshot.crash_count == 1
    told = [(action.incident.incident_id, action.moved_to) for action in actions if isinstance(action, SaveIncident)]
    assert told == [("i1-1", None)], "its hook was called already"
    snapshot, _ = steps.record_crash(snapshot, crash(1, 200), now=9.0)
    assert [one.incident.job.ended[0].id.pid for one in snapshot.crashes] == [200]
    assert snapshot.crash_count == 2


def test_later_crash_without_a_name_does_not_replace_a_named_crash() -> None:
    """The ranks of the next attempt only report each other, and the warning of that attempt ends after seconds."""
    named = crash(1, 100)
    named = replace(named, verdict=replace(named.verdict, named=(RankId(rank=0),)))
    snapshot, _ = steps.record_crash(Snapshot(), named, now=0.0)
    after, actions = steps.record_crash(snapshot, crash(1, 200), now=5.0)
    assert (after.crashes, after.crash_count, actions) == (snapshot.crashes, 2, ())
    after, actions = steps.record_crash(after, replace(named, job=crash(1, 300).job), now=9.0)
    assert [one.incident.job.ended[0].id.pid for one in after.crashes] == [300]
    assert len(actions) == 1


def test_of_one_owner_so_many_crashes_are_kept_in_a_quarter_of_an_hour() -> None:
    snapshot, saved = Snapshot(), 0
    for number in range(50):
        snapshot, actions = steps.record_crash(snapshot, crash(number, number + 1), now=1.0)
        saved += len(actions)
    assert saved == CRASHES_SHOWN_PER_SHARE
    _, actions = steps.record_crash(snapshot, crash(99, 999, share="uid 2000"), now=1.0)
    assert len(actions) == 1


def test_crashes_are_bounded_and_one_owner_hides_no_other() -> None:
    snapshot, _ = steps.record_crash(Snapshot(), crash(0, 1, share="uid 2000"), now=0.0)
    for number in range(1, 200):
        snapshot, _ = steps.record_crash(snapshot, crash(number, number + 1), now=1.0)
    shares = [one.incident.job.share for one in snapshot.crashes]
    assert (shares.count("uid 2000"), shares.count("uid 1000")) == (1, CRASHES_SHOWN_PER_SHARE)
    assert snapshot.crash_count == 200
    snapshot, _ = steps.record_crash(snapshot, crash(300, 5), now=1e6)
    assert len(snapshot.crashes) == 1
