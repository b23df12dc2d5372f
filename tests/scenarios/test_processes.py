"""Hangs and healthy look-alikes as real processes. The demo's scenarios are in tests/integration/test_demo.py."""

from pathlib import Path

import pytest

from tests.scenarios.names import assert_names_do_not_matter
from tests.scenarios.processes import PROCESS_SCENARIOS, ProcessScenario
from tests.scenarios.stage import problems, settings

# For each of these, `make test` runs another scenario that has the same states for the same reason.
SERIES = frozenset(
    {
        "victims in a function of any name",
        *(f"a thread blocked in open, awaited by a {way}" for way in ("queue", "loop")),
        *(f"generation over HTTP, awaited by a {way}" for way in ("pool", "loop")),
        "a child awaited by an event loop",
        "remote evaluation",
        "asks every two seconds",
        "evaluation on one rank",
        "starved but moving loader",
        "first-step compile",
        "a server of one's own without requests",
    }
)


def row(scenario: ProcessScenario) -> object:
    return pytest.param(scenario, id=scenario.name, marks=[pytest.mark.series] if scenario.name in SERIES else [])


def test_the_scenarios_of_the_series_exist() -> None:
    assert {scenario.name for scenario in PROCESS_SCENARIOS} >= SERIES


@pytest.mark.parametrize("scenario", [row(scenario) for scenario in PROCESS_SCENARIOS])
def test_process_scenario(scenario: ProcessScenario, tmp_path: Path) -> None:
    seen = scenario.run(tmp_path / "state")
    assert [problems(*pair) for pair in zip(scenario.expected, seen, strict=True)] == [[] for _ in seen]
    for look in (look for one in seen for look in one.looks):
        assert_names_do_not_matter(look, settings(tmp_path))
