"""The scorer of hangbench, and the cases that it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "hangbench"))

import baselines  # noqa: E402
import score  # noqa: E402


@pytest.mark.parametrize(
    ("guilty", "answer", "outcome"),
    [
        ([2], {"named": [2]}, "right"),
        ([2], {"named": [3]}, "wrong"),
        ([2], {"named": [2, 3]}, "wrong"),
        ([2, 3], {"named": [2]}, "check first"),
        ([2], {"named": [], "first_look": [2]}, "check first"),
        ([2], {"first_look": [1]}, "silent"),
        ([], {"named": [1]}, "wrong"),
        ([], {}, "right"),
        ([], None, "failed"),
        ([2], {"named": 2}, "failed"),
        ([2], {"named": [[2]]}, "failed"),
    ],
)
def test_wrong_name_costs_more_than_silence(guilty: list[int], answer: dict[str, object] | None, outcome: str) -> None:
    assert score.judge({"guilty": guilty}, answer) == outcome
    assert score.POINTS["wrong"] < score.POINTS["silent"] < score.POINTS["check first"] < score.POINTS["right"]


@pytest.mark.parametrize(
    ("hung", "answered", "outcome"), [(True, True, "right"), (False, True, "wrong"), (True, None, "silent")]
)
def test_page_for_a_healthy_job_is_wrong(hung: bool, answered: bool | None, outcome: str) -> None:
    assert score.judge({"hung": hung}, {"hung": answered}) == outcome


def test_tool_is_scored_by_kind_of_case(tmp_path: Path) -> None:
    for number, text in enumerate(("a", "a", "b")):
        case = tmp_path / "stacks" / "one"
        case.mkdir(parents=True, exist_ok=True)
        (case / f"rank-{number}.txt").write_text(f"Thread 7 (idle)\n    {text} (train.py:1)\n")
    (case / "expect.json").write_text(json.dumps({"guilty": [2]}))
    assert baselines.name_smallest_group(case) == {"named": [2]}
    tool = [sys.executable, baselines.__file__, "smallest-group"]
    assert score.score(tmp_path, tool) == {"stacks": {"right": 1}}
    assert score.score(tmp_path, ["false"]) == score.score(tmp_path, ["/no/such"]) == {"stacks": {"failed": 1}}
