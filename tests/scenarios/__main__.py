"""Plays every scenario and writes docs/scenarios.md: `make scenarios`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.scenarios.crowds import CROWDS
from tests.scenarios.power import HANG_SCENARIOS, HEALTHY_SCENARIOS, PAUSE_SCENARIOS, Expected, PowerScenario
from tests.scenarios.processes import DEMO_SCENARIOS, PROCESS_SCENARIOS, ProcessScenario
from tests.scenarios.simulation import fold, play
from tests.scenarios.stage import Crowd, Observed, problems

PAGE = Path(__file__).parents[2] / "docs" / "scenarios.md"
HEAD = """\
# Hangs and healthy look-alikes

Written by `make scenarios`, which plays every scenario and shows what hangwatch made of it; the same scenarios are
tests (`tests/scenarios/`, `tests/integration/test_demo.py`). Seconds run from the last progress of the job to the page.

`a ⇄ b` is going to and fro. A job in `suspected` has had its stacks taken; only `hung`, and `stalled` after its hold,
page.
"""
VIRTUAL = """
## In virtual time, with the default settings

What each of eight ranks does second by second is scripted: stacks, CPU and I/O counters, GPU power. The detector, the
grouping and the verdict are the real ones. Hold 120 s, rounds 5 s apart.
"""
REAL = """
## With real processes

Real ranks, loaders and launchers, the real daemon, real py-spy; only GPU power is simulated, and follows what the ranks
do. Hold 3 s, `stalled_hold_seconds` 6, rounds 1 s apart. `demo:` rows are `hangwatch demo --scenario NAME --seed 1`. From "a
pause that comes back" on, jobs are played at once on one node; to "ranks that come late" the `stalled_hold_seconds` are 12.
"""
WEAK = """
## What is not yet as it should be

These rows are played too, and their tests are expected to fail.
"""
COLUMNS = ("scenario", "what happens", "truth", "states", "page", "named", "seconds to the page")


def power_rows(scenario: PowerScenario) -> list[tuple[str, ...]]:
    """One line per job."""
    played = play(scenario.node, scenario.seconds, scenario.settings)
    several = len(scenario.node.jobs) > 1
    rows = []
    for job_id, _ in scenario.node.jobs:
        job = played[job_id]
        verdict = job.looks[-1].verdict if scenario in PAUSE_SCENARIOS else job.verdict
        named = tuple(one.rank for one in verdict.named) if verdict and job.paged_at is not None else ()
        seconds = next((at - scenario.trouble_at for at in job.pages if at >= scenario.trouble_at), None)
        paged = _page(job.paged_at is not None, named, seconds if scenario.truth == "hang" else None)
        name = f"{scenario.name} ({job_id})" if several else scenario.name
        rows.append((name, scenario.what, scenario.truth, fold(job.states), *paged))
    return rows


def process_rows(scenario: ProcessScenario) -> list[tuple[str, ...]]:
    """One line per job."""
    with tempfile.TemporaryDirectory() as directory:
        observed = scenario.run(Path(directory) / "state")
    several = len(observed) > 1
    return [
        _process_row(
            scenario.name, scenario.what, scenario.truth, *pair, f" ({at} of {len(observed)})" if several else ""
        )
        for at, pair in enumerate(zip(scenario.expected, observed, strict=True), 1)
    ]


def crowd_rows(crowd: Crowd) -> list[tuple[str, ...]]:
    """One line per job."""
    with tempfile.TemporaryDirectory() as directory:
        observed = crowd.run(Path(directory) / "state")
    return [
        _process_row(one.name, one.what, one.truth, one.expected, got)
        for one, got in zip(crowd.neighbours, observed, strict=True)
    ]


def _process_row(name: str, what: str, truth: str, expected: Expected, got: Observed, job: str = "") -> tuple[str, ...]:
    """Raises SystemExit when it went otherwise than expected, or cannot be played here."""
    wrong = got.unavailable or "; ".join(problems(expected, got))
    if wrong:
        raise SystemExit(f"{name}: {wrong}")
    states = fold(list(got.states)) if got.found else "no job"
    seconds = got.seconds if expected.page else None
    return (name + job, what, truth, states, *_page(got.pages > 0, got.named, seconds))


def _page(paged: bool, named: tuple[int | None, ...], seconds: float | None) -> tuple[str, str, str]:
    if not paged:
        return "no", "", ""
    who = f"rank {', '.join(map(str, named))}" if named else "nobody"
    return "yes", who, "" if seconds is None else f"{seconds:.0f}"


def counted(virtual: list[tuple[str, ...]], real: list[tuple[str, ...]]) -> str:
    """How many of each there are, jobs that only train beside a hang among the healthy ones."""

    def count(rows: list[tuple[str, ...]]) -> str:
        hangs = sum(row[2] == "hang" and row[4] == "yes" for row in rows)
        return f"{hangs} hangs and {len(rows) - hangs} healthy look-alikes"

    return f"\nIn virtual time {count(virtual)}; with real processes {count(real)}.\n"


def table(rows: list[tuple[str, ...]]) -> str:
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    virtual = [*HANG_SCENARIOS, *HEALTHY_SCENARIOS, *PAUSE_SCENARIOS]
    strong = [row for scenario in virtual if not scenario.weakness for row in power_rows(scenario)]
    weak = [row for scenario in virtual if scenario.weakness for row in power_rows(scenario)]
    real = []
    for scenario in (*DEMO_SCENARIOS, *PROCESS_SCENARIOS):
        print(f"--- {scenario.name}", file=sys.stderr)
        real += process_rows(scenario)
    for crowd in CROWDS:
        print(f"--- {crowd.name}", file=sys.stderr)
        real += crowd_rows(crowd)
    text = f"{HEAD}{counted(strong + weak, real)}{VIRTUAL}\n{table(strong)}{REAL}\n{table(real)}"
    if weak:
        whys = "".join(f"* {scenario.name}: {scenario.weakness}.\n" for scenario in virtual if scenario.weakness)
        text += f"{WEAK}\n{table(weak)}\n{whys}"
    PAGE.write_text(text)
    print(f"{PAGE}: {len(strong) + len(weak) + len(real)} rows", file=sys.stderr)


if __name__ == "__main__":
    main()
