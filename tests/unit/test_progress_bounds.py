"""The pure steps of the board at their limits: data of each job, retention times, counts, and saved parts."""

import pytest
from msgspec.structs import replace

from hangwatch.detector import TakeCapture
from hangwatch.detector.job_watch import MotionCount
from hangwatch.model import (
    Capture,
    CodeRegion,
    GpuSample,
    GpuSweep,
    Group,
    Grouping,
    JobState,
    KernelFacts,
    Member,
    Motion,
    ProcessId,
    Rank,
    RankId,
    SamplerStatus,
    Signature,
    TimelineEntry,
    Verdict,
)
from hangwatch.state import steps
from hangwatch.state.board import Snapshot
from hangwatch.state.restored_incidents import STARTED_AGAIN
from hangwatch.state.steps import SaveIncident
from hangwatch.verdict.diagnosis import Diagnosis
from tests.unit.test_progress import RULES, Life, at_work, grouping, hung, job, quiet, started_again


def sweep(*gpus: GpuSample) -> GpuSweep:
    return GpuSweep(taken_monotonic_seconds=1.0, taken_unix_seconds=2.0, gpus=gpus)


def gpu(index: int, watts: float) -> GpuSample:
    return GpuSample(index=index, uuid=f"GPU-{index}", power_watts=watts, power_limit_watts=700)


def look(number: int, seen: Grouping, key: str = "42") -> Diagnosis:
    capture = Capture(
        job_id="42", job_key=key, node="n1", started_unix_seconds=number, duration_seconds=1, rounds=3, ranks=()
    )
    verdict = Verdict(kind="AllWaiting", message=f"look {number}")
    return Diagnosis(capture=capture, grouping=seen, verdict=verdict, judged_unix_seconds=number)


# --- a sample --------------------------------------------------------------------------------------------------------


def test_sample_is_stored_and_learns_idle_level_of_free_gpus() -> None:
    life = Life()
    life.discover(job())
    taken, status = sweep(gpu(0, 90.0), gpu(5, 70.0)), SamplerStatus(alive=False)
    shown, _ = steps.record_sample(life.snapshot, taken, status, now=1001.0, settings=RULES, gap_seconds=10)
    assert (shown.sweep, shown.sampler, shown.idle_watts) == (taken, status, {"GPU-5": 70.0})
    life.discover()
    life.discover()
    later, _ = steps.record_sample(life.snapshot, taken, status, now=1002.0, settings=RULES, gap_seconds=10)
    assert set(later.idle_watts) == {"GPU-0", "GPU-5"}, "a job that ended holds none"


def test_learned_idle_level_is_the_floor_of_low_power() -> None:
    """At 250 W a GPU that idles at 170 W has low power. A GPU that idles at 60 W may be at work."""
    states = {}
    for idle in (60.0, 170.0):
        life = Life()
        life.power(idle, 30)
        life.discover(job())
        life.power(500, 60)
        life.power(250, 30)
        states[idle] = life.state
    assert states == {60.0: JobState.TRAINING, 170.0: JobState.SUSPECTED}


def test_a_gpu_that_no_sample_speaks_of_is_no_reason_to_fail() -> None:
    life = hung()
    shown, _ = steps.record_sample(
        life.snapshot, sweep(gpu(1, 110.0)), SamplerStatus(alive=True), now=life.now + 1, settings=RULES, gap_seconds=10
    )
    assert shown.jobs["42"].watch.state is JobState.HUNG


def test_seconds_without_samples_are_no_silence() -> None:
    life = at_work()
    life.power(110, 1)
    life.now += 100
    life.power(110, 5)
    assert life.captures == 0
    life.power(110, 30)
    assert life.captures == 1


def test_a_stalled_job_pages_by_a_sample_once_its_hold_is_over() -> None:
    life = quiet()
    one_moves = replace(
        grouping().groups[0],
        members=(
            Member(id=RankId(node="n1", rank=0), motion=Motion.FROZEN),
            Member(id=RankId(node="n1", rank=1), motion=Motion.MOVING),
        ),
    )
    life.look(Grouping(groups=(one_moves,)))
    assert (life.state, life.entry.page) == (JobState.STALLED, False)
    life.power(110, int(RULES.stalled_hold_seconds))
    assert (life.state, life.entry.page) == (JobState.STALLED, True)


# --- a scan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("started", "ticks_per_second", "began"),
    [((900, 300), (100.0,), 3.0), ((900, 300), (1000.0,), 0.3), ((500,), (), 5.0), ((), (), 0.0)],
    ids=["100 ticks a second", "1000 ticks a second", "100 if nothing else is said", "no rank here: the machine"],
)
def test_a_job_began_with_its_first_rank(
    started: tuple[int, ...], ticks_per_second: tuple[float, ...], began: float
) -> None:
    ranks = tuple(Rank(id=ProcessId(pid=ticks, start_ticks=ticks), rank=None, local_rank=None) for ticks in started)
    found, _ = steps.record_scan(Snapshot(), [replace(job(), ranks=ranks)], 1000.0, 2e9, *ticks_per_second)
    assert found.jobs["42"].watch.identity.began == began


def test_job_that_once_held_a_gpu_keeps_this_fact() -> None:
    for seen, before, later in ((True, True, False), (True, False, True), (False, False, False)):
        life = Life()
        for holds_gpu in (before, later):
            life.discover(replace(job(), holds_gpu=holds_gpu))
        assert life.entry.held_gpu is seen


def test_a_job_that_ended_is_shown_for_two_minutes_with_the_reason() -> None:
    life = hung()
    life.discover()
    entry = life.entry
    assert (entry.watch.message, entry.page) == ("all its ranks on this node have ended", False)
    line = TimelineEntry(unix_seconds=life.unix, state=JobState.ENDED, message=entry.watch.message)
    assert entry.timeline[-1] == line
    last = life.saved[-1]
    assert (last.state, last.closed_unix_seconds, last.timeline[-1]) == (JobState.ENDED, life.unix, line)
    life.now += 120
    life.discover()
    assert "42" in life.snapshot.jobs
    life.now += 1
    life.discover()
    assert life.snapshot.jobs == {}
    assert life.saved[-1] == last, "it has ended once"


def test_of_each_share_the_last_64_that_ended_are_shown() -> None:
    life = Life()
    mine = [replace(job(pid=1000 + 10 * number, job_id=f"a{number}"), share="uid 1") for number in range(66)]
    other = replace(job(pid=9000, job_id="b"), share="uid 2")
    for one in (other, *mine):
        life.discover(one)
        life.now += 0.5
    life.discover()
    assert set(life.snapshot.jobs) == {"b", *(f"a{number}" for number in range(2, 66))}


def test_jobs_that_live_are_shown_however_many_they_are() -> None:
    life = Life()
    life.discover(*(replace(job(pid=1000 + 10 * number, job_id=f"a{number}"), share="uid 1") for number in range(70)))
    assert len(life.snapshot.jobs) == 70


def test_only_local_ranks_that_are_known_can_be_missed() -> None:
    life = Life()
    nameless = Rank(id=ProcessId(pid=7, start_ticks=100), rank=None, local_rank=None)
    life.discover(replace(job(ranks=3), ranks=(*job(ranks=3).ranks, nameless)))
    life.discover(replace(job(ranks=1), ranks=(*job(ranks=1).ranks, nameless)))
    assert life.entry.job.absent_local_ranks == ((1, 2),)
    life.discover(replace(job(ranks=2), ranks=(*job(ranks=2).ranks, nameless)))
    assert life.entry.job.absent_local_ranks == ((2, 2),)


# --- a capture -------------------------------------------------------------------------------------------------------


def count(frozen: int = 0, moving: int = 0, unknown: int = 0, gone: bool = False) -> Grouping:
    motions = [Motion.FROZEN] * frozen + [Motion.MOVING] * moving + [Motion.UNKNOWN] * unknown
    members = tuple(Member(id=RankId(node="n1", rank=i), motion=motion) for i, motion in enumerate(motions))
    return Grouping(groups=(Group(key="k", activity="lock", members=members, gone=gone),) if members else ())


@pytest.mark.parametrize(
    ("seen", "result"),
    [
        (count(), "empty"),
        (count(frozen=2), "frozen"),
        (count(frozen=1, moving=1), "moving"),
        (count(moving=2), "moving"),
        (count(frozen=1, unknown=1), "unjudged"),
        (count(unknown=2), "unjudged"),
        (count(unknown=1, moving=1), "moving"),
    ],
)
def test_captures_are_counted_by_what_they_showed(seen: Grouping, result: str) -> None:
    life = quiet()
    life.look(seen)
    assert life.snapshot.captures == {result: 1}


def test_a_capture_in_which_all_are_stopped_counts_as_a_rest() -> None:
    stopped = tuple(
        Member(id=RankId(node="n1", rank=rank), kernel=KernelFacts(state="T"), signature=Signature.STOPPED)
        for rank in range(2)
    )
    rests = Grouping(groups=(Group(key="k", activity="lock", members=stopped),))
    assert steps.count_motion(rests).resting is JobState.SUSPENDED
    assert steps.count_motion(count(frozen=2)).resting is None


def test_light_capture_with_all_ranks_frozen_begins_suspicion() -> None:
    life = at_work()
    life.power(430, 30)
    shown, actions = life.captured(look(1, count(frozen=2)), result="low_power")
    assert shown.captures == {"frozen": 1}
    entry = shown.jobs["42"]
    assert (entry.watch.state, entry.incident) == (JobState.SUSPECTED, None)
    assert (entry.timeline[-1].state, entry.timeline[-1].unix_seconds) == (JobState.SUSPECTED, life.unix)
    assert any(isinstance(action, TakeCapture) for action in actions)


@pytest.mark.parametrize("result", ["state", "low_power", "gap"])
def test_capture_of_an_unknown_job_changes_nothing(result: str) -> None:
    life = quiet()
    assert life.captured(look(1, count(frozen=2)), "nobody", result=result) == (life.snapshot, ())
    assert life.captured(None, "nobody", result=result) == (life.snapshot, ())


def test_failed_capture_is_counted_and_does_not_page() -> None:
    life = quiet()
    shown, _ = life.captured(None)
    assert shown.captures == {"failed": 1}
    entry = shown.jobs["42"]
    assert (entry.watch.capture_record.capturing, entry.page, entry.incident) == (False, False, None)
    assert (entry.timeline[-1].state, entry.timeline[-1].unix_seconds) == (JobState.STALLED, life.unix)
    assert entry.watch.message == "progress of 2 of 2 ranks is unknown"


@pytest.mark.parametrize("result", ["low_power", "gap"])
def test_failed_light_capture_is_counted_and_leaves_the_state(result: str) -> None:
    life = at_work()
    shown, actions = life.captured(None, result=result)
    assert (shown.captures, shown.jobs["42"].watch.state, actions) == ({"failed": 1}, JobState.TRAINING, ())


def test_a_capture_that_failed_of_a_job_without_ranks_judges_it_as_little() -> None:
    life = quiet()
    entry = life.entry
    life.snapshot = life.snapshot.with_job(replace(entry, job=replace(entry.job, ranks=())))
    shown, _ = life.captured(None)
    watch = shown.jobs["42"].watch
    assert (watch.state, watch.message) == (JobState.STALLED, "progress of 1 of 1 ranks is unknown")


def test_motion_of_no_rank_is_empty_and_that_of_a_rank_has_its_lines() -> None:
    assert steps.count_motion(Grouping(groups=())) == MotionCount(frozen=0, moving=0, unknown=0)
    stay = CodeRegion(within="train", places=("train.py:4",))
    still = count(frozen=1).change_members(lambda _, one: replace(one, stack=replace(one.stack, stay=stay)))
    assert list(steps.count_motion(still).stays.values()) == [stay]


def test_each_look_is_saved_once_and_says_what_is_known_by_now() -> None:
    life = hung()
    (opened,) = (incident for incident in life.saved if incident.captures)
    for number in range(1, 6):
        grown = replace(job(), command=f"command {number}")
        life.discover(grown)
        before = len(life.saved)
        life._take(life.captured(look(number, count(frozen=number))))
        (saved,) = life.saved[before:]
        assert saved == life.entry.incident
        assert saved.incident_id == opened.incident_id
        assert saved.state is JobState.HUNG
        assert saved.job.command == f"command {number}"
        assert (saved.verdict.message, saved.grouping) == (f"look {number}", count(frozen=number))
    kept = [capture.started_unix_seconds for capture in life.saved[-1].captures]
    assert kept == [opened.captures[0].started_unix_seconds, 3, 4, 5]


def test_a_look_that_makes_a_stalled_job_hung_is_saved_once_with_its_new_state() -> None:
    life = quiet()
    life.look(count(frozen=1, unknown=1))
    assert life.state is JobState.STALLED
    for _ in range(2):
        life.power(110, 80)
        before = len(life.saved)
        life.look(count(frozen=2))
    (saved,) = life.saved[before:]
    assert (saved.state, saved.timeline[-1].state, len(saved.captures)) == (JobState.HUNG, JobState.HUNG, 3)
    assert life.entry.page


def test_an_incident_stays_on_the_board_until_the_job_is_back_at_work() -> None:
    life = hung()
    life.power(600, 10)
    assert life.state is JobState.RECOVERED
    closed = life.entry.incident
    assert closed is not None and closed.closed_unix_seconds is not None
    life.discover()
    assert life.entry.incident == closed, "it was closed when it recovered, not when the job ended"
    assert closed.closed_unix_seconds < life.unix + 1


def test_of_a_job_that_goes_up_and_down_the_last_sixty_lines_are_shown() -> None:
    life = at_work()
    for _ in range(40):
        life.power(110, 10)
        life.power(600, 10)
    timeline = life.entry.timeline
    assert len(timeline) == 60
    assert timeline[-1].unix_seconds > life.unix - 25
    assert [line.unix_seconds for line in timeline] == sorted(line.unix_seconds for line in timeline)


# --- a start of the daemon -------------------------------------------------------------------------------------------


def test_what_was_closed_meanwhile_is_saved_without_power_and_with_its_end() -> None:
    """Save the incident without its power curve: the restarted daemon has only later power samples."""
    left = hung().saved[-1]
    life = Life(left.opened_unix_seconds - 1e9 + 30)
    shown, (action,) = steps.restore_incidents(
        life.snapshot, [left], frozenset(), now=life.now, unix_now=life.unix, settings=RULES
    )
    assert shown.jobs == {}
    assert isinstance(action, SaveIncident)
    assert (action.is_watched, action.incident.state) == (False, JobState.ENDED)
    assert action.incident.closed_unix_seconds == life.unix
    assert action.incident.timeline[:-1] == left.timeline
    assert action.incident.timeline[-1].unix_seconds == life.unix


def test_what_goes_on_is_saved_with_the_power_that_its_job_draws() -> None:
    left = hung().saved[-1]
    life = Life(left.opened_unix_seconds - 1e9 + 30)
    life.discover(job())
    living = frozenset(rank.id for rank in job().ranks)
    shown, actions = steps.restore_incidents(
        life.snapshot, [left], living, now=life.now, unix_now=life.unix, settings=RULES
    )
    (saved,) = (action for action in actions if isinstance(action, SaveIncident))
    assert saved.is_watched
    assert saved.incident.timeline[-1].unix_seconds == life.unix
    assert saved.incident == shown.jobs["42"].incident
    assert shown.jobs["42"].watch.message == saved.incident.timeline[-1].message
    assert shown.jobs["42"].timeline == saved.incident.timeline


def test_a_job_that_was_back_at_work_when_its_incident_was_read_goes_on_without_it() -> None:
    left = hung().saved[-1]
    life = Life(left.opened_unix_seconds - 1e9 + 30)
    life.discover(job())
    life.power(600, 60)
    assert life.state is JobState.TRAINING
    life.resume(left, living=job())
    assert (life.state, life.entry.incident) == (JobState.TRAINING, None)
    assert (
        life.saved[-1].timeline[-1].message == "the job was working when hangwatch read this incident after its restart"
    )


@pytest.mark.parametrize(("ranks", "absent"), [(2, ()), (1, ((1, 1),)), (3, ())])
def test_ranks_that_only_came_or_only_went_are_the_same_job(ranks: int, absent: tuple[tuple[int, int], ...]) -> None:
    life = started_again(hung().saved[-1], job(ranks=ranks))
    assert (life.state, life.entry.job.absent_local_ranks) == (JobState.HUNG, absent)


def test_a_line_about_the_start_is_kept_where_something_happened_since() -> None:
    life = started_again(hung().saved[-1], job())
    first = life.saved[-1]
    life.power(110, 1)
    life.look(count(frozen=1, moving=1))
    messages = [line.message for line in started_again(life.saved[-1], job()).saved[-1].timeline]
    kept = 1 + (life.saved[-1].timeline[-1].message != first.timeline[-1].message)
    assert messages.count(STARTED_AGAIN) == kept


def test_resumed_job_keeps_name_and_key_of_its_incident() -> None:
    left = hung().saved[-1]
    life = started_again(left, replace(job(), job_id="42-p100", job_key="other"))
    (entry,) = life.snapshot.jobs.values()
    assert (entry.job.job_id, entry.job.job_key) == ("42", "42")
    assert (entry.watch.identity.name.job_id, entry.watch.identity.name.job_key) == ("42", "42")


# --- identity of a watch ---------------------------------------------------------------------------------------------


def test_key_of_a_job_does_not_move_during_a_capture() -> None:
    """Keep the key during a capture, because the result of the capture goes to the job with this key."""
    life = quiet()
    assert life.entry.incident is None
    life.discover(replace(job(), job_id="42-p100", job_key="42-p100"), replace(job(pid=500), holds_gpu=True))
    assert life.entry.job.ranks == job().ranks
    life.look(grouping())
    assert life.state is JobState.HUNG


def test_of_two_watches_that_become_one_the_one_that_is_looked_at_goes_on() -> None:
    life = quiet()
    other = replace(job(pid=50, ranks=1), job_id="42-p50", job_key="42-p50")
    life.discover(job(), other)
    life.discover(replace(job(), ranks=(*other.ranks, *job().ranks)))
    assert (life.state, life.entry.watch.capture_record.capturing) == (JobState.SUSPECTED, True)


def test_of_two_watches_that_are_alike_the_one_of_the_key_goes_on_and_then_the_older() -> None:
    life = Life()
    other = replace(job(pid=500, ranks=1), job_id="42-p500", job_key="42-p500")
    life.discover(other)
    life.now += 10
    life.discover(job(), other)
    life.discover(replace(job(), ranks=(*other.ranks, *job().ranks)))
    assert life.entry.watch.since == 1010.0


def test_where_a_job_falls_apart_the_part_with_most_of_its_ranks_goes_on() -> None:
    life, whole = Life(), job(ranks=3)
    life.discover(whole)
    life.power(600, 60)
    few, most = (replace(whole, job_id=key, job_key=key, ranks=ranks) for key, ranks in
                 (("few", whole.ranks[:1]), ("most", whole.ranks[1:])))  # fmt: skip
    life.discover(few, most)
    states = {entry.job.ranks: entry.watch.state for entry in life.snapshot.jobs.values()}
    assert states == {few.ranks: JobState.STARTING, most.ranks: JobState.TRAINING}
