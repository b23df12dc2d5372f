"""Cost of all stacks of a job: `hangwatch dump` beside the tools that a user would call for each process.

    .venv/bin/python benchmarks/dump.py [--ranks 8] [--workers 8] [--rounds 2] [--python PATH] [--write]

All tools read the same processes: a hung job, in which one rank is blocked and all others wait for it in a collective,
and the loader workers of its ranks. The second table is of four ranks with torch and its loader workers. The tools run
in turn, so that other load on the machine affects all. "pause" is the longest time in
which one rank was seen stopped (state t or T in /proc/PID/stat, read some thousand times a second). A tool that is not
installed has no row. gdb prints C frames only. `hangwatch check` runs beside the same job; it dumps nothing. The last
table is of commands that only print a text. PATH is the Python of an installation as on nodes, without the packages of
the tests; by default that of `make bench`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import results  # noqa: E402
from benchmarks.cli import (  # noqa: E402
    HUNG_RANK,
    HUNG_TORCH_RANK,
    Cost,
    children_of,
    cost_of,
    job,
    measure_starts,
    quietly,
)
from hangwatch.probes.process import pyspy  # noqa: E402

PYSTACK = Path(sys.executable).with_name("pystack")
OURS = "hangwatch dump --rounds 1"
ALL_ROUNDS = "hangwatch dump, two rounds"
PYSPY = "py-spy dump"
CHECK = "hangwatch check"
TORCH_RANKS = 4
TORCH_ROUNDS = 5
SETTLE_SECONDS = 5.0


class Tool(NamedTuple):
    """A way to dump all processes: a name, and a function of the ranks and of all processes."""

    name: str
    run: Callable[[Sequence[int], Sequence[int]], object]


class PauseMeter:
    """Measures how long a process is stopped."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._is_over = threading.Event()
        self.longest_seconds = 0.0

    @contextmanager
    def measuring(self) -> Iterator[PauseMeter]:
        thread = threading.Thread(target=self._measure)
        thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            thread.join()

    def _measure(self) -> None:
        stopped_at = None
        while not self._is_over.is_set():
            state, now = self._stat.read_text().rpartition(")")[2].split()[0], time.monotonic()
            if state not in "tT":
                stopped_at = None
            else:
                stopped_at = now if stopped_at is None else stopped_at
                self.longest_seconds = max(self.longest_seconds, now - stopped_at)
            time.sleep(1e-4)


def _for_each(*command: object) -> Callable[[Sequence[int], Sequence[int]], None]:
    """Return a function that calls a command once for each process; the pid is the last argument."""

    def run(_ranks: Sequence[int], processes: Sequence[int]) -> None:
        for pid in processes:
            quietly(*command, pid)()

    return run


def _dump(hangwatch: Path, rounds: str) -> Callable[[Sequence[int], Sequence[int]], None]:
    def run(ranks: Sequence[int], _processes: Sequence[int]) -> None:
        quietly(hangwatch, "dump", "--rounds", rounds, *(word for pid in ranks for word in ("--pid", pid)))()

    return run


def tools(hangwatch: Path) -> Iterator[Tool]:
    """Yield the tools that are installed."""
    py_spy = pyspy.find()
    yield Tool(OURS, _dump(hangwatch, "1"))
    yield Tool(ALL_ROUNDS, _dump(hangwatch, "2"))
    yield Tool("py-spy dump --nonblocking", _for_each(py_spy, "dump", "--nonblocking", "--json", "--pid"))
    yield Tool(PYSPY, _for_each(py_spy, "dump", "--json", "--pid"))
    yield Tool("py-spy dump --native", _for_each(py_spy, "dump", "--native", "--json", "--pid"))
    if PYSTACK.exists():
        yield Tool("pystack remote", _for_each(PYSTACK, "remote"))
    if gdb := shutil.which("gdb"):
        yield Tool("gdb, thread apply all bt", _for_each(gdb, "-batch", "-ex", "thread apply all bt", "-p"))
    yield Tool(CHECK, lambda _ranks, _processes: quietly(hangwatch, "check")())


def measure(tool: Tool, ranks: Sequence[int], processes: Sequence[int]) -> tuple[Cost, float]:
    """Return the cost of one dump, and the longest pause of the first rank in seconds."""
    with PauseMeter(ranks[0]).measuring() as meter:
        cost = cost_of(lambda: tool.run(ranks, processes))
    return cost, meter.longest_seconds


def measure_job(
    program: str, ranks: int, workers: int, kinds: Sequence[Tool], rounds: int
) -> tuple[results.Table, dict[str, float], dict[str, float]]:
    """Return the table of these tools on a job, and the median CPU and wall seconds of each."""
    with ExitStack() as stack:
        processes = job(stack, ranks, workers, program)
        time.sleep(SETTLE_SECONDS)
        rank_pids = [pid for pid in processes if list(children_of(pid))] or processes
        turns = [[measure(tool, rank_pids, processes) for tool in kinds] for _ in range(rounds)]
    rows, cpu_seconds, wall_seconds = [], {}, {}
    for tool, measured in zip(kinds, zip(*turns, strict=True), strict=True):
        cpu_seconds[tool.name] = statistics.median(cost.cpu_seconds for cost, _ in measured)
        wall_seconds[tool.name] = statistics.median(cost.wall_seconds for cost, _ in measured)
        pause = max(longest for _, longest in measured)
        ratio = cpu_seconds[tool.name] / cpu_seconds[OURS]
        numbers = f"{cpu_seconds[tool.name]:.2f}", f"{ratio:.2f}", f"{wall_seconds[tool.name]:.2f}"
        rows.append((tool.name, *numbers, f"{1e3 * pause:.1f}"))
    name = f"{len(processes)} processes{', torch' * (program == HUNG_TORCH_RANK)}"
    columns = (name, "CPU seconds", "hangwatch = 1", "wall seconds", "pause of a rank, ms")
    return results.Table(columns, tuple(rows)), cpu_seconds, wall_seconds


def table_of_starts(python: Path, rounds: int) -> tuple[results.Table, dict[str, float]]:
    """Return the CPU seconds of commands that only print a text, beside those of an empty Python, and the ratios."""
    rows, ratios = [], {}
    for words, *costs in measure_starts(python, rounds):
        ours, empty = (statistics.median(cost.cpu_seconds for cost in of_one) for of_one in costs)
        ratios[f"start of {words}, empty Python = 1"] = ours / empty
        rows.append((f"hangwatch {words}", f"{ours:.3f}", f"{empty:.3f}", f"{ours / empty:.1f}"))
    return results.Table(("start", "CPU seconds", "empty Python", "ratio"), tuple(rows)), ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--workers", type=int, default=8, help="loader workers of each rank")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--python", type=Path, default=Path(".venv/node/bin/python"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if not (hangwatch := options.python.with_name("hangwatch")).exists():
        parser.error(f"{hangwatch}: no such program; `make bench` installs .venv/node/bin/hangwatch")
    kinds = list(tools(hangwatch))
    table, cpu_seconds, wall_seconds = measure_job(HUNG_RANK, options.ranks, options.workers, kinds, options.rounds)
    few = [tool for tool in kinds if tool.name in (OURS, ALL_ROUNDS, PYSPY)]
    rounds = max(options.rounds, TORCH_ROUNDS)  # the first one fills the cache of the symbols
    with_torch, torch_seconds, _ = measure_job(HUNG_TORCH_RANK, TORCH_RANKS, 8, few, rounds)
    start_table, starts = table_of_starts(options.python, 5 * options.rounds)
    figures = {
        "CPU, py-spy --nonblocking = 1": cpu_seconds[OURS] / cpu_seconds["py-spy dump --nonblocking"],
        "CPU ratio of dump to py-spy": cpu_seconds[OURS] / cpu_seconds[PYSPY],
        "CPU ratio of dump to py-spy, torch": torch_seconds[OURS] / torch_seconds[PYSPY],
        "CPU of all rounds, py-spy = 1": cpu_seconds[ALL_ROUNDS] / cpu_seconds[PYSPY],
        "CPU of all rounds, py-spy = 1, torch": torch_seconds[ALL_ROUNDS] / torch_seconds[PYSPY],
        "seconds": wall_seconds[OURS],
        "wall seconds of check": wall_seconds[CHECK],
        **starts,
    }
    versions = results.find_versions([PYSTACK, "gdb"], options.python)
    return results.report("dump", (table, with_torch, start_table), figures, versions=versions, is_kept=options.write)


if __name__ == "__main__":
    sys.exit(main())
