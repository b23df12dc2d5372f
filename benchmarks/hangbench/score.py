"""Score a tool on hangbench. Needs only Python.

usage: score.py FOLDER COMMAND...

The command gets the folder of a case as its last argument, and prints an object: `named` and `first_look` are lists
of ranks, `hung` is true or false for a power trace. A command that fails, or prints something else, gets 0 points. A
right answer is 1 point. If no rank is guilty, silence is right. A guilty rank to check first is 0.5, silence 0, an
innocent named rank or a page for a healthy job -3. Prints the points of each kind of case.
"""

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RIGHT, CHECK_FIRST, SILENT, FAILED, WRONG = "right", "check first", "silent", "failed", "wrong"
POINTS = {RIGHT: 1.0, CHECK_FIRST: 0.5, SILENT: 0.0, FAILED: 0.0, WRONG: -3.0}


def judge(expected: dict, answer: object) -> str:
    """Return the outcome of one answer."""
    if not isinstance(answer, dict):
        return FAILED
    if "hung" in expected:
        said = answer.get("hung")
        return RIGHT if said is expected["hung"] else WRONG if said else SILENT
    try:
        guilty = set(expected["guilty"])
        named, first = (set(answer.get(field) or ()) for field in ("named", "first_look"))
    except TypeError:
        return FAILED
    if named:
        return RIGHT if named == guilty else WRONG if named - guilty else CHECK_FIRST
    if first and first <= guilty:
        return CHECK_FIRST
    return SILENT if guilty else RIGHT


def ask(command: list[str], case: Path) -> object:
    """Return the answer of the tool; None if it fails."""
    try:
        done = subprocess.run([*command, str(case)], capture_output=True, text=True, timeout=120, check=True)
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def score(folder: Path, command: list[str]) -> dict[str, Counter]:
    """Return how often each outcome occurs, by kind of case."""
    outcomes: dict[str, Counter] = defaultdict(Counter)
    files = sorted(folder.glob("*/*/expect.json"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = pool.map(lambda file: ask(command, file.parent), files)
        for file, answer in zip(files, answers, strict=True):
            outcomes[file.parents[1].name][judge(json.loads(file.read_text()), answer)] += 1
    return outcomes


def points(counts: Counter) -> float:
    """Return the points of some outcomes."""
    return sum(POINTS[outcome] * number for outcome, number in counts.items())


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    outcomes = score(Path(sys.argv[1]), sys.argv[2:])
    if not outcomes:
        sys.exit(f"{sys.argv[1]}: no cases; write them with: make hangbench")
    print(f"{'kind':12}" + "".join(f"{outcome:>13}" for outcome in POINTS) + f"{'points':>9}")
    for kind, counts in outcomes.items():
        print(f"{kind:12}" + "".join(f"{counts[outcome]:13}" for outcome in POINTS) + f"{points(counts):9.1f}")


if __name__ == "__main__":
    main()
