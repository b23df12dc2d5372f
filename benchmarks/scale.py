"""CPU time over the number of ranks: grouping, verdict, merge, report and the rules of Prometheus, with their slopes.

    .venv/bin/python benchmarks/scale.py [--rules-ranks 1024 4096 16384 100000] [--write]

Runs `benchmarks/grouping.py` and `benchmarks/fleet_rule.py`. The slope is that of CPU time over ranks, both as
logarithms, by least squares from 1,024 ranks on: 1 is linear, 2 is quadratic.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import results  # noqa: E402
from benchmarks.grouping import find_slope  # noqa: E402

RULES = "deploy/prometheus/hangwatch.rules.yaml"
FEWEST_RANKS = 1_024
NAMES = {RULES: "rules", "judge": "verdict"}

Row = dict[str, Any]


def measure(*command: str) -> list[Row]:
    """Return the rows that a benchmark prints as JSON."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[Row] = json.loads(done.stdout)
    return rows


def measure_rules(ranks: str) -> list[Row]:
    return measure("benchmarks/fleet_rule.py", "--json", "--windows", "2", "--ranks", ranks, "--", RULES)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    sizes = ["1024", "4096", "16384", "100000"]
    parser.add_argument("--rules-ranks", nargs="*", default=sizes, help="none: without the rules")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = measure("benchmarks/grouping.py", "--json")
    with ThreadPoolExecutor() as pool:  # a Prometheus waits most of the time, and CPU time is measured
        for measured in pool.map(measure_rules, options.rules_ranks):
            rows += measured
    seconds: dict[str, dict[int, float]] = {}
    for row in rows:
        seconds.setdefault(NAMES.get(row["step"], row["step"]), {})[row["ranks"]] = row["cpu_seconds"]
    both = zip(seconds["group"].items(), seconds["verdict"].values(), strict=True)
    seconds = {"group and verdict": {size: group + verdict for (size, group), verdict in both}} | seconds
    found = {step: find_slope(by_size) for step, by_size in seconds.items()}
    slopes = {step: slope for step, slope in found.items() if slope is not None}
    ranks = sorted({size for by_size in seconds.values() for size in by_size if size >= FEWEST_RANKS})
    cells = (
        (
            step,
            *(f"{by_size[size]:.3g}" if size in by_size else "" for size in ranks),
            f"{slopes[step]:.2f}" if step in slopes else "",
        )
        for step, by_size in seconds.items()
    )
    table = results.Table(("CPU seconds", *(f"{size:,} ranks" for size in ranks), "slope"), tuple(cells))
    figures = {f"{step}, {size}": taken for step, by_size in seconds.items() for size, taken in by_size.items()}
    figures = {name: taken for name, taken in figures.items() if name in results.GOALS["scale"]}
    figures["largest slope"] = max(slopes.values())
    versions = results.find_versions(["prometheus"])
    return results.report("scale", [table], figures, versions=versions, is_kept=options.write)


if __name__ == "__main__":
    sys.exit(main())
