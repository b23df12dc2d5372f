"""Hangs and healthy look-alikes played by real processes; the demo's own are in tests/integration/test_demo.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.processes import PROCESS_SCENARIOS, ProcessScenario, problems


@pytest.mark.parametrize("scenario", PROCESS_SCENARIOS, ids=lambda scenario: scenario.name)
def test_process_scenario(scenario: ProcessScenario, tmp_path: Path) -> None:
    assert problems(scenario, scenario.run(tmp_path / "state")) == []
