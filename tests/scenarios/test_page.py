"""docs/measurements.md has every scenario that exists, and no other."""

from __future__ import annotations

import re

from tests import measurements_page
from tests.scenarios.crowds import CROWDS
from tests.scenarios.power import HANG_SCENARIOS, HEALTHY_SCENARIOS, PAUSE_SCENARIOS
from tests.scenarios.processes import DEMO_SCENARIOS, PROCESS_SCENARIOS

MORE = re.compile(r"(\d+) more")


def test_the_page_counts_every_scenario() -> None:
    """A row lists three names and the number of its others. A scenario of several jobs may be in several rows."""
    lines = measurements_page.part("scenarios").splitlines()
    rows = [line.removeprefix("| ").split(" | ") for line in lines if line.startswith("| ")]
    jobs = [(name.partition(" (")[0], row[1]) for row in rows for name in row[0].split("; ")]
    jobs = [job for job in jobs if job not in (("scenario", "truth"), ("---", "---"))]
    neighbours = [one for crowd in CROWDS for one in crowd.neighbours]
    virtual = (*HANG_SCENARIOS, *HEALTHY_SCENARIOS, *PAUSE_SCENARIOS)
    real = (*DEMO_SCENARIOS, *PROCESS_SCENARIOS, *neighbours)
    named = {job for job in jobs if not MORE.fullmatch(job[0])}
    assert named <= {(one.name, one.truth) for one in (*virtual, *real)}, "run `make scenarios`"
    for truth in ("hang", "healthy"):
        numbers = [int(match[1]) if (match := MORE.fullmatch(name)) else 1 for name, of in jobs if of == truth]
        fewest = sum(len({one.name for one in table if one.truth == truth}) for table in (virtual, real))
        assert fewest <= sum(numbers) <= fewest + 10, f"{truth}: run `make scenarios`"
