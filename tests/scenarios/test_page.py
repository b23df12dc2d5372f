"""docs/measurements.md has every scenario that exists, and no other."""

from __future__ import annotations

from tests import measurements_page
from tests.scenarios.crowds import CROWDS
from tests.scenarios.power import HANG_SCENARIOS, HEALTHY_SCENARIOS, PAUSE_SCENARIOS
from tests.scenarios.processes import DEMO_SCENARIOS, PROCESS_SCENARIOS


def test_the_page_shows_every_scenario() -> None:
    lines = measurements_page.part("scenarios").splitlines()
    rows = [line.removeprefix("| ").split(" | ") for line in lines if line.startswith("| ")]
    shown = {(name.partition(" (")[0], row[1]) for row in rows for name in row[0].split("; ")} - {
        ("scenario", "truth"),
        ("---", "---"),
    }
    neighbours = (one for crowd in CROWDS for one in crowd.neighbours)
    known = (*HANG_SCENARIOS, *HEALTHY_SCENARIOS, *PAUSE_SCENARIOS, *DEMO_SCENARIOS, *PROCESS_SCENARIOS, *neighbours)
    assert shown == {(scenario.name, scenario.truth) for scenario in known}, "run `make scenarios`"
