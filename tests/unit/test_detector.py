"""The detector on series of power samples, of measured hangs and of healthy jobs that look similar."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch import detector
from hangwatch.config import Detector
from hangwatch.detector import Action, TakeCapture, Transition, job_watch, power_level, watch_parts
from hangwatch.detector.capture_due import CAPTURE_LOST_SECONDS, LAST_LOOK_SECONDS, LOOK_SECONDS
from hangwatch.detector.job_watch import JobWatch, MotionCount
from hangwatch.detector.known_pauses import END_MARGIN_SECONDS
from hangwatch.detector.on_power import SAMPLE_GAP_SECONDS
from hangwatch.detector.power_level import GpuPower
from hangwatch.model import OPEN_STATES, CodeRegion, GpuSample, Job, JobState, ProcessId, Rank, RankId

S = JobState
DEFAULTS = Detector(confirming_captures=1)
HOLD, STARTUP, STALLED = (
    int(seconds) for seconds in (DEFAULTS.hold_seconds, DEFAULTS.startup_hold_seconds, DEFAULTS.stalled_hold_seconds)
)
HELD = HOLD + 10  # seconds of low power after which a job is suspected


def job(ranks: int = 8, pid: int = 100, world_size: int | None = None) -> Job:
    return Job(
        job_id="42",
        job_key="key",
        world_size=world_size,
        launcher="torchrun",
        launcher_id=ProcessId(pid=1, start_ticks=1),
        ranks=tuple(
            Rank(id=ProcessId(pid=pid + i, start_ticks=pid), rank=i, local_rank=i, gpu_uuids=(f"GPU-{i}",))
            for i in range(ranks)
        ),
    )


def gpu_samples(powers: Sequence[float | None], limit_watts: float = 700.0) -> dict[str, GpuSample]:
    return {
        f"GPU-{i}": GpuSample(index=i, uuid=f"GPU-{i}", power_watts=watts, power_limit_watts=limit_watts)
        for i, watts in enumerate(powers)
    }


def assert_times_mean_something(watch: JobWatch) -> None:
    """Assert that each part of the watch is set exactly in the job states that the part's docstring names."""
    is_open = watch.state in OPEN_STATES
    is_suspected = is_open or watch.state is S.SUSPECTED
    assert (watch.silence is not None) == (is_suspected or watch.state is S.QUIET)
    assert watch.state is not S.QUIET or (watch.silence and watch.silence.gpus)
    assert (watch.suspicion is not None) == is_suspected
    assert (watch.open_incident is not None) == is_open
    assert watch.open_incident is None or (watch.open_incident.stalled_since is not None) == (watch.state is not S.HUNG)
    assert (
        watch.open_incident is None
        or watch.open_incident.capture_wanted_at is None
        or not watch.capture_record.capturing
    )
    assert watch.capture_record.capturing or watch.state is not S.SUSPECTED
    assert all(gpu.stuck_watts is None or is_suspected for gpu in watch.power.gpus.values())
    phases = {S.STARTING: watch_parts.Starting, S.RECOVERED: watch_parts.Recovered, S.UNKNOWN: watch_parts.Unknown}
    assert type(watch.phase) is phases.get(watch.state, type(None))


def is_the_hold(seconds: float) -> bool:
    """True if a suspicion is at the hold. The median of five samples shows the fall some seconds late."""
    return HOLD - 2 <= seconds <= HOLD + 6


class Series:
    """A simulated job with one power sample a second. It records the detector's actions."""

    def __init__(self, ranks: int = 8, limit: float = 700.0, rules: Detector = DEFAULTS, now: float = 1000.0) -> None:
        self.now, self.limit, self.rules, self.ranks = now, limit, rules, ranks
        self.watch: JobWatch = job_watch.begin_watch(job(ranks), self.now)
        self.asked: list[Action] = []
        self.states: list[JobState] = []
        self.captures: list[float] = []
        self.glances: list[float] = []
        self.told: list[float] = []
        self.hung_at = 0.0
        self.idle: dict[str, float] = {}
        self.places: frozenset[str] = frozenset()
        self.gpu_errors_at: float | None = None

    def feed(
        self,
        watts: float | list[float | None] | None,
        seconds: int,
        step: float = 1.0,
        gap_seconds: float = SAMPLE_GAP_SECONDS,
    ) -> Series:
        """Feed a sample each `step` seconds. `watts` has one value per GPU, or is the value of all GPUs."""
        powers = watts if isinstance(watts, list) else [watts] * self.ranks
        for _ in range(int(seconds / step)):
            self.now += step
            samples = gpu_samples(powers, self.limit)
            more = {"idle": self.idle, "gap_seconds": gap_seconds, "gpu_errors_at": self.gpu_errors_at}
            self._take(*detector.apply_sample(self.watch, samples, self.now, self.rules, **more))
        return self

    def feed_and_answer(self, watts: float, seconds: int, **seen: int) -> Series:
        """Feed samples, and answer each request for a light capture within ten seconds. By default all ranks move."""
        for _ in range(seconds // 10):
            self.feed(watts, 10)
            if self.watch.capture_record.light_capture_since is not None:
                self.glanced(**{"frozen": 0, "moving": 0 if seen else 8, **seen})
        return self

    def until_asked(self, watts: float) -> Series:
        """Feed samples until the detector requests a light capture."""
        while self.watch.capture_record.light_capture_since is None:
            self.feed(watts, 10)
        return self

    def unsampled(self, seconds: int) -> Series:
        for _ in range(seconds):
            self.now += 1
            self._take(*detector.apply_missing_sample(self.watch, self.now, self.rules))
        return self

    def captured(self, frozen: int = 0, moving: int = 0, unknown: int = 0, **more: object) -> Series:
        seen = MotionCount(frozen=frozen, moving=moving, unknown=unknown, places=self.places, **more)  # type: ignore[arg-type]
        self._take(*detector.apply_capture(self.watch, seen, self.now, self.rules))
        return self

    def glanced(self, frozen: int, moving: int, unknown: int = 0, stacked: int = 0) -> Series:
        seen = MotionCount(frozen=frozen, moving=moving, unknown=unknown, with_stack=stacked)
        self._take(*detector.apply_light_capture(self.watch, seen, self.now, self.rules))
        return self

    def threshold_watts(self, gpu: str = "GPU-0") -> float | None:
        return power_level.low_power_threshold_watts(self.watch.power.gpus[gpu], self.rules)

    @property
    def pages(self) -> bool:
        return job_watch.should_page(self.watch, self.now, self.rules)

    def take(self) -> list[Action]:
        """Return the actions since the last call."""
        asked, self.asked = self.asked, []
        return asked

    def _take(self, watch: JobWatch, actions: tuple[Action, ...]) -> None:
        assert_times_mean_something(watch)
        self.watch = watch
        self.asked += actions
        for action in actions:
            if isinstance(action, TakeCapture) and action.is_light:
                self.glances.append(self.now)
            elif isinstance(action, TakeCapture):
                self.captures.append(self.now)
                self.told += [self.now] if action.is_in_timeline else []
            elif isinstance(action, Transition):
                assert action.message
                self.states.append(action.state)


@pytest.mark.parametrize(
    ("limit", "working", "hung"),
    [
        (700, 600, [121.0] * 8),  # H100
        (700, 500, [152.0] + [133.0] * 7),  # H100, all-gather
        (700, 250, [115.0] * 8),  # a light job that hangs
        (700, 650, [115.0] * 8),
        (400, 330, [68.0] + [87.0] * 7),  # A100, the culprit in D state
        (400, 350, [118.0] * 8),  # H20
        (1200, 984, [280.0] * 8),  # GB200
        (300, 250, [76.0] * 8),  # V100
    ],
)
def test_measured_hangs_are_suspected_after_the_hold(limit: float, working: float, hung: list[float]) -> None:
    series = Series(limit=limit).feed(working, 300)
    fell = series.now
    series.feed(hung, HELD)
    assert series.states == [S.TRAINING, S.QUIET, S.SUSPECTED]
    assert series.captures and is_the_hold(series.captures[0] - fell)
    assert not series.pages, "low power alone must never page"
    series.captured(frozen=8, moving=0)
    assert series.watch.state is S.HUNG
    assert series.pages


@pytest.mark.parametrize(("hung", "is_suspected"), [("context", True), ("spin", True), ("copy", False)])
def test_states_that_were_read_on_a_real_gpu(hung: str, is_suspected: bool) -> None:
    """A kernel that spins, as NCCL's do while they wait, draws no more than an idle context."""
    read = json.loads((Path(__file__).parents[1] / "data/gpus/h100.json").read_text())
    watts = {name: state["nvml_watts"] for name, state in read["states"].items()}
    assert all(
        state["nvidia_smi_watts"] == pytest.approx(watts[name], rel=0.02) for name, state in read["states"].items()
    )
    series = Series(ranks=1, limit=read["limit_watts"]).feed(watts["idle"], 10).feed(watts["load"], 300)
    series.feed(watts[hung], HELD)
    assert (S.SUSPECTED in series.states) is is_suspected


def test_hang_in_first_seconds_is_compared_with_first_work() -> None:
    series = Series().feed(118, 1).feed(600, 1).feed(118, HELD)
    assert series.states == [S.TRAINING, S.QUIET, S.SUSPECTED]


def test_work_is_never_suspected() -> None:
    series = Series()
    for _ in range(60):  # pipeline bubbles or an evaluation of a minute: shorter than the hold
        series.feed(600, 7).feed(110, 3)
    series.feed(100, 60).feed(600, 100)
    assert series.captures == []
    assert S.SUSPECTED not in series.states


def test_power_capping_and_a_slow_gpu_are_no_hang() -> None:
    assert Series().feed(650, 300).feed(300, 600).states == [S.TRAINING]
    assert Series().feed([600.0] * 7 + [180.0], 900).states == [S.TRAINING]


def test_a_hung_job_pages_after_the_configured_number_of_captures_in_a_row() -> None:
    series = Series(rules=Detector(confirming_captures=2)).feed(600, 300).feed(110, HELD).captured(8, 0)
    assert (series.watch.state, series.pages) == (S.HUNG, False)
    series.feed(110, int(DEFAULTS.recapture_seconds))
    assert len(series.captures) == 2, "the next capture comes after recapture_seconds"
    assert series.captured(8, 0).pages
    series.feed(110, 100).captured(7, 1)
    assert not series.feed(110, 100).captured(8, 0).pages, "the captures must be consecutive"


def test_moving_ranks_teach_and_the_job_is_left_alone() -> None:
    series = Series().feed(600, 300).feed(110, HELD).captured(frozen=2, moving=6)
    assert series.watch.state is S.TRAINING
    series.feed(110, 600)
    assert len(series.captures) == 1, "suspected once"
    series.feed(600, 100).feed(110, HELD)
    assert len(series.captures) == 2, "after real work the old line counts again"


PLAIN = Detector(confirming_captures=1, quiet_fraction=0.0, low_power_ratio_of_limit=0.12)


@pytest.mark.parametrize("working", [600, 150])
@pytest.mark.parametrize("watts", [71, 72, 75, 84])
def test_plain_rule_uses_ratio_of_power_limit_only(working: float, watts: float) -> None:
    series = plain_series().feed(working, 300)
    fell = series.now
    if series.watch.capture_record.light_capture_since is not None:
        series.glanced(frozen=0, moving=8)
    series.feed(watts, HELD)
    assert series.states == [S.TRAINING, S.QUIET, S.SUSPECTED]
    assert is_the_hold(series.captures[0] - fell)
    series.captured(frozen=8, moving=0)
    assert series.watch.state is S.HUNG
    series.feed(85, 20)
    assert series.watch.state is S.RECOVERED, "over the line"


def plain_series() -> Series:
    series = Series(rules=PLAIN)
    series.idle = {f"GPU-{i}": 68.0 for i in range(8)}
    return series


@pytest.mark.parametrize("working", [600, 150])
def test_by_the_plain_rule_a_watt_over_the_share_of_the_limit_is_not_quiet(working: float) -> None:
    assert plain_series().feed(working, 300).feed(85, 600).states == [S.TRAINING]


def test_plain_rule_learned_level_above_limit_changes_nothing_below() -> None:
    # 84 W of 700 W stay low power under the plain rule: the learned baseline is higher, at 85 W.
    series = plain_series().feed(600, 300).feed(85, HELD).glanced(frozen=0, moving=8)
    series.feed(84, HELD)
    assert series.states == [S.TRAINING, S.QUIET, S.SUSPECTED]
    series.captured(frozen=0, moving=8)
    series.feed(84, HELD)
    assert series.states == [S.TRAINING, S.QUIET, S.SUSPECTED, S.TRAINING], "now it is known to be work"


def test_plain_rule_and_learned_threshold_both_apply() -> None:
    both = Detector(confirming_captures=1, low_power_ratio_of_limit=0.12)
    assert Series(rules=both).feed(600, 300).feed(110, HELD).states == [S.TRAINING, S.QUIET, S.SUSPECTED]
    light = GpuPower(limit_watts=700.0, idle_watts=68.0, busy_watts=100.0)
    assert power_level.low_power_threshold_watts(light, both) == pytest.approx(84), "the learned threshold is 79.2 W"


def test_by_the_plain_rule_a_job_that_was_never_over_it_waits_for_the_startup_hold() -> None:
    """A single moment of higher power is no work."""
    series = Series(rules=PLAIN).feed(72, 300).feed(140, 30).feed(72, STARTUP - 350)
    assert series.states == []
    series.feed(72, 30)
    assert series.states == [S.SUSPECTED]
    series.feed(110, 60)
    assert series.watch.state is S.SUSPECTED, "a model was loaded: the GPUs have not returned to work"


def test_by_the_plain_rule_ranks_that_move_teach_as_well() -> None:
    series = Series(rules=PLAIN).feed(600, 300).feed(80, HELD).captured(frozen=0, moving=8)
    looked = len(series.captures)
    series.feed(80, 110)
    assert (series.watch.state, len(series.captures)) == (S.TRAINING, looked)
    series.feed(600, 60).feed(80, HELD)
    assert series.watch.state is S.SUSPECTED


def test_hang_below_a_learned_level_is_suspected() -> None:
    series = Series().feed(600, 300).feed(220, HELD).captured(0, 8).feed(220, 60).feed(95, HELD)
    assert len(series.captures) == 2
    assert series.watch.state is S.SUSPECTED


def test_capture_while_a_hang_ends_does_not_teach_the_power_of_the_hang() -> None:
    """The ranks are seen to progress before the power rises. Else the next hang at this power would be work."""
    series = Series().feed(600, 300).feed(115, HELD).captured(8, 0).feed(115, 60).captured(0, 8)
    assert series.watch.state is S.RECOVERED
    series.feed(600, 20).feed(115, HELD)
    assert series.watch.state is S.SUSPECTED


def test_learned_job_gets_light_captures_with_growing_pauses() -> None:
    series = Series(ranks=1).feed(600, 300).feed(110, HELD).captured(0, 8)
    taught_at = series.now
    series.feed_and_answer(110, 20000)
    assert series.glances[0] - taught_at == pytest.approx(DEFAULTS.hold_seconds, abs=2)
    pauses = [b - a for a, b in zip(series.glances, series.glances[1:], strict=False)]
    assert pauses[0] == pytest.approx(2 * DEFAULTS.hold_seconds, abs=20)
    assert pauses == sorted(pauses)
    assert max(pauses) <= 3600 + 20
    assert (series.watch.state, len(series.captures)) == (S.TRAINING, 1)


@pytest.mark.parametrize(
    ("limit", "working", "hung"),
    [
        (700, 250, 140),  # the limit is at 133 W
        (400, 150, 118),  # an A100 under a light load, an H20 that falls to 79 % in a hang
        (700, 150, 120),  # a job that never clearly had the power of work
    ],
)
def test_light_job_at_flat_level_gets_light_capture_after_hold(limit: float, working: float, hung: float) -> None:
    series = Series(limit=limit).feed(working, 1000)
    if series.watch.capture_record.capturing:
        series.captured(0, 8)
    series.feed_and_answer(working, 1000)
    fell, before = series.now, len(series.glances)
    series.feed(hung, HELD)
    assert [is_the_hold(at - fell) for at in series.glances[before:]] == [True]
    assert series.watch.state is S.TRAINING, "flat power alone is not a suspicion"
    captures = len(series.captures)
    series.glanced(frozen=8, moving=0)
    assert series.watch.state is S.SUSPECTED
    assert len(series.captures) == captures + 1, "an ordinary look, at once"
    series.feed(hung, 10)
    assert series.watch.state is S.SUSPECTED, "the GPUs have not returned to work"
    series.captured(frozen=8, moving=0)
    assert (series.watch.state, series.pages) == (S.HUNG, True)
    series.feed(working, 20)
    assert series.watch.state is S.RECOVERED


def test_what_a_job_fell_to_and_stays_at_is_not_taken_for_its_work() -> None:
    series = Series().feed(250, 600)
    line = series.threshold_watts()
    series.feed(140, 3600)
    assert series.threshold_watts() == line == pytest.approx(133)
    series.glanced(frozen=0, moving=8)
    assert series.threshold_watts() == pytest.approx(70 + 0.35 * 70)
    series.feed(140, 1200)
    assert series.watch.power.gpus["GPU-0"].busy_watts == 140, "a capture has shown that it is"


@pytest.mark.parametrize(("working", "later"), [(600, 600), (250, 250), (600, 470)], ids=str)
def test_flat_power_of_at_least_three_quarters_takes_no_light_capture(working: float, later: float) -> None:
    assert Series().feed(working, 300).feed(later, 3600).glances == []


def test_low_power_that_varies_takes_no_light_capture() -> None:
    series = Series().feed(600, 300)
    for _ in range(100):
        series.feed(330, 7).feed(440, 7)
    assert series.glances == []


def test_light_captures_of_a_healthy_flat_phase_become_rare() -> None:
    series = Series(ranks=1).feed(600, 600)
    series.feed_and_answer(350, 86400)
    assert series.captures == []
    assert series.states == [S.TRAINING]
    assert 2 <= len(series.glances) <= 30, "in a day"


def test_light_captures_of_recurring_phases_are_bounded() -> None:
    series = Series(ranks=1).feed(600, 600)
    for _ in range(20):
        series.feed_and_answer(350, HELD + 10)
        series.feed(600, 60)
    pauses = [b - a for a, b in zip(series.glances, series.glances[1:], strict=False)]
    assert min(pauses) >= watch_parts.GLANCE_SECONDS


def test_light_captures_without_a_result_become_rare() -> None:
    series = Series(ranks=1).feed(600, 300)
    series.feed_and_answer(350, 10000, unknown=8)
    pauses = [b - a for a, b in zip(series.glances, series.glances[1:], strict=False)]
    assert pauses == sorted(pauses) and pauses[-1] > 3 * pauses[0]
    assert series.states == [S.TRAINING]


@pytest.mark.parametrize(
    ("frozen", "unknown", "suspected"), [(4, 4, True), (3, 5, False), (1, 0, True), (1, 1, True), (1, 2, False)]
)
def test_light_capture_with_half_of_ranks_frozen_begins_suspicion(frozen: int, unknown: int, suspected: bool) -> None:
    series = Series().feed(600, 300).feed(350, HELD)
    series.glanced(frozen, 0, unknown=unknown)
    assert series.states == ([S.TRAINING, S.SUSPECTED] if suspected else [S.TRAINING])


def test_learned_level_with_mostly_unjudged_ranks_is_forgotten() -> None:
    """Else the level would hide a hang: ranks that spin may compute or wait."""
    series = Series().feed(600, 300).feed(84, HELD).captured(0, 8)
    series.until_asked(84).glanced(1, 0, unknown=7, stacked=8).feed(84, HELD)
    assert series.watch.state is S.SUSPECTED
    series.captured(1, 0, unknown=7).feed(84, int(DEFAULTS.stalled_hold_seconds))
    assert (series.watch.state, series.pages) == (S.STALLED, True)


@pytest.mark.parametrize(("moving", "unknown", "stacked"), [(5, 3, 8), (0, 8, 3)])
def test_learned_level_stays_if_most_ranks_move_or_lack_a_stack(moving: int, unknown: int, stacked: int) -> None:
    series = Series().feed(600, 300).feed(84, HELD).captured(0, 8)
    series.until_asked(84).glanced(0, moving, unknown=unknown, stacked=stacked).feed(84, 200)
    assert series.watch.state is S.TRAINING


def test_light_capture_that_ends_after_power_rose_is_ignored() -> None:
    series = Series().feed(600, 300).feed(350, HELD)
    assert series.watch.capture_record.light_capture_since is not None
    series.feed(600, 10).glanced(8, 0)
    assert series.states == [S.TRAINING]


def test_pause_between_light_captures_begins_at_the_end_of_the_first() -> None:
    series = Series().feed(600, 300).feed(84, HELD).captured(0, 8)
    ended = series.until_asked(84).feed(84, 200).glanced(0, 0, unknown=8).now
    asked = len(series.glances)
    while len(series.glances) == asked:
        series.feed(84, 1)
    assert series.glances[-1] - ended >= DEFAULTS.hold_seconds


def test_power_during_a_light_capture_is_not_learned_as_work_of_a_young_job() -> None:
    series = Series(rules=replace(DEFAULTS, hold_seconds=3.0)).feed(300, 1, 0.2).feed(160, 5, 0.2)
    assert (series.watch.state, len(series.glances)) == (S.TRAINING, 1)
    assert series.feed(160, 7, 0.2).glanced(8, 0).watch.state is S.SUSPECTED


def test_light_capture_without_a_result_is_given_up() -> None:
    series = Series().feed(600, 300).feed(350, HELD).feed(350, int(CAPTURE_LOST_SECONDS) + 400)
    assert len(series.glances) == 2


def test_a_gap_in_the_samples_is_not_flat_time() -> None:
    series = Series().feed(600, 300).feed(350, HOLD // 2)
    series.now += 3600
    series.feed(350, HOLD - 20)
    assert series.glances == []
    series.feed(350, 30)
    assert len(series.glances) == 1


@pytest.mark.parametrize(
    ("name", "job_state", "absent", "came", "later_seconds", "state"),
    [
        ("never there", 3, 5, 0, 0, S.STALLED),
        ("there once, and gone", 4, 5, 0, 0, S.HUNG),
        ("all there", 8, 0, 0, 0, S.HUNG),
        ("never there, in a job that is old", 3, 5, 0, DEFAULTS.startup_stalled_hold_seconds, S.HUNG),
        ("they came while the others were looked at", 8, 5, 5, 0, S.STALLED),
        ("one came, and another was there once", 5, 5, 1, 0, S.HUNG),
    ],
)
def test_a_rank_that_was_never_there_is_late_as_long_as_the_job_starts(
    name: str, job_state: int, absent: int, came: int, later_seconds: float, state: JobState
) -> None:
    series = Series()
    series.watch = job_watch.begin_watch(job(job_state), series.now)
    series.feed(80, STARTUP + 10)
    series.now += later_seconds
    assert series.captured(8, absent=absent, started_since=came).watch.state is state, name


def test_a_rank_that_is_gone_from_a_job_that_was_at_work_is_not_late() -> None:
    assert Series().feed(600, 300).feed(80, HELD).captured(9, absent=1).watch.state is S.HUNG


def test_a_lost_gpu_has_no_vote_and_is_no_quiet_gpu() -> None:
    series = Series().feed(600, 300).feed([None] * 4 + [600.0] * 4, 300)
    assert series.watch.state is S.TRAINING
    series.feed([None] * 7 + [110.0], HELD)
    assert series.watch.state is S.SUSPECTED


@pytest.mark.parametrize(("before", "job_state"), [(90, S.STARTING), (600, S.TRAINING)])
@pytest.mark.parametrize("is_silent", [True, False])
def test_job_without_readings_is_unknown_then_resumes_state(
    before: float, job_state: JobState, is_silent: bool
) -> None:
    series = Series().feed(before, 300)
    assert series.watch.state is job_state

    def nothing(seconds: int) -> Series:
        return series.unsampled(seconds) if is_silent else series.feed([None] * 8, seconds)

    nothing(int(DEFAULTS.hold_seconds) - 1)
    assert series.watch.state is job_state, "a driver may be slow"
    nothing(1)
    assert series.watch.state is S.UNKNOWN
    assert "a hang is not detected" in series.watch.message
    nothing(7200)
    assert (series.watch.state, series.captures, series.pages) == (S.UNKNOWN, [], False)
    series.feed(before, 30)
    assert series.watch.state is job_state
    series.feed(600, 300).feed(110, HELD)
    assert series.watch.state is S.SUSPECTED, "in the ordinary way"


@pytest.mark.parametrize("seen", [[None] * 8, []])
def test_job_without_gpu_readings_becomes_unknown(seen: list[float | None]) -> None:
    series = Series(ranks=len(seen)).feed(seen, 3600)
    assert (series.states, series.captures) == ([S.UNKNOWN], [])
    silent = Series().unsampled(3600)
    assert (silent.states, silent.captures) == ([S.UNKNOWN], [])
    assert silent.watch.is_starting, "by a scan its name may still change"


def test_recovered_job_without_readings_learns_no_pause_and_trains_again() -> None:
    series = Series()
    series.places = frozenset({"eval.py:3 io"})
    series.feed(600, 300).feed(110, HELD).captured(8, 0).feed(600, 20)
    assert series.watch.state is S.RECOVERED
    series.unsampled(300)
    assert series.watch.state is S.UNKNOWN
    series.feed(600, 30)
    assert (series.watch.state, series.watch.pauses) == (S.TRAINING, ())


def test_a_hang_that_was_seen_stays_one_without_readings() -> None:
    series = Series().feed(600, 300).feed(110, HELD).captured(8, 0).unsampled(3600)
    assert (series.watch.state, series.pages) == (S.HUNG, True)


def test_a_silence_that_the_driver_joins_is_timed_anew() -> None:
    series = Series().feed(600, 300).feed(110, HOLD - 20).unsampled(5 * HOLD)
    assert series.watch.state is S.UNKNOWN
    series.feed(110, HOLD - 10)
    assert series.watch.state is S.QUIET
    series.feed(110, 20)
    assert series.watch.state is S.SUSPECTED


def test_gpu_is_quiet_at_its_threshold_and_not_above() -> None:
    gpu = GpuPower(limit_watts=700.0, idle_watts=80.0, busy_watts=600.0)
    line = power_level.low_power_threshold_watts(gpu, DEFAULTS)
    assert line == pytest.approx(80 + 0.35 * 520)
    at, above = (replace(gpu, recent=(watts,)) for watts in (line, math.nextafter(line, math.inf)))
    assert power_level.is_quiet(at, DEFAULTS) and power_level.is_low(at, DEFAULTS)
    assert not power_level.is_quiet(above, DEFAULTS) and not power_level.is_low(above, DEFAULTS)


def test_gpus_of_different_models_have_their_own_lines() -> None:
    series = Series(ranks=2).feed([600.0, 140.0], 300)
    assert series.threshold_watts() == pytest.approx(70 + 0.35 * 530)
    assert (series.threshold_watts("GPU-1") or 140) < 140


def test_an_idle_level_that_was_seen_is_the_floor() -> None:
    series = Series(ranks=1, limit=1100)
    series.idle = {"GPU-0": 183.5}
    assert series.feed(1050, 60).threshold_watts() == pytest.approx(183.5 + 0.35 * (1050 - 183.5))


def test_idle_levels_are_learned_from_gpus_without_processes() -> None:
    def sample(watts: float, pids: tuple[int, ...] = ()) -> tuple[GpuSample, ...]:
        return (GpuSample(index=0, uuid="a", power_watts=watts, power_limit_watts=700, pids=pids),)

    assert power_level.update_idle_levels({}, sample(71), frozenset()) == {"a": 71}
    assert power_level.update_idle_levels({}, sample(71, pids=(5,)), frozenset()) == {}
    assert power_level.update_idle_levels({}, sample(71), frozenset({"a"})) == {}
    assert power_level.update_idle_levels({}, sample(600), frozenset()) == {}, (
        "a rank that this node cannot see is at work"
    )


powers = st.one_of(st.none(), st.floats(min_value=0, max_value=1500, allow_nan=False))
outcomes = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.lists(powers, min_size=8, max_size=8), st.integers(1, 200)),
            outcomes,
            st.floats(min_value=0.1, max_value=5000),
        ),
        max_size=12,
    )
)
@example([([None] * 4 + [690.0, 860.0, 1030.0, 590.0], 1), (1, 0, 0), 100.0])
@example([([None] * 4 + [591.0] * 4, 1), (0, 1, 0), (1, 0, 0), 100.0])  # a capture that never returns
@example([([None] * 7 + [0.0], 60), 299.0, ([None] * 7 + [0.0], 1), (0, 1, 1), 90.0])  # a capture that returns late
@settings(max_examples=150, deadline=None)
def test_promises_hold_for_any_events(events: list[object]) -> None:
    """Page only after a capture of stuck ranks, one capture at a time, and leave every state."""
    rules = Detector(
        confirming_captures=1,
        hold_seconds=20,
        startup_hold_seconds=60,
        stalled_hold_seconds=60,
        startup_stalled_hold_seconds=90,
    )
    series = Series(rules=rules)
    judged = False
    for event in events:
        if isinstance(event, float):
            series.now += event
        elif isinstance(event[0], list):  # type: ignore[index]
            before = len(series.captures)
            was_capturing = series.watch.capture_record.capturing
            series.feed(*event)  # type: ignore[misc]
            if was_capturing and series.watch.capture_record.capturing:
                assert len(series.captures) <= before + 1
        else:
            judged = judged or bool(series.captures)  # the result of an abandoned capture may come late
            series.captured(*event)  # type: ignore[misc]
            series.glanced(*event)  # type: ignore[misc]
        if series.pages:
            assert judged, "paged without any stack"
            assert series.watch.state in (S.HUNG, S.STALLED)  # a resting job blocks no rank elsewhere
        if series.watch.state in (S.TRAINING, S.STARTING, S.RECOVERED):
            assert not series.pages
            assert job_watch.quiet_seconds(series.watch, series.now) == 0
    series.feed(650.0, 200)
    for _ in range(20):  # only a full capture replaces the result of a light one, perhaps after an hour
        if series.watch.state is S.STALLED and not series.watch.capture_record.capturing:
            series.feed(650.0, 200)
    if series.watch.state is S.STALLED and series.watch.capture_record.capturing:
        series.captured(0, 8)
    if series.watch.state is not S.SUSPECTED:
        assert series.watch.state in (S.TRAINING, S.RECOVERED, S.QUIET)


def suspended(world_size: int | None) -> Series:
    """Return the series of a job of `world_size` ranks. All 8 ranks of this node are stopped."""
    series = Series()
    series.watch = job_watch.update_identity(series.watch, job(world_size=world_size))
    return series.feed(600, 100).feed(110, HELD).captured(8, 0, resting=S.SUSPENDED)


@pytest.mark.parametrize("world_size", [None, 8])
def test_job_stopped_as_a_whole_is_suspended_not_hung(world_size: int | None) -> None:
    series = suspended(world_size)
    assert series.states[-1] is S.SUSPENDED
    assert series.watch.message == "all 8 ranks are stopped or frozen"
    longest_pause = int(DEFAULTS.recapture_max_seconds)
    for _ in range(9):
        series.feed(110, longest_pause + 5).captured(8, 0, resting=S.SUSPENDED)
        assert not series.pages
    assert len(series.captures) == 10
    series.feed(600, 75)
    assert series.states[-2:] == [S.RECOVERED, S.TRAINING]


def test_stopped_node_of_larger_job_pages_after_stalled_hold() -> None:
    series = suspended(16)
    assert not series.pages
    series.feed(110, STALLED - 10)
    assert not series.pages
    series.feed(110, 15)
    assert series.pages


def test_hang_after_continue_is_hung_and_stop_keeps_hang_time() -> None:
    first_pause = int(DEFAULTS.recapture_seconds) + 1
    series = suspended(16).feed(110, first_pause).captured(8, 0)
    assert (series.states[-1], series.pages) == (S.HUNG, True)
    series.feed(110, 1000).captured(8, 0, resting=S.SUSPENDED)
    assert (series.states[-1], series.pages) == (S.SUSPENDED, True)
    series.feed(110, first_pause).captured(7, 1)
    assert (series.states[-1], series.pages) == (S.STALLED, True)


def looked_at(series: Series, seconds: int, moving: int = 0, takes: int = 12) -> Series:
    """Continue the hang. Each capture returns after `takes` seconds, with `moving` of 8 ranks moving."""
    for _ in range(seconds):
        series.feed(110, 1)
        if series.watch.capture_record.capturing and series.now - series.captures[-1] >= takes:
            series.captured(8 - moving, moving)
    return series


def last_looks(series: Series) -> list[float]:
    """Return, for each last capture, the seconds from its request to the collective timeout of 600 s."""
    return [series.hung_at + 600 - at for at in series.told]


def with_time_out(watch: JobWatch, **changes: object) -> JobWatch:
    return replace(watch, timeout=replace(watch.timeout, **changes))


def hangs(moving: int = 0, rules: Detector = DEFAULTS, **time_out: object) -> Series:
    series = Series(rules=rules).feed(600, 300)
    series.watch = with_time_out(series.watch, **time_out)
    series.hung_at = series.now
    return looked_at(series, HELD, moving)


@pytest.mark.parametrize("moving", [0, 1])
def test_last_capture_ends_before_collective_timeout(moving: int) -> None:
    series = looked_at(hangs(moving), 1400, moving)
    (before,) = last_looks(series)
    assert LOOK_SECONDS < before - 3 <= before <= LOOK_SECONDS + LAST_LOOK_SECONDS
    assert series.watch.state is (S.STALLED if moving else S.HUNG)


def test_a_second_hang_has_a_last_look_of_its_own() -> None:
    series = looked_at(hangs(), 900).feed(600, 300)
    assert series.watch.state is S.TRAINING
    assert len(looked_at(series, 900).told) == 2


@pytest.mark.parametrize(
    "time_out",
    [
        {"environment_seconds": None},
        {"environment_seconds": 100.0},  # the timeout has passed at the capture
        {"environment_seconds": 160.0},  # the first capture is recent enough
        {"environment_seconds": 0.0},
        {"environment_seconds": math.inf},
        {"environment_seconds": 1e300, "recorded_seconds": -1.0},
    ],
)
def test_job_without_a_pending_timeout_has_no_last_capture(time_out: dict[str, object]) -> None:
    assert looked_at(hangs(**time_out), 2000).told == []


def test_recorded_timeout_overrides_the_environment() -> None:
    series = looked_at(hangs(recorded_seconds=1800.0), 1800 - 2 * HELD)
    assert series.told == []
    (at,) = looked_at(series, 2 * HELD).told
    assert at - series.hung_at == pytest.approx(1800 - LOOK_SECONDS - LAST_LOOK_SECONDS, abs=4)


def test_what_the_ranks_recorded_holds_for_one_hang() -> None:
    series = looked_at(hangs(recorded_seconds=1800.0), 900).feed(600, 300)
    series.hung_at = series.now
    (before,) = last_looks(looked_at(series, 700))
    assert LOOK_SECONDS < before <= LOOK_SECONDS + LAST_LOOK_SECONDS


def test_a_time_out_that_changes_with_each_look_costs_one_look_in_a_hang() -> None:
    series = hangs()
    for _ in range(100):
        recorded_seconds = job_watch.quiet_seconds(series.watch, series.now) + 40
        series.watch = with_time_out(series.watch, recorded_seconds=recorded_seconds)
        looked_at(series, 60)
    assert len(series.told) == 1


def test_stopped_new_or_recovered_job_has_no_last_capture() -> None:
    stopped = suspended(16)
    stopped.feed(110, 900)
    assert stopped.told == []
    never = Series().feed(90, STARTUP + 5).captured(8, 0)
    never.watch = with_time_out(never.watch, environment_seconds=STARTUP + 100.0)
    assert (never.watch.state, looked_at(never, 200).told) == (S.HUNG, [])
    back = looked_at(hangs(rules=Detector(confirming_captures=1, recover_seconds=3600)), 500 - HELD).feed(600, 300)
    assert (back.watch.state, back.told) == (S.HUNG, [])


def test_a_look_that_takes_long_begins_as_much_earlier() -> None:
    series = Series().feed(600, 300).feed(110, HELD)
    series.captured(8, 0)
    series.watch = job_watch.with_open_incident(series.watch, capture_wanted_at=None)
    sample = gpu_samples([110] * 8)
    fell = series.watch.quiet_since

    def takes_capture(seconds_left: float, **more: float) -> bool:
        at = fell + 600 - seconds_left
        watch = job_watch.with_power(series.watch, sampled_at=at - 1)
        return bool(detector.apply_sample(watch, sample, at, DEFAULTS, **more)[1])

    def edges(look_seconds: float) -> tuple[float, ...]:
        first = look_seconds + LAST_LOOK_SECONDS
        return first + 1, first, look_seconds + 1, look_seconds, 1, -1

    taken = [False, True, True, False, False, False]
    assert [takes_capture(seconds) for seconds in edges(LOOK_SECONDS)] == taken
    assert [takes_capture(seconds, capture_seconds=100.0) for seconds in edges(100.0)] == taken


def paused(pause_seconds: int = 240, place: str = "a") -> Series:
    """Return a job that worked, was frozen at `place` for `pause_seconds`, and works again."""
    series = Series().feed(600, 300).feed(110, HELD)
    series.places = frozenset({place})
    series.captured(frozen=8, moving=0).feed(110, pause_seconds - HELD)
    return series


def seconds_to_page(series: Series, place: str = "a") -> float:
    """Return the seconds from the fall of power to the page. In each capture all ranks are frozen at `place`."""
    fell = series.now
    series.feed(110, HELD)
    series.places = frozenset({place})
    series.captured(frozen=8, moving=0)
    while not series.pages:
        series.feed(110, 1)
        assert series.now - fell < 7200
    return series.now - fell


def test_a_pause_that_ended_by_itself_makes_its_place_page_after_twice_its_length() -> None:
    series = paused(200)
    assert series.pages, "a place that is not known pages at once"
    series.feed(600, 300)
    assert "pause of 200 s" in series.watch.message
    assert seconds_to_page(series) == pytest.approx(400, abs=5)
    assert "known pause at this place of at most 200 s" in series.watch.message


def test_another_place_pages_at_once_and_goes_on_paging() -> None:
    series = paused(200).feed(600, 300)
    assert seconds_to_page(series, "b") == HELD
    series.feed(110, 30)
    series.places = frozenset({"a"})
    series.captured(frozen=8, moving=0)
    assert series.pages, "a page does not come and go with the place of a later look"


@pytest.mark.parametrize(
    ("pause_seconds", "timeout_seconds", "page_seconds"),
    [(400, 600.0, 600 - END_MARGIN_SECONDS), (400, None, 800), (800, 7200.0, STALLED)],
)
def test_known_pause_pages_two_minutes_before_the_collective_timeout(
    pause_seconds: int, timeout_seconds: float | None, page_seconds: float
) -> None:
    series = paused(pause_seconds).feed(600, 300)
    series.watch = with_time_out(series.watch, environment_seconds=timeout_seconds)
    assert seconds_to_page(series) == pytest.approx(page_seconds, abs=5)


def test_what_a_collective_waits_is_read_of_the_ranks() -> None:
    assert job_watch.begin_watch(job(), 0.0).timeout.seconds == 600
    told = replace(job(), environ={"DEEPSPEED_TIMEOUT": "45"})
    assert job_watch.begin_watch(told, 0.0).timeout.seconds == 2700
    assert job_watch.update_identity(job_watch.begin_watch(job(), 0.0), told).timeout.seconds == 2700


def test_a_look_that_saw_the_work_begin_again_ends_the_pause_too() -> None:
    series = paused(200).feed(600, 6)
    assert series.watch.state is S.HUNG
    series.captured(frozen=0, moving=8).feed(600, 300)
    assert seconds_to_page(series) == pytest.approx(400, abs=5)


@pytest.mark.parametrize(("watts", "becomes_known"), [(600, True), (110, False)])
def test_pause_whose_end_only_a_capture_saw_is_known_once_power_is_back(watts: int, becomes_known: bool) -> None:
    """If power stays low, the ranks progress at this power, and the silence is not the pause."""
    series = paused(200).captured(frozen=0, moving=8).feed(watts, 300)
    assert bool(series.watch.pauses) == becomes_known


@pytest.mark.parametrize("seconds_after_the_pause", [-300, -100, 20])
def test_a_pause_with_xids_or_link_errors_teaches_nothing(seconds_after_the_pause: int) -> None:
    series = paused(200)
    series.gpu_errors_at = series.now + seconds_after_the_pause
    assert series.feed(600, 300).watch.pauses == ()
    series = paused(200)
    series.gpu_errors_at = series.now - 400
    assert series.feed(600, 300).watch.pauses


def test_a_restart_teaches_nothing_and_forgets_nothing() -> None:
    series = paused(200).feed(600, 30)
    assert series.watch.state is S.RECOVERED
    ended, _ = detector.end_watch(series.watch, "its ranks were replaced by new ones", series.now)
    assert job_watch.begin_watch(job(pid=500), series.now, None, ended).pauses == ()
    learnt = paused(200).feed(600, 300).watch
    ended, _ = detector.end_watch(learnt, "its ranks were replaced by new ones", series.now)
    assert job_watch.begin_watch(job(pid=500), series.now, None, ended).pauses == learnt.pauses


def test_a_job_that_was_stopped_teaches_nothing() -> None:
    assert paused(200).captured(8, 0, resting=S.SUSPENDED).feed(600, 300).watch.pauses == ()


def test_after_a_day_a_pause_is_forgotten() -> None:
    series = paused(200).feed(600, 300)
    series.watch = replace(
        series.watch, pauses=tuple(replace(one, seen_at=one.seen_at - 86400) for one in series.watch.pauses)
    )
    assert seconds_to_page(series) == HELD


def test_a_job_is_over_only_after_it_was_at_work() -> None:
    at_work = Series().feed(600, 100).feed(110, HELD).captured(8, 0, resting=S.OVER)
    assert (at_work.states[-1], at_work.pages) == (S.OVER, False)
    assert not at_work.feed(110, 7200).pages
    at_its_start = Series().feed(110, STARTUP + 5).captured(8, 0, resting=S.OVER)
    assert at_its_start.states[-1] is S.HUNG


def at_two_lines(ranks: int, *, moving: bool) -> MotionCount:
    """Return the counts of a capture of eight ranks: `ranks` stay between two lines, the others are frozen."""
    ids = [RankId(rank=number) for number in range(8)]
    stays = {rank: CodeRegion(within="loop", places=("1", "2")) for rank in ids[:ranks]}
    moved = ranks if moving else 0
    return MotionCount(
        frozen=8 - ranks, moving=moved, unknown=ranks - moved, with_stack=8, movers=frozenset(ids[:moved]), stays=stays
    )


def moved_alone(rank: int) -> MotionCount:
    return MotionCount(frozen=0, moving=1, unknown=7, with_stack=8, movers=frozenset({RankId(rank=rank)}))


def look(series: Series, seen: MotionCount) -> None:
    is_light = series.watch.capture_record.light_capture_since is not None
    take = detector.apply_light_capture if is_light else detector.apply_capture
    series._take(*take(series.watch, seen, series.now, series.rules))


def test_ranks_moving_between_two_lines_page_after_stalled_hold() -> None:
    series = Series().feed(600, 900).feed(120, HELD)
    look(series, at_two_lines(7, moving=True))
    assert series.watch.state is S.TRAINING
    series.feed(120, 2 * HOLD + 10)
    look(series, at_two_lines(7, moving=True))
    assert series.watch.state is S.SUSPECTED
    look(series, at_two_lines(7, moving=True))
    assert series.watch.state is S.STALLED
    assert series.watch.message == "progress of 7 of 8 ranks is unknown"
    series.feed(120, STALLED - 1)
    assert not series.pages
    assert series.feed(120, 2).pages


def test_work_in_between_ends_what_looks_remember() -> None:
    series = Series().feed(600, 900).feed(120, HELD)
    look(series, at_two_lines(7, moving=True))
    assert series.watch.capture_record.standstills
    assert not series.feed(600, 30).watch.capture_record.standstills


def test_an_unjudged_place_over_the_line_is_suspected_by_its_second_look() -> None:
    series = Series().feed(250, 900).feed(140, HELD)
    look(series, at_two_lines(8, moving=False))
    assert series.watch.state is S.TRAINING
    series.feed(140, 2 * int(watch_parts.GLANCE_SECONDS) + 10)
    look(series, at_two_lines(8, moving=False))
    assert series.watch.state is S.SUSPECTED


def test_ranks_of_a_light_job_that_move_in_turn_are_at_work_together() -> None:
    series = Series().feed(130, STARTUP + 1)
    for number in range(5):
        look(series, moved_alone(number))
        assert (series.watch.state is S.STALLED) == (number < 4)
        series.feed(130, 1 if number == 4 else 500)
    assert series.watch.message == "5 of 8 ranks have progressed since then: the present power of the job is work"


def test_ranks_of_a_job_that_worked_hard_are_not_added_up() -> None:
    series = Series().feed(600, 900).feed(120, HELD)
    for number in range(8):
        look(series, moved_alone(number))
        series.feed(120, 500)
        assert series.watch.state is S.STALLED
