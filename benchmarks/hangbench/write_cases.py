"""Write the cases of hangbench: write_cases.py FOLDER.

The stacks are those of tests/data/hangs.toml. Some of these cases have measurements, too, for example the state of a
process, the use of a GPU, or which frames are of libraries. Text has none of them, so these cases are a kind of their
own: `stacks-alone`. The recorder dumps are drawn: jobs in which one rank or two are in their own code, skip a
collective, or in which all have joined. The traces are runs of benchmarks/detection.py.
"""

from __future__ import annotations

import csv
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import detection  # noqa: E402
from hangwatch.report import dump_text  # noqa: E402
from tests import robustness  # noqa: E402
from tests.hangs import CASES  # noqa: E402
from tests.robustness import Case  # noqa: E402
from tests.unit.test_flight_dump import CREATED_NS  # noqa: E402
from tests.unit.test_flight_dump_analysis import OWN, TIME_OUT_SECONDS, WORLD, recorder  # noqa: E402

RECORDER_CASES, TRACES = 60, 40
RECORDER_RANKS = 4
IN_TEXT = {"ranks", "frames", "threads", "gil", "workers", "node"}
"""The keys of hangs.toml that a text of py-spy has, too."""


def _open(folder: Path, kind: str, name: str, expected: dict[str, Any]) -> Path:
    case = folder / kind / re.sub(r"\W+", "-", name).strip("-")
    case.mkdir(parents=True)
    (case / "expect.json").write_text(json.dumps({"name": name, **expected}) + "\n")
    return case


def _has_measurements(case: Case) -> bool:
    """True if a case has more than the stacks of its ranks."""
    row = next(row for row in CASES if row["name"] == case.name)
    return "world_size" in row or any(set(ranks) - IN_TEXT for ranks in row["stands"])


def write_stacks(folder: Path) -> None:
    for case in robustness.known_cases():
        numbers = [rank.id.rank for rank in case.ranks]
        if case.numbers != "rank" or None in numbers:
            continue
        kind = "stacks-alone" if _has_measurements(case) else "stacks"
        path = _open(folder, kind, case.name, {"guilty": sorted(rank for _, rank in case.guilty if rank is not None)})
        for rank in case.ranks:
            lead = dump_text.prefix(rank.id)
            lines = (line.removeprefix(lead) for line in dump_text.rank_lines(rank, "python train.py"))
            (path / f"rank-{rank.id.rank}.txt").write_text("".join(f"{line}\n" for line in lines))


def write_recorders(folder: Path) -> None:
    dice = random.Random("hangbench")
    for number in range(RECORDER_CASES):
        steps, kind = dice.randrange(2, 9), dice.choice(("own code", "two in own code", "skips one", "all joined"))
        count = {"own code": 1, "two in own code": 2, "skips one": 1, "all joined": 0}[kind]
        guilty = sorted(dice.sample(range(RECORDER_RANKS), count))
        path = _open(folder, "recorders", f"{number} {kind}", {"guilty": guilty})
        for rank in range(RECORDER_RANKS):
            program = [WORLD, OWN[rank]] * steps
            last = [] if rank in guilty else [WORLD]
            skipped = [OWN[rank]] if rank in guilty and kind == "skips one" else last
            dump = recorder(rank, [*program, *skipped], len(program))
            file = path / f"fr-rank-{rank}.json"
            file.write_text(json.dumps(dump))
            written = CREATED_NS / 1e9 + TIME_OUT_SECONDS + 5  # torch writes its dumps after a timeout
            os.utime(file, (written, written))


def write_traces(folder: Path) -> None:
    for truth in (detection.HUNG, detection.HEALTHY):
        for number in range(TRACES // 2):
            run = detection.draw(truth, number, seed=2)
            path = _open(folder, "traces", f"{truth} {number} {run.kind}", {"hung": truth == detection.HUNG})
            end = run.trouble_at + detection.RULES_SECONDS if truth == detection.HUNG else run.end
            noise = random.Random(number)
            with (path / "power.csv").open("w", newline="") as file:
                table = csv.writer(file)
                table.writerow(("second", "gpu", "power_watts", "utilization_ratio"))
                for second in range(int(end)):
                    for gpu in run.node.sweep(float(second), noise).gpus:
                        table.writerow((second, gpu.index, f"{gpu.power_watts:.0f}", f"{gpu.utilization_ratio:.2f}"))


def main() -> None:
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.exit("usage: write_cases.py FOLDER, a folder that does not exist yet")
    folder = Path(sys.argv[1])
    write_stacks(folder)
    write_recorders(folder)
    write_traces(folder)


if __name__ == "__main__":
    main()
