"""Jobs with progress counters in virtual time: verdicts in seconds, and no page for a job that works."""

from dataclasses import replace
from statistics import median

import pytest

from benchmarks.rank_programs import DEADLOCKS, GENERATES_LIGHTLY, HEALTHY, TRAINED_STEPS, Works
from tests.scenarios import power
from tests.scenarios.power import HEALTHY_SCENARIOS, HOUR, PAUSE_SCENARIOS, PowerScenario
from tests.scenarios.progress import HANGS, LOOK_ALIKES, Hang, Healthy
from tests.scenarios.simulation import SETTINGS, Node, Played, play
from tests.scenarios.test_power import begin_of, row

TRAINED_SECONDS = 1000.0


def played(node: Node, seconds: float, begin: float = 0.0) -> Played:
    four_ranks = replace(node, jobs=(("job", range(4)),))
    return play(four_ranks, seconds, SETTINGS, begin=begin, has_counters=True)["job"]


def play_hang(hang: Hang) -> Played:
    begin = 0.0 if "gap" in hang.name else HOUR - TRAINED_SECONDS
    return played(hang.node, HOUR + hang.page_within + 60, begin)


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.name)
def test_hang_is_suspected_in_seconds_and_pages_in_time(hang: Hang) -> None:
    job = play_hang(hang)
    assert job.suspected_at and 0 < job.suspected_at[-1] - HOUR <= hang.suspected_within
    assert any(HOUR < at < job.suspected_at[-1] for at in job.requested_at)
    assert len(job.pages) == 1 and job.pages[0] - HOUR <= hang.page_within
    assert job.states[-1] == hang.state
    assert job.verdict is not None and tuple(rank.rank for rank in job.verdict.named) == hang.named


def test_half_of_the_hangs_are_suspected_in_thirty_seconds() -> None:
    usual = [hang for hang in HANGS if "gap" not in hang.name][::5]
    assert median(play_hang(hang).suspected_at[-1] - HOUR for hang in usual) <= 30.0


@pytest.mark.parametrize("healthy", LOOK_ALIKES, ids=lambda healthy: healthy.name)
def test_look_alike_does_not_page(healthy: Healthy) -> None:
    job = played(healthy.node, healthy.seconds, healthy.begin)
    assert not job.pages
    assert job.states[-1] in ("training", "starting"), job.states


@pytest.mark.parametrize("hours", [2, pytest.param(24, marks=pytest.mark.series)])
@pytest.mark.parametrize("scenario", [row(scenario) for scenario in HEALTHY_SCENARIOS])
def test_healthy_job_with_counters_does_not_page(scenario: PowerScenario, hours: int) -> None:
    """Run the first hours. The trouble begins after one hour."""
    end = min(scenario.seconds, hours * HOUR)
    result = play(scenario.node, end, scenario.settings, begin=begin_of(scenario), has_counters=True)
    assert [job.pages for job in result.values()] == [[] for _ in result]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", PAUSE_SCENARIOS, ids=lambda scenario: scenario.name)
def test_pause_with_counters_pages_no_more_than_without(scenario: PowerScenario) -> None:
    begin = max(0.0, scenario.trouble_at // HOUR - 3) * HOUR
    (expected,) = scenario.expected
    job = play(scenario.node, scenario.seconds, begin=begin, has_counters=True)["job"]
    assert len([at for at in job.pages if at < scenario.trouble_at]) <= expected.pages_before


@pytest.mark.parametrize("library", ["nccl", pytest.param("gloo", marks=pytest.mark.series)])
@pytest.mark.parametrize("name", HEALTHY | DEADLOCKS)
def test_job_with_flight_recorders_pages_only_after_a_deadlock(name: str, library: str) -> None:
    for doing in (power.EVALUATES, GENERATES_LIGHTLY):
        job = played((HEALTHY | DEADLOCKS)[name](library, 4, Works(doing, 100)).node(), TRAINED_STEPS + 300.0)
        assert job.looks and [at - TRAINED_STEPS <= 60 for at in job.pages] == [True] * (name in DEADLOCKS)
