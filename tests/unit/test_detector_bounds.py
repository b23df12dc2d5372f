"""The detector at its limits: exact seconds, numbers of GPUs and ranks, and its texts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hangwatch import detector
from hangwatch.config import Detector
from hangwatch.detector import TakeCapture, Transition, job_watch
from hangwatch.detector.job_watch import MotionCount
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.progress_gaps import ProgressRecord
from hangwatch.model import Job, JobName, JobState, ProcessId, Rank, RankId
from tests.unit.test_detector import Series

RULES = Detector(
    confirming_captures=1,
    hold_seconds=60,
    startup_hold_seconds=500,
    cooldown_seconds=200,
    recover_seconds=10,
    stalled_hold_seconds=300,
    startup_stalled_hold_seconds=400,
    recapture_seconds=100,
    recapture_max_seconds=350,
    quorum=0.5,
)
WORK, HANG = 600.0, 120.0


def job(*pids: int, job_id: str = "42", job_key: str = "key") -> Job:
    ranks = tuple(Rank(id=ProcessId(pid=pid, start_ticks=1), rank=None, local_rank=None) for pid in pids)
    return Job(job_id=job_id, job_key=job_key, launcher="plain", launcher_id=None, ranks=ranks)


def went(before: JobState, state: JobState, message: str) -> Transition:
    return Transition(job=job().name, before=before, state=state, message=message)


def begin(rules: Detector = RULES) -> Series:
    """Return a job of four GPUs that is found at time 0."""
    series = Series(4, rules=rules, now=0.0)
    series.watch = job_watch.begin_watch(job(1, 2), series.now)
    return series


def worked(rules: Detector = RULES) -> Series:
    played = begin(rules).feed(WORK, 100)
    played.take()
    return played


def suspected(rules: Detector = RULES) -> Series:
    played = worked(rules)
    while played.watch.state is not JobState.SUSPECTED:
        played.feed(HANG, 1)
        assert played.now < 100 + 2 * rules.hold_seconds
    played.take()
    return played


# --- from work to a suspicion ----------------------------------------------------------------------------------------


def test_the_way_from_the_start_to_a_suspicion_in_words() -> None:
    played = begin()
    assert (played.watch.state, played.watch.message) == (JobState.STARTING, "waiting for the first sign of work")
    played.feed(WORK, 1)
    assert played.take() == [went(JobState.STARTING, JobState.TRAINING, "the GPUs are working")]
    played.feed(WORK, 99).feed(HANG, 3)
    assert played.take() == [went(JobState.TRAINING, JobState.QUIET, "4 of 4 GPUs are quiet")]
    fell = played.now
    played.feed(HANG, 59)
    assert (played.take(), job_watch.quiet_seconds(played.watch, played.now)) == ([], 59.0)
    played.feed(HANG, 1)
    assert played.take() == [
        went(JobState.QUIET, JobState.SUSPECTED, "quiet for 60 s"),
        TakeCapture(job_key="key", reason="quiet for 60 s"),
    ]
    assert played.watch.quiet_since == fell
    assert played.watch.capture_record.capturing is True
    assert played.watch.suspicion.fell is True


@pytest.mark.parametrize(("collectives", "since"), [(0, 0.0), (3, 40.0)])
def test_hang_before_any_work_begins_with_the_last_collective(collectives: int, since: float) -> None:
    played = begin()
    played.watch = replace(played.watch, progress=ProgressRecord(progressed_at=40.0, advances=collectives))
    while played.watch.state is JobState.STARTING:
        played.feed(HANG, 1)
    assert (played.watch.state, played.watch.quiet_since) == (JobState.SUSPECTED, since)


@pytest.mark.parametrize(("low", "is_quiet"), [(1, False), (2, True), (3, True)])
def test_half_of_the_gpus_are_enough(low: int, is_quiet: bool) -> None:
    played = worked().feed([*[HANG] * low, *[WORK] * (4 - low)], 5)
    assert (played.watch.state is JobState.QUIET) == is_quiet
    if is_quiet:
        assert played.watch.message == f"{low} of 4 GPUs are quiet"
        assert played.watch.silence.gpus == {f"GPU-{i}" for i in range(low)}


def test_gpus_that_take_turns_are_never_quiet_for_long() -> None:
    played = worked()
    for _ in range(10):
        played.feed([HANG, HANG, WORK, WORK], 30).feed([WORK, WORK, HANG, HANG], 30)
    assert not any(isinstance(action, TakeCapture) for action in played.take())
    played.feed([WORK, WORK, HANG, HANG], 62)
    assert played.watch.state is JobState.SUSPECTED, "until two of them stay so"


def test_what_was_quiet_all_the_time_counts_and_what_joined_later_does_not() -> None:
    played = worked().feed([HANG, HANG, WORK, WORK], 33).feed(HANG, 10)
    assert played.watch.silence.gpus == {"GPU-0", "GPU-1"}
    played.feed([WORK, HANG, HANG, HANG], 10)
    assert played.watch.silence.gpus == {"GPU-1", "GPU-2", "GPU-3"}
    assert job_watch.quiet_seconds(played.watch, played.now) < 10, "counted anew"


def test_power_that_is_back_before_the_hold_ends_the_silence() -> None:
    played = worked().feed(HANG, 30)
    played.take()
    played.feed(WORK, 3)
    assert played.take() == [went(JobState.QUIET, JobState.TRAINING, "power is back")]
    assert job_watch.quiet_seconds(played.watch, played.now) == 0.0


def test_without_any_reading_a_silence_is_none_and_a_hang_stays_one() -> None:
    played = worked().feed(HANG, 30)
    played.take()
    played.feed(None, 1)
    assert played.take() == [went(JobState.QUIET, JobState.TRAINING, "no GPU of the job can be read")]
    hung = suspected().captured(frozen=2)
    hung.take()
    hung.feed(None, 300)
    assert (hung.take(), hung.watch.state) == ([], JobState.HUNG)


@pytest.mark.parametrize(("gap", "counts"), [(10, True), (11, False)])
def test_ten_seconds_without_a_sample_count_as_quiet_and_eleven_do_not(gap: int, counts: bool) -> None:
    played = worked().feed(HANG, 13)
    before = job_watch.quiet_seconds(played.watch, played.now)
    played.feed(HANG, gap, gap)
    assert job_watch.quiet_seconds(played.watch, played.now) == before + (gap if counts else 0)


def test_a_gap_at_the_start_is_no_start_up_time() -> None:
    played = begin().feed(90.0, 10)
    played.feed(90.0, 600, 600).feed(90.0, 480)
    assert played.watch.state is JobState.STARTING
    played.feed(90.0, 10)
    assert played.take()[-2] == went(JobState.STARTING, JobState.SUSPECTED, "not busy, 500 s after its start")


def test_the_gap_that_is_allowed_may_be_given() -> None:
    played = worked().feed(HANG, 13)
    played.feed(HANG, 30, 30, gap_seconds=30)
    assert job_watch.quiet_seconds(played.watch, played.now) == 40


# --- at the start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found_at", "started", "suspected_at"), [(0.0, None, 500), (0.0, -1000.0, 60), (0.0, -470.0, 60), (0.0, -430.0, 70), (0.0, 900.0, 500)]
)  # fmt: skip
def test_job_found_late_gets_the_ordinary_hold(found_at: float, started: float | None, suspected_at: int) -> None:
    played = begin()
    played.watch = job_watch.begin_watch(job(1), found_at, started)
    played.feed(90.0, suspected_at - 1)
    assert played.watch.state is JobState.STARTING
    played.feed(90.0, 1)
    assert played.watch.state is JobState.SUSPECTED
    *lights, move, capture = played.take()
    assert all(isinstance(light, TakeCapture) and light.is_light for light in lights)
    assert isinstance(move, Transition)
    assert move.message == f"not busy, {suspected_at - min(0.0, started or 0.0):.0f} s after its start"
    assert capture == TakeCapture(job_key="key", reason=move.message)
    assert (played.watch.quiet_since, played.watch.suspicion.fell) == (min(0.0, started or 0.0), False)


FROZEN = {"frozen": 2}
MOVES = {"frozen": 1, "moving": 1}


@pytest.mark.parametrize(
    ("seen", "asked_at", "suspected_at"),
    [
        ([FROZEN, FROZEN], [60, 120], 150),
        ([MOVES, FROZEN, FROZEN], [60, 180, 240], 241),
        ([FROZEN, MOVES, FROZEN], [60, 120, 240, 300], 500),
        ([MOVES, MOVES, MOVES], [60, 180, 420], 500),
        ([{"frozen": 1, "unknown": 1}], [60, 180], 500),
        ([FROZEN, {**FROZEN, "serves": True}], [60, 120, 240], 500),
        ([FROZEN, {**FROZEN, "resting": JobState.SUSPENDED}], [60, 120, 240], 500),
        ([FROZEN, {"frozen": 3, "absent": 1}], [60, 120, 240], 500),
    ],
)
def test_start_is_suspected_early_if_two_light_captures_in_a_row_find_it_frozen(
    seen: list[dict[str, object]], asked_at: list[int], suspected_at: int
) -> None:
    played, asked = begin(), []
    for second in range(1, suspected_at + 1):
        played.feed(90.0, 1)
        assert (played.watch.state is JobState.SUSPECTED) == (second == suspected_at)
        for capture in (action for action in played.take() if isinstance(action, TakeCapture) and action.is_light):
            assert capture.reason == f"it is not busy, {second} s after its start"
            asked.append(second)
            if len(asked) <= len(seen):
                found = MotionCount(**{"moving": 0, **seen[len(asked) - 1]})  # type: ignore[arg-type]
                played._take(*detector.apply_light_capture(played.watch, found, played.now, played.rules))
    assert asked == asked_at
    assert not played.pages


def test_ranks_in_a_rendezvous_with_other_nodes_page_after_their_own_hold() -> None:
    rules = replace(RULES, startup_no_ranks_hold_seconds=540)
    played, other = (begin(rules).feed(90.0, 500) for _ in range(2))
    played.captured(frozen=2, waits_elsewhere=True, is_in_rendezvous=True).feed(90.0, 39)
    assert (played.watch.state, played.pages) == (JobState.WAITS_ELSEWHERE, False)
    assert played.feed(90.0, 1).pages
    other.captured(frozen=2, waits_elsewhere=True).feed(90.0, 100)
    assert (other.watch.state, other.pages) == (JobState.WAITS_ELSEWHERE, False), "in its first collective"


@pytest.mark.parametrize(("busy", "works"), [(1, False), (2, True)])
def test_half_of_the_gpus_at_work_are_work(busy: int, works: bool) -> None:
    played = begin().feed([*[WORK] * busy, *[90.0] * (4 - busy)], 1)
    assert (played.watch.state is JobState.TRAINING, played.watch.power.was_busy) == (works, works)


@pytest.mark.parametrize(("was_busy", "hold"), [(True, 300), (False, 400)])
def test_a_job_that_never_worked_pages_after_a_hold_of_its_own(was_busy: bool, hold: int) -> None:
    played = suspected() if was_busy else begin().feed(90.0, 500)
    played.captured(frozen=1, unknown=1)
    watts = HANG if was_busy else 90.0
    assert played.watch.state is JobState.STALLED
    played.feed(watts, hold - 1)
    assert not played.pages
    played.feed(watts, 1)
    assert played.pages


# --- results of a capture --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "state", "message"),
    [
        ({"frozen": 8}, JobState.HUNG, "none of the 8 ranks progresses"),
        ({"frozen": 7, "moving": 1}, JobState.STALLED, "1 of 8 ranks progresses"),
        ({"frozen": 6, "moving": 2}, JobState.STALLED, "2 of 8 ranks progress"),
        (
            {"frozen": 6, "moving": 2, "movers_text": "ranks 0-1 in data loading"},
            JobState.STALLED,
            "2 of 8 ranks progress: ranks 0-1 in data loading",
        ),
        ({"frozen": 7, "unknown": 1}, JobState.STALLED, "progress of 1 of 8 ranks is unknown"),
        ({"frozen": 4, "moving": 4}, JobState.STALLED, "4 of 8 ranks progress"),
        ({}, JobState.STALLED, "progress of 0 of 0 ranks is unknown"),
        ({"frozen": 3, "moving": 5}, JobState.TRAINING, "5 of 8 ranks progress: the present power of the job is work"),
    ],
)
def test_what_a_capture_showed_in_words(seen: dict[str, object], state: JobState, message: str) -> None:
    played = suspected().captured(**seen)  # type: ignore[arg-type]
    assert played.take() == [went(JobState.SUSPECTED, state, message)]
    assert (played.watch.state, played.watch.message, played.watch.capture_record.capturing) == (state, message, False)
    assert played.pages == (state is JobState.HUNG)


def test_late_capture_of_a_training_job_decides_nothing() -> None:
    played = worked().captured(frozen=8)
    assert played.take() == []
    assert played.watch.state is JobState.TRAINING
    assert played.watch.capture_record.captured_at == played.now


def test_stalled_job_with_a_new_message_stays_stalled_and_pages() -> None:
    played = suspected().captured(frozen=7, moving=1)
    since = played.watch.open_incident.stalled_since
    played.feed(HANG, 200).take()
    played.captured(frozen=6, moving=2)
    assert played.take() == []
    assert played.watch.message == "2 of 8 ranks progress"
    assert played.watch.open_incident.stalled_since == since
    played.feed(HANG, 100)
    assert played.pages


def test_a_hung_job_in_which_something_moves_once_is_stalled_since_it_was_hung() -> None:
    played = suspected().captured(frozen=8)
    hung = played.now
    played.feed(HANG, 200).take()
    played.captured(frozen=7, moving=1)
    assert played.take() == [went(JobState.HUNG, JobState.STALLED, "1 of 8 ranks progresses")]
    assert (played.watch.open_incident.stalled_since, played.pages) == (hung, False)
    played.feed(HANG, 100)
    assert played.pages


def test_a_stalled_job_is_hung_after_two_frozen_looks_in_a_row() -> None:
    played = suspected().captured(frozen=7, moving=1)
    for seen in ({"frozen": 8}, {"frozen": 7, "unknown": 1}, {"frozen": 8}):
        played.feed(HANG, 100).captured(**seen)
        assert played.watch.state is JobState.STALLED
    played.feed(HANG, 100).take()
    played.captured(frozen=8)
    assert played.take() == [went(JobState.STALLED, JobState.HUNG, "none of the 8 ranks progresses")]
    assert played.watch.open_incident.stalled_since is None


def test_most_moving_ends_an_incident_with_the_reason() -> None:
    played = suspected().captured(frozen=8).feed(HANG, 100)
    played.take()
    played.captured(frozen=3, moving=5)
    message = "5 of 8 ranks progress: the present power of the job is work"
    assert played.take() == [went(JobState.HUNG, JobState.RECOVERED, message)]


def test_looks_at_an_open_incident_come_ever_less_up_to_a_bound() -> None:
    played, pauses = suspected().captured(frozen=8), []
    played.take()
    for _ in range(4):
        before = played.now
        while not (asked := played.take()):
            played.feed(HANG, 1)
        assert asked == [TakeCapture(job_key="key", reason="still hung")]
        assert (played.watch.capture_record.capturing, played.watch.open_incident.capture_wanted_at) == (True, None)
        played.feed(HANG, 50)
        assert played.take() == [], "one at a time"
        pauses.append(played.now - 50 - before)
        played.captured(frozen=8)
    assert pauses == [100, 200, 350, 350]
    stalled = suspected().captured(frozen=7, moving=1).feed(HANG, 100)
    assert stalled.take()[-1] == TakeCapture(job_key="key", reason="still stalled")


def test_a_capture_that_is_lost_stalls_the_job_after_five_minutes() -> None:
    played = suspected().feed(HANG, 299)
    assert played.take() == []
    played.feed(HANG, 1)
    message = "its stacks could not be taken within 300 s"
    assert played.take() == [went(JobState.SUSPECTED, JobState.STALLED, message)]
    assert (played.watch.capture_record.capturing, played.pages) == (False, False)
    played.feed(HANG, 400)
    assert not played.pages, "no stack was ever seen"
    assert played.take() == [TakeCapture(job_key="key", reason="still stalled")]


@pytest.mark.parametrize(
    ("seen", "pages"), [({"unknown": 8}, False), ({"unknown": 8, "with_stack": 1}, True), ({"frozen": 1, "unknown": 7}, True), ({"moving": 1, "unknown": 7}, True)]
)  # fmt: skip
def test_one_stack_is_enough_to_page_and_none_is_not(seen: dict[str, int], pages: bool) -> None:
    played = suspected().captured(**seen).feed(HANG, 300)
    assert (played.watch.state, played.pages) == (JobState.STALLED, pages)


def test_stacks_that_were_seen_once_were_seen_and_a_new_suspicion_sees_anew() -> None:
    played = suspected().captured(frozen=1, unknown=7).feed(HANG, 100).captured(unknown=8)
    assert played.watch.suspicion.saw_stacks
    played.feed(WORK, 100).feed(HANG, 300)
    assert played.watch.state is JobState.SUSPECTED
    assert played.watch.suspicion.saw_stacks is False
    assert played.watch.suspicion.frozen_captures == 0


# --- and back --------------------------------------------------------------------------------------------------------


def test_power_must_be_back_for_a_while_and_then_it_is_shown_for_a_minute() -> None:
    played = suspected().captured(frozen=8)
    played.take()
    played.feed(WORK, 12)  # three of five samples must be high
    assert (played.take(), played.pages) == ([], True)
    played.feed(WORK, 1)
    assert played.take() == [went(JobState.HUNG, JobState.RECOVERED, "power is back")]
    assert not played.pages
    played.feed(WORK, 59)
    assert played.take() == []
    played.feed(WORK, 1)
    assert played.take() == [went(JobState.RECOVERED, JobState.TRAINING, "the GPUs are working")]


def test_power_that_comes_and_goes_is_not_back() -> None:
    played = suspected().captured(frozen=8)
    played.take()
    for _ in range(5):
        played.feed(WORK, 10).feed(HANG, 10)
    assert (played.watch.state, played.watch.open_incident.back_since) == (JobState.HUNG, None)


def test_job_with_restored_power_is_not_captured() -> None:
    played = suspected().captured(frozen=8).feed(HANG, 97)
    played.take()
    played.feed(WORK, 8)
    assert played.take() == []
    played.feed(HANG, 5)
    assert played.take() == [TakeCapture(job_key="key", reason="still hung")]


@pytest.mark.parametrize(("back", "is_back"), [(2, False), (3, True)])
def test_more_than_half_must_be_back(back: int, is_back: bool) -> None:
    played = suspected().captured(frozen=8).feed([*[WORK] * back, *[HANG] * (4 - back)], 20)
    assert (played.watch.state is JobState.RECOVERED) == is_back


def test_power_that_comes_back_during_the_capture_ends_the_suspicion() -> None:
    played = suspected().feed(WORK, 3)
    assert played.take() == [went(JobState.SUSPECTED, JobState.TRAINING, "power is back")]


def test_recovered_job_with_low_power_is_quiet() -> None:
    played = suspected().captured(frozen=8).feed(WORK, 13)
    played.take()
    played.feed(HANG, 3)
    assert played.take() == [went(JobState.RECOVERED, JobState.QUIET, "4 of 4 GPUs are quiet")]


def test_after_a_capture_a_job_is_left_to_rest() -> None:
    played = suspected(replace(RULES, cooldown_seconds=500))
    played.captured(frozen=8)
    looked = played.now
    played.feed(WORK, 80).take()
    while not any(isinstance(action, TakeCapture) for action in played.take()):
        played.feed(HANG, 1)
    assert played.now == looked + 500


def test_a_job_that_never_rose_is_back_once_it_draws_what_only_work_draws() -> None:
    played = begin().feed(90.0, 500).captured(frozen=2)
    assert played.watch.state is JobState.HUNG
    played.feed(200.0, 30)
    assert played.watch.state is JobState.HUNG
    played.feed(WORK, 13)
    assert played.watch.state is JobState.RECOVERED


# --- identity of a job -----------------------------------------------------------------------------------------------


def test_an_end_is_told_once_and_nothing_follows_it() -> None:
    played = suspected().captured(frozen=8)
    watch, actions = detector.end_watch(played.watch, "it is over", played.now)
    assert actions == (went(JobState.HUNG, JobState.ENDED, "it is over"),)
    assert (watch.since, watch.is_open, watch.message) == (played.now, False, "it is over")
    assert detector.end_watch(watch, "again", played.now + 1) == (watch, ())
    assert detector.apply_sample(watch, {}, played.now + 1, RULES) == (watch, ())


@pytest.mark.parametrize(
    ("pids", "is_restart"), [((1, 2), False), ((1,), False), ((1, 2, 3), False), ((1, 3), True), ((3, 4), True), ((), False)]
)  # fmt: skip
def test_a_restart_has_ranks_that_came_and_ranks_that_went(pids: tuple[int, ...], is_restart: bool) -> None:
    assert job_watch.is_restart(job_watch.begin_watch(job(1, 2), 0.0), job(*pids)) == is_restart


def test_job_keeps_old_processes_and_adds_new_ones() -> None:
    watch = job_watch.update_identity(job_watch.begin_watch(job(1, 2), 0.0), job(2, 3, job_id="43", job_key="other"))
    assert watch.identity.name == JobName(job_id="43", job_key="other")
    assert {process.pid for process in watch.identity.generation} == {1, 2, 3}


def test_two_watches_of_one_job_are_the_first_with_what_the_second_knows() -> None:
    first, second = job_watch.begin_watch(job(1), 50.0), job_watch.begin_watch(job(2), 100.0, 20.0)
    first = job_watch.with_power(first, gpus={"a": GpuPower(limit_watts=1.0)})
    second = job_watch.with_power(second, gpus={"a": GpuPower(limit_watts=2.0), "b": GpuPower(limit_watts=3.0)})
    watch = job_watch.merge_watches(first, second)
    pids = {process.pid for process in watch.identity.generation}
    assert (pids, watch.identity.began, watch.since) == ({1, 2}, 20.0, 50.0)
    assert {uuid: gpu.limit_watts for uuid, gpu in watch.power.gpus.items()} == {"a": 1.0, "b": 3.0}
    assert job_watch.merge_watches(second, first).identity.began == 20.0


def test_ranks_that_moved_in_an_earlier_suspicion_are_forgotten() -> None:
    """Ranks 0 and 1 move in the first suspicion, another rank in the second. The job was never at work."""

    def movers(*ranks: int) -> dict[str, object]:
        return {"movers": frozenset(RankId(rank=rank) for rank in ranks)}

    job = begin().feed(100.0, 520).captured(frozen=2, moving=2, **movers(0, 1))
    assert job.watch.state is JobState.STALLED
    assert job.watch.suspicion.moved_ranks
    job.feed(WORK, 300).feed(HANG, 80)
    assert (job.watch.state, job.watch.suspicion.moved_ranks) == (JobState.SUSPECTED, frozenset())
