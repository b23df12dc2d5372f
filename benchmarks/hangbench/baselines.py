"""Simple tools for hangbench, and hangwatch: baselines.py NAME CASE prints the answer for one case.

* hangwatch: `hangwatch explain` on the dumps.
* no-answer: names no rank, and says nothing of a trace.
* smallest-group: of ranks with equal py-spy dumps, the smallest group is named.
* lowest-number: of all ranks, those that enqueued the fewest collectives of the default group are named.
* torchfrtrace: the missing ranks of the first collective that does not match, by torch's own analyzer.
* ras-counts: NCCL's RAS prints how many operations each rank of a communicator has launched. Here, the counts are
  derived from the recorder dumps: one communicator for each process group, its ranks from `pg_config`, its counts the
  last number that each rank enqueued in this group. All ranks behind others in any communicator are named.
* ras-counts-largest: the same, of the largest communicator with different counts only.
* utilisation: a trace is hung if a GPU stays below 5 % for 30 minutes. power: below 150 W for 20 minutes.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_NUMBER = re.compile(r"(\d+)\.\w+$")
Answer = dict[str, object]


def _rank(path: Path) -> int:
    found = _NUMBER.search(path.name)
    assert found is not None
    return int(found[1])


def _name(ranks: list[int], everybody: int) -> Answer:
    return {"named": ranks if 0 < len(ranks) * 2 < everybody else []}


def name_smallest_group(case: Path) -> Answer:
    """Name the smallest group of ranks with equal dumps; none if two groups are the smallest."""
    groups: dict[str, list[int]] = {}
    for path in case.glob("rank-*.txt"):
        text = re.sub(r"^(Process|Python|Parent).*|0x[0-9A-F]+|Thread \S+", "", path.read_text(), flags=re.MULTILINE)
        groups.setdefault(text, []).append(_rank(path))
    smallest = sorted(groups.values(), key=len)[:2]
    is_tie = len({len(group) for group in smallest}) < len(smallest)
    return _name(smallest[0] if smallest and not is_tie else [], sum(map(len, groups.values())))


def _dumps(case: Path) -> dict[int, dict]:
    return {_rank(path): json.loads(path.read_text()) for path in case.glob("fr-rank-*.json")}


def name_lowest_number(case: Path) -> Answer:
    """Name the ranks with the lowest sequence number in the default group."""
    last = {
        rank: max((one["collective_seq_id"] for one in dump["entries"] if one["pg_id"] == 0), default=0)
        for rank, dump in _dumps(case).items()
    }
    lowest = [rank for rank, number in last.items() if number == min(last.values())]
    return _name(lowest, len(last))


def ask_torchfrtrace(case: Path) -> Answer:
    """Name the ranks that torch's analyzer finds missing in the first collective that does not match."""
    from torch.distributed.flight_recorder.components import builder, utils
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    vars(utils).setdefault("tabulate", str)  # an optional package, which only prints
    details = {str(rank): {"rank": rank, "host_name": f"host{rank}", **dump} for rank, dump in _dumps(case).items()}
    database = builder.build_db(details, JobConfig().parse_args([]), "2.10")
    missing = (sorted(one.missing_ranks) for one in database.collectives if one.missing_ranks)
    return {"named": next(missing, [])}


def count_launches(case: Path) -> dict[str, dict[int, int]]:
    """Return the last number that each rank of each process group enqueued: its launches by RAS."""
    counts: dict[str, dict[int, int]] = {}
    dumps = _dumps(case)
    for dump in dumps.values():
        for group in dump["pg_config"].values():
            counts[group["name"]] = dict.fromkeys(json.loads(group["ranks"]), 0)
    for rank, dump in dumps.items():
        for one in dump["entries"]:
            of_group = counts[one["process_group"][0]]
            of_group[rank] = max(of_group[rank], one["collective_seq_id"])
    return counts


def name_behind(case: Path, *, only_largest: bool = False) -> Answer:
    """Name the ranks that have launched fewer operations than others of their communicator."""
    uneven = [counts for counts in count_launches(case).values() if len(set(counts.values())) > 1]
    uneven.sort(key=len, reverse=True)
    shown = uneven[:1] if only_largest else uneven
    return {"named": sorted({rank for one in shown for rank, count in one.items() if count < max(one.values())})}


def _find_low(case: Path, column: str, limit: float, seconds: int) -> Answer:
    held: dict[str, int] = {}
    with (case / "power.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            held[row["gpu"]] = held.get(row["gpu"], 0) + 1 if float(row[column]) < limit else 0
            if held[row["gpu"]] >= seconds:
                return {"hung": True}
    return {"hung": False}


def ask_hangwatch(case: Path) -> Answer:
    """Return the verdict of `hangwatch explain`.

    It compares dumps of flight recorders only if their files have the time at which torch wrote them.
    """
    dumps = sorted(case.glob("fr-rank-*.json"))
    for path in dumps:
        taken = json.loads((case / "taken.json").read_text())["unix_seconds"]
        os.utime(path, (taken, taken))
    files = (str(path) for path in (*sorted(case.glob("rank-*.txt")), *dumps))
    command = [str(Path(sys.executable).with_name("hangwatch")), "explain", "--json", *files]
    verdict = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["verdict"]
    return {field: [rank["rank"] for rank in verdict[field]] for field in ("named", "check_first")}


class Tool(NamedTuple):
    """A tool, and the kinds of cases with evidence that it reads. `is_program`: it runs a program for each case."""

    ask: Callable[[Path], Answer]
    kinds: tuple[str, ...]
    is_program: bool = False


STACKS, RECORDERS, TRACES = ("stacks",), ("recorders", "subgroups", "parallel"), ("traces",)
TOOLS = {
    "hangwatch": Tool(ask_hangwatch, (*RECORDERS, *STACKS), is_program=True),
    "no-answer": Tool(lambda _case: {}, (*RECORDERS, *STACKS, *TRACES)),
    "smallest-group": Tool(name_smallest_group, STACKS),
    "lowest-number": Tool(name_lowest_number, RECORDERS),
    "torchfrtrace": Tool(ask_torchfrtrace, RECORDERS),
    "ras-counts": Tool(name_behind, RECORDERS),
    "ras-counts-largest": Tool(lambda case: name_behind(case, only_largest=True), RECORDERS),
    "utilisation": Tool(lambda case: _find_low(case, "utilization_ratio", 0.05, 1800), TRACES),
    "power": Tool(lambda case: _find_low(case, "power_watts", 150.0, 1200), TRACES),
}


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in TOOLS:
        sys.exit(__doc__)
    print(json.dumps(TOOLS[sys.argv[1]].ask(Path(sys.argv[2]))))
