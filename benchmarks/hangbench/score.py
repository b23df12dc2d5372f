"""Score a tool on hangbench. Needs only Python.

usage: score.py FOLDER COMMAND...

The command gets the folder of a case as its last argument, and prints an object: `named` and `check_first` are lists
of ranks, `hung` is true or false for a power trace. The folder is a fresh copy: its name and the times of its files
tell nothing. A command that ends with an error, takes two minutes, prints more than a MiB or anything else fails.

A right answer is 1 point. If no rank is guilty, an answer without ranks is right. If some guilty ranks are named, or
only guilty ranks are to be checked first, or a pair with a guilty rank, that is 0.5. Silence, a failure, and other
ranks to check first are 0. An innocent named rank, one that does not exist, and a page for a healthy job are -3. Prints
the points by kind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

RIGHT, CHECK_FIRST, SILENT, MISLEADS, WRONG, FAILED = "right", "check first", "silent", "misleads", "wrong", "failed"
POINTS = {RIGHT: 1.0, CHECK_FIRST: 0.5, SILENT: 0.0, MISLEADS: 0.0, WRONG: -3.0, FAILED: 0.0}
LONGEST_SECONDS = 120.0
MOST_BYTES = 1 << 20


def judge(expected: dict, answer: object) -> str:
    """Return the outcome of one answer."""
    if not isinstance(answer, dict):
        return FAILED
    if "hung" in expected:
        hung = answer.get("hung")
        if hung not in (True, False, None):
            return FAILED
        return SILENT if hung is None else RIGHT if hung == expected["hung"] else WRONG if hung else SILENT
    named, first = (_read_ranks(answer.get(field)) for field in ("named", "check_first"))
    if named is None or first is None:
        return FAILED
    guilty = set(expected["guilty"])
    if named:
        return RIGHT if named == guilty else WRONG if named - guilty else CHECK_FIRST
    if first:
        return CHECK_FIRST if first <= guilty or (len(first) == 2 and first & guilty) else MISLEADS
    return SILENT if guilty else RIGHT


def _read_ranks(ranks: object) -> set[int] | None:
    """Return the ranks of a list; None if it is not a list of numbers."""
    if ranks is None:
        return set()
    return set(ranks) if isinstance(ranks, list) and all(type(rank) is int for rank in ranks) else None


def ask(command: list[str], case: Path, longest_seconds: float = LONGEST_SECONDS) -> object:
    """Return the answer of the tool on a copy of the case; None if it fails."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = shutil.copytree(case, Path(folder) / "case", copy_function=shutil.copyfile)
        try:
            return json.loads(_run([*command, str(copy)], time.monotonic() + longest_seconds))
        except (OSError, ValueError, RecursionError, subprocess.SubprocessError):
            return None


def _run(command: list[str], deadline: float) -> bytes:
    """Return the output of a command. Its process group is killed at the end, so that it leaves no process behind.

    Raises OSError, ValueError or SubprocessError if it fails, takes too long or prints too much.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    output = bytearray()
    with process, process.stdout:
        try:
            while len(output) <= MOST_BYTES:
                if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise TimeoutError
                if not (piece := os.read(process.stdout.fileno(), 1 << 16)):
                    break
                output += piece
            else:
                raise ValueError(f"more than {MOST_BYTES} bytes")
            process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return bytes(output)


def load_answers(folder: Path) -> dict[str, dict]:
    """Return the right answers by the number of the case: its kind, its name, and `guilty` or `hung`."""
    return json.loads((folder / "answers.json").read_text())


def score(
    folder: Path, answer_case: Callable[[Path], object], kinds: Collection[str] | None = None
) -> dict[str, Counter]:
    """Return how often each outcome occurs, by kind of case. `answer_case` gets the folder of a case."""
    outcomes: dict[str, Counter] = defaultdict(Counter)
    expected = {number: one for number, one in load_answers(folder).items() if kinds is None or one["kind"] in kinds}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = pool.map(lambda number: answer_case(folder / "cases" / number), expected)
        for one, answer in zip(expected.values(), answers, strict=True):
            outcomes[one["kind"]][judge(one, answer)] += 1
    return dict(sorted(outcomes.items()))


def points(counts: Counter) -> float:
    """Return the points of some outcomes."""
    return sum(POINTS[outcome] * number for outcome, number in counts.items())


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    if not (folder / "answers.json").exists():
        sys.exit(f"{folder}: no cases; write them with: make hangbench")
    print(f"{'kind':12}" + "".join(f"{outcome:>13}" for outcome in POINTS) + f"{'points':>9}")
    for kind, counts in score(folder, partial(ask, sys.argv[2:])).items():
        print(f"{kind:12}" + "".join(f"{counts[outcome]:13}" for outcome in POINTS) + f"{points(counts):9.1f}")


if __name__ == "__main__":
    main()
