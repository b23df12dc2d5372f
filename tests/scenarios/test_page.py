"""docs/scenarios.md shows every scenario there is, and none that is not."""

from __future__ import annotations

from tests.scenarios.__main__ import PAGE
from tests.scenarios.crowds import CROWDS
from tests.scenarios.power import HANG_SCENARIOS, HEALTHY_SCENARIOS, PAUSE_SCENARIOS
from tests.scenarios.processes import DEMO_SCENARIOS, PROCESS_SCENARIOS


def test_the_page_shows_every_scenario() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    shown = {(row[0].removeprefix("| ").partition(" (")[0], row[1], row[2]) for row in rows}
    shown -= {("scenario", "what happens", "truth"), ("---", "---", "---")}
    neighbours = (one for crowd in CROWDS for one in crowd.neighbours)
    known = (*HANG_SCENARIOS, *HEALTHY_SCENARIOS, *PAUSE_SCENARIOS, *DEMO_SCENARIOS, *PROCESS_SCENARIOS, *neighbours)
    assert shown == {(scenario.name, scenario.what, scenario.truth) for scenario in known}, "run `make scenarios`"
