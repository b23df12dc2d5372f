"""The data files of the benchmarks have every scenario that exists, and the page shows what they hold."""

import platform
import re
import venv
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import results
from hangwatch import __version__
from tests.scenarios.crowds import CROWDS
from tests.scenarios.power import HANG_SCENARIOS, HEALTHY_SCENARIOS, PAUSE_SCENARIOS
from tests.scenarios.processes import DEMO_SCENARIOS, PROCESS_SCENARIOS


def test_the_results_have_every_scenario() -> None:
    neighbours = [one for crowd in CROWDS for one in crowd.neighbours]
    virtual = (*HANG_SCENARIOS, *HEALTHY_SCENARIOS, *PAUSE_SCENARIOS)
    real = (*DEMO_SCENARIOS, *PROCESS_SCENARIOS, *neighbours)
    for table, scenarios in zip(results.load("scenarios").details, (virtual, real), strict=True):
        played = {(row[0].partition(" (known to be wrong")[0], row[1]) for row in table.rows}
        assert played == {(one.name, one.truth) for one in scenarios}, "run `make scenarios`"


def test_the_day_has_every_scenario() -> None:
    scenarios = {one.name: one for one in (*HANG_SCENARIOS, *HEALTHY_SCENARIOS, *PAUSE_SCENARIOS)}
    expected = Counter(one.truth for one in scenarios.values())
    figures = results.load("day").figures
    assert {truth: figures[truth] for truth in expected} == expected, "run `python -m tests.scenarios.day --write`"


def test_the_pages_show_the_data_files() -> None:
    page, readme = results.PAGE.read_text(), results.README.read_text()
    assert results.make_readme(readme) == readme, "run `python -m benchmarks.results`"
    assert results.make_page(page) == page, "run `python -m benchmarks.results`"
    parts = re.findall(r"<!-- ([\w-]+): begin -->", page)
    assert sorted(parts) == results.names()


@pytest.mark.parametrize("name", results.names())
def test_a_data_file_has_commit_versions_and_the_goals_of_today(name: str) -> None:
    result = results.load(name)
    assert result.commit and result.machine and result.versions["hangwatch"]
    assert result.goals == results.GOALS.get(name, {})


@pytest.mark.parametrize(
    ("seconds", "missed"),
    [
        ({"seconds": 1.0}, ""),
        ({"seconds": 1.25}, "seconds: 1.25 > 1"),
        ({}, "seconds: not measured"),
    ],
)
def test_missed_goal_is_on_the_page_and_in_the_exit_code(
    seconds: dict[str, float], missed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(results.GOALS, "x", {"seconds": 1.0})
    assert results.report("x", figures=seconds) == bool(missed)
    page, errors = capsys.readouterr()
    assert ("Goal missed" in page, missed in page) == (bool(missed), True)
    assert errors == (f"x: goal missed: {missed}\n" if missed else "")


def test_versions_are_those_of_the_measured_python(tmp_path: Path) -> None:
    venv.create(tmp_path)
    assert results.find_versions(["/no/such"], tmp_path / "bin/python") == {"python": platform.python_version()}
    assert results.find_versions()["hangwatch"] == __version__


def test_a_part_of_the_page_is_renewed_alone() -> None:
    page = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n"
    assert results.renew(page, "x", "new\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no marks of the part 'y'"):
        results.renew(page, "y", "")
