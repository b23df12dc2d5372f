"""Score a tool on hangbench. Needs only Python.

usage: score.py FOLDER COMMAND...

The command gets the folder of a case as its last argument, and prints an object: `named` and `first_look` are lists
of ranks, `hung` is true or false for a power trace. Output that is no object is silence. A right answer is 1 point. If
no rank is guilty, silence is right. A guilty rank to check first is 0.5, silence 0, an innocent named rank or a page
for a healthy job -3. Prints the points of each kind of case.
"""

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RIGHT, CHECK_FIRST, SILENT, WRONG = "right", "check first", "silent", "wrong"
POINTS = {RIGHT: 1.0, CHECK_FIRST: 0.5, SILENT: 0.0, WRONG: -3.0}


def judge(expected: dict, answer: dict) -> str:
    """Return the outcome of one answer."""
    if "hung" in expected:
        said = answer.get("hung")
        return RIGHT if said is expected["hung"] else WRONG if said else SILENT
    guilty, named, first = (
        set(numbers or ()) for numbers in (expected["guilty"], answer.get("named"), answer.get("first_look"))
    )
    if named:
        return RIGHT if named == guilty else WRONG if named - guilty else CHECK_FIRST
    if first and first <= guilty:
        return CHECK_FIRST
    return SILENT if guilty else RIGHT


def ask(command: list[str], case: Path) -> dict:
    """Return the answer of the tool; {} if it gives none."""
    done = subprocess.run([*command, str(case)], capture_output=True, text=True, timeout=120, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


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
    print(f"{'kind':12}" + "".join(f"{outcome:>13}" for outcome in POINTS) + f"{'points':>9}")
    for kind, counts in score(Path(sys.argv[1]), sys.argv[2:]).items():
        print(f"{kind:12}" + "".join(f"{counts[outcome]:13}" for outcome in POINTS) + f"{points(counts):9.1f}")


if __name__ == "__main__":
    main()
