"""Hangs and healthy look-alikes in virtual time: states, pages and named ranks."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.stacks.activity import Table
from tests.scenarios.names import assert_names_do_not_matter
from tests.scenarios.power import HANG_SCENARIOS, HEALTHY_SCENARIOS, HOUR, PAUSE_SCENARIOS, TRAINS, PowerScenario
from tests.scenarios.simulation import SETTINGS, UNIX_START, fold, play

SCENARIOS = (*HANG_SCENARIOS, *HEALTHY_SCENARIOS)
ALL_SCENARIOS = (*SCENARIOS, *PAUSE_SCENARIOS)
WORKED_SECONDS = 2 * SETTINGS.detector.busy_window_seconds
# `make test` plays the first of the scenarios with the same states, `make long PART=verdicts` all.
FIRST = {tuple((one.states, one.page) for one in scenario.expected): scenario for scenario in reversed(SCENARIOS)}
FIRST_NAMES = frozenset(scenario.name for scenario in (*FIRST.values(), *PAUSE_SCENARIOS))


def row(scenario: PowerScenario) -> object:
    marks = [] if scenario.name in FIRST_NAMES else [pytest.mark.series]
    return pytest.param(scenario, id=scenario.name, marks=marks)


def begin_of(scenario: PowerScenario) -> float:
    """Return the second at which the simulation begins, without training that the detector would forget."""
    begin, node = HOUR - WORKED_SECONDS, scenario.node
    seconds = range(int(begin))
    is_training = node.waiting is None and all(node.doing(gpu, t) is TRAINS for gpu in node.gpus for t in seconds)
    return begin if is_training else 0.0


@pytest.mark.parametrize("scenario", [row(scenario) for scenario in SCENARIOS])
def test_power_scenario(scenario: PowerScenario) -> None:
    played = play(scenario.node, scenario.seconds, scenario.settings, begin=begin_of(scenario))
    for (job_id, _), expected in zip(scenario.node.jobs, scenario.expected, strict=True):
        job = played[job_id]
        assert fold(job.states) == expected.states, job_id
        assert len(job.pages) == expected.page, job_id
        if expected.page:
            assert tuple(one.rank for one in job.verdict.named) == expected.named, job.verdict.message
            assert job.verdict.action.kind == expected.action, job.verdict.action
            assert job.paged_at - scenario.trouble_at <= expected.within_seconds

    looks = (look for job in played.values() for look in job.looks if scenario.node.waiting is None)
    for look in looks:  # a launcher, or a rank that has ended, runs no function of the user's program
        if all(rank.gone for rank in look.capture.ranks):
            continue
        assert_names_do_not_matter(look, SETTINGS)


def test_the_last_look_of_a_hang_is_over_shortly_before_the_job_ends_itself() -> None:
    (scenario,) = (one for one in HANG_SCENARIOS if one.name == "a hang until its timeout")
    job = play(scenario.node, scenario.seconds)["job"]
    last = job.looks[-1].capture
    left = UNIX_START + HOUR + 600 - last.started_unix_seconds
    assert 0 < left - last.duration_seconds < left <= 45
    assert len(last.ranks) == 8
    assert all(rank.rounds and not rank.gone for rank in last.ranks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("hours", [3, pytest.param(24, marks=pytest.mark.series)])
@pytest.mark.parametrize("scenario", [row(scenario) for scenario in PAUSE_SCENARIOS])
def test_a_pause_that_comes_back_costs_one_page_and_no_hang_is_lost(scenario: PowerScenario, hours: int) -> None:
    """Run the last `hours` before the fault, or the whole script. Pauses are counted only in the whole script."""
    begin = max(0.0, scenario.trouble_at // HOUR - hours) * HOUR
    job = play(scenario.node, scenario.seconds, begin=begin)["job"]
    (expected,) = scenario.expected
    if begin:
        assert without_counts(fold(job.states)) == without_counts(expected.states)
    else:
        assert fold(job.states) == expected.states
    assert len([at for at in job.pages if at < scenario.trouble_at]) == expected.pages_before
    after = [at - scenario.trouble_at for at in job.pages if at >= scenario.trouble_at]
    assert len(after) == expected.page
    assert all(seconds <= expected.within_seconds for seconds in after)
    if expected.page:
        assert tuple(one.rank for one in job.looks[-1].verdict.named) == expected.named


def without_counts(states: str) -> str:
    return re.sub(r" x\d+", "", states)


@pytest.mark.parametrize("scenario", PAUSE_SCENARIOS[:2], ids=lambda scenario: scenario.name)
def test_learned_pauses_do_not_depend_on_function_names(scenario: PowerScenario) -> None:
    seconds = 3 * HOUR
    pages = play(scenario.node, seconds)["job"].pages
    assert play(scenario.node, seconds, activities=Table(()))["job"].pages == pages
    assert len(pages) <= 1


def test_every_scenario_has_a_name_of_its_own_and_a_truth() -> None:
    assert len({scenario.name for scenario in ALL_SCENARIOS}) == len(ALL_SCENARIOS)
    assert {scenario.truth for scenario in PAUSE_SCENARIOS} == {"hang", "healthy"}
    assert {scenario.truth for scenario in HANG_SCENARIOS} == {"hang"}
    assert {scenario.truth for scenario in HEALTHY_SCENARIOS} == {"healthy"}
    assert not any(expected.page for scenario in HEALTHY_SCENARIOS for expected in scenario.expected)


@pytest.mark.parametrize(
    ("states", "line"),
    [
        (["a"], "a"),
        (["a", "b", "c"], "a → b → c"),
        (["a", "b", "a"], "a → b → a"),
        (["a", "b", "a", "b"], "a ⇄ b"),
        (["a", "b", "a", "b", "a"], "a ⇄ b"),
        (["s", "a", "b", "a", "b", "a", "c"], "s → a ⇄ b → c"),
        (["s", *"abc" * 3, "d"], "s → (a → b → c) x3 → d"),
        (["s", *"abc" * 3, "a"], "s → (a → b → c) x3 → a"),
    ],
)
def test_states_are_folded_to_one_line(states: list[str], line: str) -> None:
    assert fold(states) == line


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_folding_loses_no_kind_of_state(states: list[str]) -> None:
    assert set(re.findall("[abc]", fold(states))) == set(states)
