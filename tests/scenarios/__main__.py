"""Run every scenario, and keep the results as benchmarks/results/scenarios.json. `make scenarios` runs this."""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import results
from tests.scenarios.crowds import CROWDS
from tests.scenarios.power import HANG_SCENARIOS, HEALTHY_SCENARIOS, PAUSE_SCENARIOS, Expected, PowerScenario
from tests.scenarios.processes import DEMO_SCENARIOS, PROCESS_SCENARIOS, ProcessScenario
from tests.scenarios.simulation import play
from tests.scenarios.stage import Crowd, Observed, problems

COLUMNS = ("scenario", "truth", "page", "seconds to the page")


def power_rows(scenario: PowerScenario) -> list[tuple[str, ...]]:
    """Run the scenario; return one table row per job."""
    played = play(scenario.node, scenario.seconds, scenario.settings)
    rows: list[tuple[str, ...]] = []
    for job_id, _ in scenario.node.jobs:
        job = played[job_id]
        verdict = job.looks[-1].verdict if scenario in PAUSE_SCENARIOS else job.verdict
        named = tuple(one.rank for one in verdict.named) if verdict and job.paged_at is not None else ()
        seconds = next((at - scenario.trouble_at for at in job.pages if at >= scenario.trouble_at), None)
        paged = _page(job.paged_at is not None, named, seconds if scenario.truth == "hang" else None)
        rows.append((scenario.name, scenario.truth, *paged))
    return rows


def process_rows(scenario: ProcessScenario) -> list[tuple[str, ...]]:
    """Run the scenario; return one table row per job."""
    with tempfile.TemporaryDirectory() as directory:
        observed = scenario.run(Path(directory) / "state")
    return [
        _process_row(scenario.name, scenario.truth, *pair) for pair in zip(scenario.expected, observed, strict=True)
    ]


def crowd_rows(crowd: Crowd) -> list[tuple[str, ...]]:
    """Run the jobs of the crowd; return one table row per job."""
    with tempfile.TemporaryDirectory() as directory:
        observed = crowd.run(Path(directory) / "state")
    return [
        _process_row(one.name, one.truth, one.expected, got)
        for one, got in zip(crowd.neighbours, observed, strict=True)
    ]


def _process_row(name: str, truth: str, expected: Expected, got: Observed) -> tuple[str, ...]:
    """Return the table row of a job. Raises SystemExit if it is not as expected or cannot run here."""
    wrong = got.unavailable or "; ".join(problems(expected, got))
    if wrong:
        raise SystemExit(f"{name}: {wrong}")
    seconds = got.seconds if expected.page else None
    return (name, truth, *_page(got.pages > 0, got.named, seconds))


def _page(paged: bool, named: tuple[int | None, ...], seconds: float | None) -> tuple[str, str]:
    if not paged:
        return "no", ""
    named_ranks = f"rank {', '.join(map(str, named))}" if named else "no rank named"
    return named_ranks, "" if seconds is None else f"{seconds:.0f}"


def describe(where: str, rows: list[tuple[str, ...]]) -> str:
    """Return the numbers of hangs and healthy jobs as text. A job that only trains next to a hang counts as healthy."""
    hangs = sum(row[1] == "hang" and row[2] != "no" for row in rows)
    return f"{where}: {hangs} hangs and {len(rows) - hangs} healthy jobs, all as expected."


def main() -> None:
    played = (*HANG_SCENARIOS, *HEALTHY_SCENARIOS, *PAUSE_SCENARIOS)
    virtual = [row for scenario in played for row in power_rows(scenario)]
    real = []
    for scenario in (*DEMO_SCENARIOS, *PROCESS_SCENARIOS):
        print(f"--- {scenario.name}", file=sys.stderr)
        real += process_rows(scenario)
    for crowd in CROWDS:
        print(f"--- {crowd.name}", file=sys.stderr)
        real += crowd_rows(crowd)
    summary = (
        describe("In virtual time, default settings", virtual),
        describe("With real processes, hold 1.5 or 3 s", real),
    )
    details = [results.Table(COLUMNS, tuple(rows)) for rows in (virtual, real)]
    results.report("scenarios", summary=summary, details=details, command="make scenarios", is_kept=True)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tests.scenarios", description="Play all scenarios.").parse_args()
    main()
