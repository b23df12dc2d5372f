"""The scorer of hangbench, and the cases that it writes."""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.commands import finished
from tests.conftest import wait_for

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "hangbench"))

import baselines  # noqa: E402
import score  # noqa: E402
import write_cases  # noqa: E402


@pytest.fixture(scope="module")
def hangbench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hangbench")
    write_cases.write(folder)
    return folder


@pytest.mark.parametrize(
    ("guilty", "answer", "outcome"),
    [
        ([2], {"named": [2]}, "right"),
        ([2], {"named": [3]}, "wrong"),
        ([2], {"named": [2, 3]}, "wrong"),
        ([2], {"named": [99]}, "wrong"),
        ([2, 3], {"named": [2]}, "check first"),
        ([2], {"named": [], "check_first": [2]}, "check first"),
        ([2], {"check_first": [1]}, "misleads"),
        ([2], {"check_first": [1, 2]}, "check first"),
        ([2, 3], {"check_first": [1, 2]}, "check first"),
        ([2], {"check_first": [0, 1]}, "misleads"),
        ([2], {"check_first": [1, 2, 3]}, "misleads"),
        ([], {"check_first": [1]}, "misleads"),
        ([2], {}, "silent"),
        ([], {"named": [1]}, "wrong"),
        ([], {}, "right"),
        ([], None, "failed"),
        ([2], {"named": 2}, "failed"),
        ([2], {"named": "2"}, "failed"),
        ([2], {"named": [[2]]}, "failed"),
        ([1], {"named": [True]}, "failed"),
    ],
)
def test_wrong_name_costs_more_than_silence(guilty: list[int], answer: dict[str, object] | None, outcome: str) -> None:
    assert score.judge({"guilty": guilty}, answer) == outcome
    assert score.POINTS["wrong"] < score.POINTS["silent"] < score.POINTS["check first"] < score.POINTS["right"]


@pytest.mark.parametrize(
    ("hung", "answered", "outcome"),
    [
        (True, True, "right"),
        (False, True, "wrong"),
        (True, None, "silent"),
        (True, False, "silent"),
        (True, 7, "failed"),
    ],
)
def test_page_for_a_healthy_job_is_wrong(hung: bool, answered: object, outcome: str) -> None:
    assert score.judge({"hung": hung}, {"hung": answered}) == outcome


PRINTS_THEN = "import os, sys, time; print('{\"named\": [2]}', flush=True); "


@pytest.mark.parametrize(
    ("program", "longest_seconds"),
    [
        (PRINTS_THEN + "sys.exit('no idea')", 120.0),
        (PRINTS_THEN + "os.kill(os.getpid(), 9)", 120.0),
        (PRINTS_THEN + "time.sleep(600)", 0.5),
        (PRINTS_THEN + "os.close(1); time.sleep(600)", 0.5),
        ("print('rank 2 is late')", 120.0),
        ("print('[' * 100000)", 120.0),
        ("import sys; sys.stdout.buffer.write(bytes(range(256)))", 120.0),
        ("while True: print(' ' * 65536)", 120.0),
    ],
    ids=["error", "crash", "hang", "hang without output", "words", "nested", "bytes", "endless output"],
)
def test_tool_that_fails_has_no_answer(program: str, longest_seconds: float, tmp_path: Path) -> None:
    assert score.ask([sys.executable, "-c", program], tmp_path, longest_seconds) is None


def test_tool_leaves_no_child_behind(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    case = tmp_path / "case"
    case.mkdir()
    assert score.ask(["sh", "-c", f"exec 3>{fifo}; sleep 600 >&3 & echo '{{}}'"], case) == {}

    def has_no_writer() -> bool:
        try:
            return os.read(reader, 1) == b""
        except BlockingIOError:
            return False

    wait_for(has_no_writer, "the end of the child", 10.0)
    os.close(reader)


def test_tool_is_scored_by_kind_of_case(tmp_path: Path) -> None:
    case = tmp_path / "cases" / "000"
    case.mkdir(parents=True)
    for number, text in enumerate(("a", "a", "b")):
        (case / f"rank-{number}.txt").write_text(f"Thread 7 (idle)\n    {text} (train.py:1)\n")
    (tmp_path / "answers.json").write_text(json.dumps({"000": {"kind": "stacks", "guilty": [2]}}))
    tool = [sys.executable, baselines.__file__, "smallest-group"]
    asked = partial(score.ask, tool)
    assert score.score(tmp_path, asked) == {"stacks": {"right": 1}}
    assert score.score(tmp_path, asked, ["traces"]) == {}
    plain = [sys.executable, "-I", "-S", score.__file__, str(tmp_path), *tool]  # without installed packages
    printed = finished(*plain, check=True).stdout
    assert printed.splitlines()[1].split() == ["stacks", "1", "0", "0", "0", "0", "0", "1.0"]
    failing = (partial(score.ask, [command]) for command in ("false", "/no/such"))
    assert [score.score(tmp_path, tool) for tool in failing] == [{"stacks": {"failed": 1}}] * 2


def test_case_has_only_evidence(hangbench: Path) -> None:
    answers = score.load_answers(hangbench)
    places = sorted((hangbench / "cases").iterdir())
    assert [place.name for place in places] == sorted(answers) == [f"{number:03}" for number in range(len(answers))]
    assert {path.stat().st_mtime for path in hangbench.glob("cases/**/*")} == {write_cases.TAKEN_UNIX_SECONDS}
    for place in places:
        files = {re.sub(r"-\d+", "-N", file.name): file for file in place.iterdir()}
        assert set(files) in ({"rank-N.txt"}, {"fr-rank-N.json", "taken.json"}, {"power.csv"})
        text = "".join(file.read_text() for file in place.iterdir())
        assert not any(word in text for word in (answers[place.name]["name"], "guilty", "hung", "healthy"))


def test_kinds_are_mixed(hangbench: Path) -> None:
    """The cases of a kind are in no part of the numbers."""
    kinds = [one["kind"] for one in score.load_answers(hangbench).values()]
    half = len(kinds) // 2
    for kind in set(kinds):
        assert 0.3 < kinds[:half].count(kind) / kinds.count(kind) < 0.7


def _sizes(case: Path) -> list[tuple[int, int]]:
    return [(path.stat().st_size, baselines._rank(path)) for path in sorted(case.glob("*rank-*"))]


def _name_lone_size(case: Path) -> list[int]:
    sizes = [size for size, _ in _sizes(case)]
    lone = [rank for size, rank in _sizes(case) if sizes.count(size) == 1]
    return lone if len(lone) == 1 < len(sizes) else []


GUESSES: dict[str, Callable[[Path], list[int]]] = {
    "smallest file": lambda case: [rank for size, rank in _sizes(case) if size < max(_sizes(case))[0]][:1],
    "largest file": lambda case: [rank for size, rank in _sizes(case) if size > min(_sizes(case))[0]][:1],
    "file of another size": _name_lone_size,
    "rank 0": lambda _case: [0],
    "rank 2": lambda _case: [2],
    "rank 3": lambda _case: [3],
    "last rank": lambda case: [rank for _, rank in _sizes(case)][-1:],
    "by the number of the case": lambda case: [int(case.name) % 4],
}


@pytest.mark.parametrize("guess", GUESSES)
def test_guess_by_names_and_sizes_is_not_better_than_silence(guess: str, hangbench: Path) -> None:
    gained: Counter[str] = Counter()
    for number, expected in score.load_answers(hangbench).items():
        if expected["kind"] != "traces":
            answer = {"named": GUESSES[guess](hangbench / "cases" / number)}
            points = [score.POINTS[score.judge(expected, one)] for one in (answer, {})]
            gained[expected["kind"]] += points[0] - points[1]
    assert len(gained) == 4
    assert max(gained.values()) <= 0


def test_size_of_a_trace_tells_nothing(hangbench: Path) -> None:
    """All traces with the same number of GPUs have the same size."""
    sizes: dict[int, set[int]] = {}
    for place in (hangbench / "cases").iterdir():
        if (trace := place / "power.csv").exists():
            gpus = {line.split(",")[1] for line in trace.read_text().splitlines()[1:17]}
            sizes.setdefault(len(gpus), set()).add(trace.stat().st_size)
    assert all(len(of_size) == 1 for of_size in sizes.values())


def test_low_power_at_the_end_of_a_trace_tells_nothing(hangbench: Path) -> None:
    points = 0.0
    for number, expected in score.load_answers(hangbench).items():
        if expected["kind"] == "traces":
            lines = (hangbench / "cases" / number / "power.csv").read_text().splitlines()[1:]
            watts = [float(line.split(",")[2]) for line in lines]
            points += score.POINTS[score.judge(expected, {"hung": min(watts[-16:]) < max(watts) / 2})]
    assert points <= 0


def test_score_does_not_depend_on_the_time_of_the_copy(hangbench: Path) -> None:
    answers = score.load_answers(hangbench)
    number = next(number for number, one in answers.items() if one["name"] == "own code")
    answer = score.ask([sys.executable, baselines.__file__, "hangwatch"], hangbench / "cases" / number)
    assert score.judge(answers[number], answer) == "check first"
