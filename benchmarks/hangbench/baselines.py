"""Simple tools for hangbench, and hangwatch: baselines.py NAME CASE prints the answer for one case.

* smallest-group: of ranks with equal py-spy dumps, the smallest group is named.
* lowest-number: of all ranks, those that enqueued the fewest collectives of the default group are named.
* torchfrtrace: the missing ranks of the first collective that does not match, by torch's own analyzer.
* utilisation: a trace is hung if a GPU stays below 5 % for 30 minutes. power: below 150 W for 20 minutes.
* hangwatch: `hangwatch explain` on the dumps.
"""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_NUMBER = re.compile(r"(\d+)\.\w+$")
Answer = dict[str, object]


def _rank(path: Path) -> int:
    found = _NUMBER.search(path.name)
    assert found is not None
    return int(found[1])


def _name(ranks: list[int], everybody: int) -> Answer:
    return {"named": ranks if 0 < len(ranks) * 2 < everybody else []}


def name_smallest_group(case: Path) -> Answer:
    """Name the smallest group of ranks with equal dumps."""
    groups: dict[str, list[int]] = {}
    for path in case.glob("rank-*.txt"):
        text = re.sub(r"^(Process|Python|Parent).*|0x[0-9A-F]+|Thread \S+", "", path.read_text(), flags=re.MULTILINE)
        groups.setdefault(text, []).append(_rank(path))
    smallest = sorted(groups.values(), key=len)[:1]
    return _name(smallest[0] if smallest else [], sum(map(len, groups.values())))


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
    dumps = _dumps(case)
    if not dumps:
        return {}
    from torch.distributed.flight_recorder.components import builder
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    details = {str(rank): {"rank": rank, "host_name": f"host{rank}", **dump} for rank, dump in dumps.items()}
    database = builder.build_db(details, JobConfig().parse_args([]), "2.10")
    missing = (sorted(one.missing_ranks) for one in database.collectives if one.missing_ranks)
    return {"named": next(missing, [])}


def _find_low(case: Path, column: str, limit: float, seconds: int) -> Answer:
    path = case / "power.csv"
    if not path.exists():
        return {}
    held: dict[str, int] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            held[row["gpu"]] = held.get(row["gpu"], 0) + 1 if float(row[column]) < limit else 0
            if held[row["gpu"]] >= seconds:
                return {"hung": True}
    return {"hung": False}


def ask_hangwatch(case: Path) -> Answer:
    """Return the verdict of `hangwatch explain`."""
    files = sorted(str(path) for path in (*case.glob("rank-*.txt"), *case.glob("fr-rank-*.json")))
    if not files:
        return {}
    command = [str(Path(sys.executable).with_name("hangwatch")), "explain", "--json", *files]
    verdict = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["verdict"]
    return {field: [rank["rank"] for rank in verdict[field]] for field in ("named", "first_look")}


TOOLS: dict[str, Callable[[Path], Answer]] = {
    "hangwatch": ask_hangwatch,
    "smallest-group": name_smallest_group,
    "lowest-number": name_lowest_number,
    "torchfrtrace": ask_torchfrtrace,
    "utilisation": lambda case: _find_low(case, "utilization_ratio", 0.05, 1800),
    "power": lambda case: _find_low(case, "power_watts", 150.0, 1200),
}


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in TOOLS:
        sys.exit(__doc__)
    print(json.dumps(TOOLS[sys.argv[1]](Path(sys.argv[2]))))
