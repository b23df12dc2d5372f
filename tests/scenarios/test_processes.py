"""Hangs and healthy look-alikes played by real processes; the demo's own are in tests/integration/test_demo.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.names import assert_names_do_not_matter
from tests.scenarios.processes import PROCESS_SCENARIOS, ProcessScenario
from tests.scenarios.stage import problems, settings


@pytest.mark.parametrize("scenario", PROCESS_SCENARIOS, ids=lambda scenario: scenario.name)
def test_process_scenario(scenario: ProcessScenario, tmp_path: Path) -> None:
    seen = scenario.run(tmp_path / "state")
    assert [problems(*pair) for pair in zip(scenario.expected, seen, strict=True)] == [[] for _ in seen]
    for look in (look for one in seen for look in one.looks):
        assert_names_do_not_matter(look, settings(tmp_path))
