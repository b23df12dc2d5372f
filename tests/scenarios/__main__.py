"""Run every scenario and write the table of docs/measurements.md. `make scenarios` runs this."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests import measurements_page
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
        name = scenario.name + (f" (known to be wrong: {scenario.weakness})" if scenario.weakness else "")
        rows.append((name, scenario.truth, *paged))
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
    """Return the table row of a job.

    Raises SystemExit if the result is not the expected one, or if this machine cannot run the scenario.
    """
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


def _number(seconds: str) -> float:
    return float(seconds or 0)


def table(virtual: list[tuple[str, ...]], real: list[tuple[str, ...]]) -> str:
    """Return the Markdown table of both lists. Rows that differ only in their seconds, or in their names, are one row.

    A job that only trains next to a hang counts as healthy.
    """

    def count(rows: list[tuple[str, ...]]) -> str:
        hangs = sum(row[1] == "hang" and row[2] != "no" for row in rows)
        return f"{hangs} hangs and {len(rows) - hangs} healthy jobs"

    def fold(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        seconds: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            seconds.setdefault(row[:-1], []).append(row[-1])
        names: dict[tuple[str, ...], list[str]] = {}
        for (name, *result), values in seconds.items():
            ends = dict.fromkeys((min(values, key=_number), max(values, key=_number)))
            names.setdefault((*result, " to ".join(ends)), []).append(name)
        return [
            (measurements_page.list_names(alike, are_counted=result[:2] == ("healthy", "no")), *result)
            for result, alike in names.items()
        ]

    return (
        f"In virtual time, with the default settings: {count(virtual)}.\n\n"
        f"{measurements_page.table(COLUMNS, fold(virtual))}\n"
        f"With real processes, hold 3 s: {count(real)}.\n\n"
        f"{measurements_page.table(COLUMNS, fold(real))}"
    )


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
    measurements_page.write("scenarios", "make scenarios", table(virtual, real))


if __name__ == "__main__":
    main()
