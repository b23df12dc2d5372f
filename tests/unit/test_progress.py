"""The life of an incident: opened by a look, carried through every transition, closed when the job goes on or ends."""

from __future__ import annotations

from msgspec.structs import replace

from hangwatch import progress
from hangwatch.board import Snapshot
from hangwatch.config import Detector
from hangwatch.hang.detector import TakeCapture
from hangwatch.look import Look
from hangwatch.model import (
    Capture,
    GpuSample,
    GpuSweep,
    Group,
    Grouping,
    Incident,
    Job,
    JobState,
    Member,
    Motion,
    ProcessId,
    Rank,
    RankId,
    SamplerStatus,
    Verdict,
)
from hangwatch.progress import Action, SaveIncident

RULES = Detector(hold_seconds=20, recover_seconds=2)


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
    """Plays the daemon: feeds the pure functions and keeps what they ask for."""

    def __init__(self) -> None:
        self.snapshot, self.now = Snapshot(), 1000.0
        self.saved: list[Incident] = []
        self.captures = 0

    def discover(self, *jobs: Job) -> None:
        self._take(progress.discovered(self.snapshot, jobs, self.now, self.unix))

    def power(self, watts: float, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            gpus = tuple(
                GpuSample(index=i, uuid=f"GPU-{i}", power_watts=watts, power_limit_watts=700) for i in range(2)
            )
            sweep = GpuSweep(taken_monotonic_seconds=self.now, taken_unix_seconds=self.unix, gpus=gpus)
            self._take(
                progress.sampled(
                    self.snapshot, sweep, SamplerStatus(alive=True), now=self.now, settings=RULES, gap_seconds=10
                )
            )

    def look(self, seen: Grouping, job_id: str = "42") -> None:
        capture = Capture(
            job_id=job_id,
            job_key=job_id,
            node="n1",
            started_unix_seconds=self.unix,
            duration_seconds=1,
            rounds=3,
            ranks=(),
        )
        verdict = Verdict(kind="AllWaiting", message="all wait")
        look = Look(
            capture=capture,
            grouping=seen,
            verdict=verdict,
            judged_unix_seconds=self.unix,
        )
        self._take(progress.captured(self.snapshot, look, now=self.now, settings=RULES))

    @property
    def unix(self) -> float:
        return self.now + 1e9

    @property
    def state(self) -> JobState:
        return self.snapshot.jobs["42"].watch.state

    def _take(self, outcome: tuple[Snapshot, tuple[Action, ...]]) -> None:
        self.snapshot, actions = outcome
        for action in actions:
            if isinstance(action, SaveIncident):
                self.saved.append(action.incident)
            self.captures += isinstance(action, TakeCapture)


def hung() -> Life:
    life = Life()
    life.discover(job())
    life.power(600, 60)
    life.power(110, 26)
    assert life.captures == 1
    life.look(grouping())
    assert life.state is JobState.HUNG
    return life


def test_an_incident_opens_and_closes() -> None:
    life = hung()
    assert life.snapshot.jobs["42"].page
    opened = life.saved[-1]
    assert (opened.state, opened.closed_unix_seconds) == (JobState.HUNG, None)
    assert [line.state for line in opened.timeline][-3:] == [JobState.QUIET, JobState.SUSPECTED, JobState.HUNG]
    life.power(600, 10)
    closed = life.saved[-1]
    assert closed.incident_id == opened.incident_id
    assert closed.state is JobState.RECOVERED
    assert closed.closed_unix_seconds is not None
    assert not life.snapshot.jobs["42"].page
    life.power(600, 70)
    assert life.snapshot.jobs["42"].incident is None, "back at work, the board forgets it; the store keeps it"


def test_a_second_hang_is_a_second_incident() -> None:
    life = hung()
    first = life.saved[-1].incident_id
    life.power(600, 90)
    life.power(110, 26)
    life.look(grouping())
    assert life.state is JobState.HUNG
    assert life.saved[-1].incident_id != first


def test_a_job_that_ends_closes_its_incident_and_is_forgotten_later() -> None:
    life = hung()
    life.discover()
    assert life.state is JobState.ENDED
    assert life.saved[-1].state is JobState.ENDED
    life.now += progress.ENDED_SHOWN_SECONDS + 1
    life.discover()
    assert "42" not in life.snapshot.jobs


def test_an_elastic_restart_ends_the_incident_and_begins_anew() -> None:
    life = hung()
    life.discover(job(pid=900))
    assert life.saved[-1].state is JobState.ENDED
    assert life.state is JobState.STARTING
    assert life.snapshot.jobs["42"].incident is None


def test_a_rank_that_went_is_absent_although_nothing_said_how_many_there_should_be() -> None:
    life = hung()
    life.discover(job(ranks=1))
    assert life.snapshot.jobs["42"].job.absent_local_ranks == ((1, 1),)
    assert life.state is JobState.HUNG


def test_a_gone_rank_counts_as_frozen() -> None:
    life = Life()
    life.discover(job())
    life.power(600, 60)
    life.power(110, 26)
    waiting, gone = grouping().groups[0], grouping(Motion.UNKNOWN, gone=True).groups[0]
    life.look(Grouping(groups=(waiting, replace(gone, key="gone", members=gone.members[1:]))))
    assert life.state is JobState.HUNG


def test_a_job_of_which_nothing_is_left_is_not_hung() -> None:
    life = Life()
    life.discover(job())
    life.power(600, 60)
    life.power(110, 26)
    life.look(grouping(Motion.UNKNOWN, gone=True))
    assert life.state is JobState.STALLED
    assert not life.snapshot.jobs["42"].page


def test_a_job_keeps_its_name_while_its_ranks_live() -> None:
    """A second job in the same allocation, or a killed launcher, changes what a scan would call it."""
    life = hung()
    renamed, other = replace(job(), job_id="42-p100"), job(pid=500, job_id="42-p500")
    life.discover(renamed, other)
    assert life.state is JobState.HUNG
    assert life.snapshot.jobs["42"].page
    assert life.snapshot.jobs["42-p500"].watch.state is JobState.STARTING
    life.discover(other)
    assert life.state is JobState.ENDED
    assert life.snapshot.jobs["42-p500"].watch.state is JobState.STARTING


def test_a_key_that_a_scan_gives_to_another_job_is_that_ones() -> None:
    """Who copies a job's variables and is older has its key only until the job itself is told by its GPUs."""
    life = Life()
    life.discover(job())
    life.power(600, 60)
    copied, real = replace(job(), job_id="42-p100", job_key="42-p100"), job(pid=500, job_id="42")
    life.discover(copied, real)
    assert {rank.id.pid for rank in life.snapshot.jobs["42"].job.ranks} == {rank.id.pid for rank in real.ranks}
    assert life.snapshot.jobs["42-p100"].job.ranks == copied.ranks


def test_an_open_incident_keeps_its_key_whatever_claim_somebody_makes() -> None:
    life = hung()
    mine, claimant = replace(job(), job_id="42-p100", job_key="42-p100"), job(pid=500, job_id="42")
    life.discover(mine, claimant)
    assert life.state is JobState.HUNG
    assert life.snapshot.jobs["42"].page
    assert {rank.id.pid for rank in life.snapshot.jobs["42"].job.ranks} == {rank.id.pid for rank in mine.ranks}
    assert len(life.snapshot.jobs) == 2


def test_a_capture_that_fails_as_a_whole_is_tried_again() -> None:
    life = Life()
    life.discover(job())
    life.power(600, 60)
    life.power(110, 26)
    life._take(progress.unjudged(life.snapshot, "42", now=life.now, unix_now=life.unix, settings=RULES))
    assert life.state is JobState.STALLED
    life.power(110, 40)
    assert life.captures == 2
    life.look(grouping())
    life.power(110, 80)
    life.look(grouping())
    assert life.state is JobState.HUNG


def test_moving_ranks_open_no_incident() -> None:
    life = Life()
    life.discover(job())
    life.power(600, 60)
    life.power(110, 26)
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
    assert len(captures) == progress.CAPTURES_KEPT
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


def test_ranks_that_wait_for_a_process_that_is_no_rank_are_not_judged_frozen() -> None:
    members = tuple(Member(id=RankId(node="n1", rank=i), motion=Motion.FROZEN) for i in range(2))
    elsewhere = Grouping(groups=(Group(key="k", activity="rpc_wait", members=members),))
    assert progress.motion_count(elsewhere).unknown == 2
    one_stuck = Group(key="l", activity="lock", members=(Member(id=RankId(rank=2), motion=Motion.FROZEN),))
    assert progress.motion_count(Grouping(groups=(*elsewhere.groups, one_stuck))).frozen == 3


def test_who_moves_is_said_as_everywhere() -> None:
    loading = Member(id=RankId(node="n1", rank=2, pid=7), motion=Motion.MOVING)
    seen = progress.motion_count(
        Grouping(
            groups=(
                *grouping(Motion.MOVING).groups,
                Group(key="l", activity="data_loading", members=(loading,)),
                Group(key="u", activity="unknown", members=(Member(id=RankId(rank=3), motion=Motion.FROZEN),)),
            )
        )
    )
    assert seen.who == "ranks 0-1 on n1 in collective wait; rank 2 on n1 (pid 7) in data loading"
    assert (seen.moving, seen.frozen) == (3, 1)
