"""No innocent rank is named when a known hang is altered: a few cases of `make robustness`."""

import json
from pathlib import Path

import pytest

from tests import robustness

CASES = tuple(robustness.known_cases())


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_no_form_of_a_known_hang_names_an_innocent_rank(case: robustness.Case) -> None:
    wrong = [one for one in robustness.vary(case) if one.innocents]
    assert not wrong, "\n".join(map(str, wrong))


def test_a_folder_of_cases_is_judged_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = []
    for rank in range(4):
        doing = ["read_shard (data.py:3)"] if rank == 2 else ["barrier (torch/distributed/distributed_c10d.py:4159)"]
        lines = ["Process 1: python train.py", "Python v3.11.7", "", 'Thread 1 (idle): "MainThread"']
        trace += [f"[node0:{rank}]{line}" for line in (*lines, *(f"    {frame}" for frame in doing))]
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "trace-node0.out").write_text("\n".join(trace))
    expect = tmp_path / "one" / "expect.json"

    expect.write_text(json.dumps({"odd_ranks": [2]}))
    (right,) = robustness.cases_of(tmp_path)
    assert not any(one.innocents for one in robustness.vary(right))
    assert {one.variation for one in robustness.vary(right)} == {
        "as it is",
        *robustness.VARIATIONS,
        "a text without prefixes",
    }

    expect.write_text(json.dumps({"odd_ranks": [3]}))
    assert robustness.main([str(tmp_path)]) == 1
    assert "NAMES AN INNOCENT RANK  one, as it is: " in capsys.readouterr().out
