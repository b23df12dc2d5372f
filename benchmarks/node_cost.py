"""Cost of hangwatch on a node with healthy jobs, beside nvitop-exporter, and its effect on a training loop.

    .venv/bin/python benchmarks/node_cost.py [--beside PATH/nvitop-exporter] [--python PATH] [--seconds 45] [--write]

Runs `benchmarks/daemon_cost.py` for both exporters at once, on the same fake driver, with a job of 8 ranks and 64
loader workers, and among 2,000 processes, each also with ranks that train with torch. On a node with NVIDIA's driver,
the first of these also reads the node's own GPUs; elsewhere that goal counts as missed. Then `benchmarks/overhead.py`
runs a training loop of torch with the daemon and without it. `--python` is the Python of an installation as on nodes,
without the packages of the tests. By default, both are those that `make bench` installs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import results  # noqa: E402
from benchmarks.scale import Row, measure  # noqa: E402

NODES = (
    ("8 ranks, 64 loader workers", ("--without-torch", "--workers", "64", "--processes", "0")),
    ("8 ranks with torch, 64 loader workers", ("--workers", "64", "--processes", "0")),
    ("8 ranks, 2,000 processes", ("--processes", "2000")),
    ("8 ranks with torch, 2,000 processes", ("--workers", "16", "--processes", "2000")),
)
WITH_GPU = ("the node's own GPUs", (*NODES[0][1], "--real-driver"))
COLUMNS = ("node", "CPU seconds a minute", "nvitop-exporter", "ratio", "Rss MiB", "nvitop-exporter")
LOOP = ("ranks with torch", "steps per second with", "without", "change", "resolution", COLUMNS[1], COLUMNS[4])


def describe(name: str, rows: list[Row]) -> tuple[str, ...]:
    """Return a row of the table: hangwatch and the other exporter on one node."""
    ours, other = rows
    return (
        name,
        f"{ours['cpu_seconds_per_minute']:.2f}",
        f"{other['cpu_seconds_per_minute']:.2f}",
        f"{other['cpu_ratio']:.2f}",
        f"{ours['rss_mib']:.0f}",
        f"{other['rss_mib']:.0f}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--beside", default=".venv/nvitop/bin/nvitop-exporter", help="in an environment of its own")
    parser.add_argument("--python", default=".venv/node/bin/python")
    parser.add_argument("--seconds", default="60")  # the checks of a minute run once
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for program in (options.beside, options.python):
        if shutil.which(program) is None:
            parser.error(f"{program}: no such program; `make bench` installs it")
    given = ("--python", options.python, "--seconds", options.seconds, "--beside", options.beside)
    command = ("benchmarks/daemon_cost.py", "--json", *given)
    measured = (*NODES, WITH_GPU) if shutil.which("nvidia-smi") else NODES
    nodes = {name: measure(*command, *arguments) for name, arguments in measured}
    loops = measure("benchmarks/overhead.py", "--json", "--python", options.python)
    figures = {f"CPU ratio, {name}": rows[1]["cpu_ratio"] for name, rows in nodes.items()}
    figures |= {f"Rss MiB, {name}": rows[0]["rss_mib"] for name, rows in nodes.items()}
    figures |= {f"most Rss MiB, {name}": rows[0]["most_rss_mib"] for name, rows in nodes.items()}
    loop_rows = (
        (
            str(row["ranks"]),
            f"{row['steps_with']:.2f}",
            f"{row['steps_without']:.2f}",
            f"{row['change_percent']:+.2f} %",
            f"{row['resolution_percent']:.2f} %",
            f"{row['cpu_seconds_per_minute']:.2f}",
            f"{row['rss_mib']:.0f}",
        )
        for row in loops
    )
    tables = (
        results.Table(COLUMNS, tuple(describe(name, rows) for name, rows in nodes.items())),
        results.Table(LOOP, tuple(loop_rows)),
    )
    versions = results.find_versions([options.beside], options.python)
    return results.report("overhead", tables, figures, versions=versions, is_kept=options.write)


if __name__ == "__main__":
    sys.exit(main())
