"""Write the cases of hangbench: write_cases.py FOLDER.

FOLDER/cases has a folder for each case, FOLDER/answers.json the right answers. The cases are numbered in a shuffled
order that is always the same, and all files have the same time, so neither names nor times tell an answer.

The stacks are those of tests/data/hangs.toml. The recorder dumps are drawn: jobs in which one rank or two are in their
own code, skip a collective, or in which all have joined; in a kind of their own, jobs in which a rank that waits has
enqueued as few collectives of the default group as the rank for which it waits. All files of such a case have the same
size. The traces are runs of benchmarks/detection.py, all of the same length. A hang or a healthy pause ends them,
because a trace that goes on shows its answer. Exception: after a pause that begins the job, the job trains.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import detection  # noqa: E402
from hangwatch.report import dump_text  # noqa: E402
from tests import robustness  # noqa: E402
from tests.hangs import CASES  # noqa: E402
from tests.unit.test_flight_dump import CREATED_NS  # noqa: E402
from tests.unit.test_flight_dump_analysis import OWN, WORLD, Program, recorder  # noqa: E402

RECORDER_CASES, SUBGROUP_CASES, TRACES = 60, 30, 40
RANKS = range(4)
TAKEN_UNIX_SECONDS = CREATED_NS // 10**9 + 605  # torch writes its dumps after a timeout
TRACE_SECONDS = 3700
AFTER_PAUSE_SECONDS = 400  # of a run of benchmarks/detection.py
IN_TEXT = {"ranks", "frames", "threads", "gil", "workers", "node"}
"""The keys of hangs.toml that a text of py-spy has, too."""
STACKS, STACKS_ALONE, RECORDERS, SUBGROUPS, TRACE = ("stacks", "stacks-alone", "recorders", "subgroups", "traces")


class Case(NamedTuple):
    """A case: its kind and name, the right answer, and its files."""

    kind: str
    name: str
    answer: Mapping[str, Any]
    files: Mapping[str, str]


def _has_measurements(case: robustness.Case) -> bool:
    """True if a case has more than the stacks of its ranks."""
    row = next(row for row in CASES if row["name"] == case.name)
    return "world_size" in row or any(set(ranks) - IN_TEXT for ranks in row["stands"])


def make_stacks() -> Iterator[Case]:
    for case in robustness.known_cases():
        numbers = [rank.id.rank for rank in case.ranks]
        if case.numbers != "rank" or None in numbers:
            continue
        files = {}
        for rank in case.ranks:
            lead = dump_text.prefix(rank.id)
            lines = (line.removeprefix(lead) for line in dump_text.rank_lines(rank, "python train.py"))
            files[f"rank-{rank.id.rank}.txt"] = "".join(f"{line}\n" for line in lines)
        guilty = sorted(rank for _, rank in case.guilty if rank is not None)
        yield Case(STACKS_ALONE if _has_measurements(case) else STACKS, case.name, {"guilty": guilty}, files)


def _dump(programs: Sequence[tuple[Program, int]]) -> dict[str, str]:
    """Return the files of a case with the program of each rank, and the number of its operations that have ended."""
    dumps = [json.dumps(recorder(rank, program, ended)) for rank, (program, ended) in enumerate(programs)]
    longest = max(map(len, dumps))
    files = {f"fr-rank-{rank}.json": dump.ljust(longest) for rank, dump in enumerate(dumps)}
    return {**files, "taken.json": json.dumps({"unix_seconds": TAKEN_UNIX_SECONDS})}


def make_recorders() -> Iterator[Case]:
    dice = random.Random("hangbench")
    for _ in range(RECORDER_CASES):
        steps, name = dice.randrange(2, 9), dice.choice(("own code", "two in own code", "skips one", "all joined"))
        count = {"own code": 1, "two in own code": 2, "skips one": 1, "all joined": 0}[name]
        guilty = sorted(dice.sample(RANKS, count))
        programs = []
        for rank in RANKS:
            program = [WORLD, OWN[rank]] * steps
            last = [] if rank in guilty else [WORLD]
            skipped = [OWN[rank]] if rank in guilty and name == "skips one" else last
            programs.append(([*program, *skipped], len(program)))
        yield Case(RECORDERS, name, {"guilty": guilty}, _dump(programs))


def make_subgroups() -> Iterator[Case]:
    """Yield cases in which one rank is in its own code, its pair waits for it, and the other pair waits for both."""
    dice = random.Random("subgroups of hangbench")
    for _ in range(SUBGROUP_CASES):
        steps, guilty = dice.randrange(2, 9), dice.choice(RANKS)
        programs = []
        for rank in RANKS:
            program = [WORLD, OWN[rank]] * steps + [WORLD]
            is_pair = OWN[rank] == OWN[guilty]
            last = [] if rank == guilty else [OWN[rank]] if is_pair else [OWN[rank], WORLD]
            programs.append(([*program, *last], len(program) + (not is_pair)))
        yield Case(SUBGROUPS, "own code, awaited in a subgroup", {"guilty": [guilty]}, _dump(programs))


def _find_end(run: detection.Run, number: int) -> float:
    """Return the last second of a trace: in the hang, or in a healthy pause that does not begin the job."""
    if run.truth == detection.HUNG:
        return run.trouble_at + random.Random(f"hang {number}").uniform(detection.RULES_SECONDS, TRACE_SECONDS - 100)
    return TRACE_SECONDS if run.trouble_at == 0 else run.end - AFTER_PAUSE_SECONDS


def make_traces() -> Iterator[Case]:
    for truth in (detection.HUNG, detection.HEALTHY):
        for number in range(TRACES // 2):
            run = detection.draw(truth, number, seed=2)
            begin = _find_end(run, number) - TRACE_SECONDS
            noise = random.Random(number)
            text = io.StringIO(newline="")
            table = csv.writer(text, lineterminator="\n")
            table.writerow(("second", "gpu", "power_watts", "utilization_ratio"))
            for second in range(TRACE_SECONDS):
                for gpu in run.node.sweep(begin + second, noise).gpus:
                    table.writerow((second, gpu.index, f"{gpu.power_watts:06.1f}", f"{gpu.utilization_ratio:.2f}"))
            yield Case(TRACE, run.kind, {"hung": truth == detection.HUNG}, {"power.csv": text.getvalue()})


def write(folder: Path) -> None:
    """Write all cases and their answers into `folder`."""
    cases = [*make_stacks(), *make_recorders(), *make_subgroups(), *make_traces()]
    random.Random("the order of hangbench").shuffle(cases)
    answers = {}
    for number, case in enumerate(cases):
        place = folder / "cases" / f"{number:03}"
        place.mkdir(parents=True)
        answers[place.name] = {"kind": case.kind, "name": case.name, **case.answer}
        for file, text in case.files.items():
            (place / file).write_text(text)
        for path in (*place.iterdir(), place):
            os.utime(path, (TAKEN_UNIX_SECONDS, TAKEN_UNIX_SECONDS))
    (folder / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")


def main() -> None:
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.exit("usage: write_cases.py FOLDER, a folder that does not exist yet")
    write(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
