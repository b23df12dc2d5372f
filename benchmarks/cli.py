"""What a command costs to start, and what a dump costs beside plain py-spy on the same processes.

    .venv/bin/python benchmarks/cli.py [--ranks 8] [--workers 8] [--rounds 5] [--python PATH]

Each command and its counterpart run in turn, so that what else the machine does hits both; the ratio is that of their
median CPU times (user and system, with children), and of how long they took. Modules are compiled before, as pip does
it; `--python` is that of another installation, as nodes have it. Starts stand beside an empty Python; `hangwatch dump`
of a job of so many real processes beside one `py-spy dump --nonblocking --json` for each of the same processes, one
after the other. A dump of one of them tells what is paid once, whatever the number of processes.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hangwatch.probes import pyspy  # noqa: E402
from hangwatch.probes.nvml.messages import Begin  # noqa: E402

WAITS = "import sys; sys.stdin.read()"
LOADER = f"subprocess.Popen([sys.executable, '-S', '-c', {WAITS!r}])"
RANK = f"import subprocess, sys; loaders = [{LOADER} for _ in range({{}})]; {WAITS}"


class Cost(NamedTuple):
    """Of one command, its children included."""

    cpu_seconds: float
    wall_seconds: float


def cost_of(run: Callable[[], object]) -> Cost:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    run()
    after, ended = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    return Cost(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended - began)


def quietly(*command: object) -> Callable[[], object]:
    return lambda: subprocess.run(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def beside(name: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Print both costs; returns the CPU seconds of both."""
    ours()
    pairs = [(cost_of(ours), cost_of(theirs)) for _ in range(rounds)]
    mine, other = (Cost(*map(statistics.median, zip(*costs, strict=True))) for costs in zip(*pairs, strict=True))
    ratios = [ours / theirs for ours, theirs in zip(mine, other, strict=True)]
    print(
        f"{name:54} {mine.cpu_seconds:7.3f} s {other.cpu_seconds:7.3f} s {ratios[0]:7.2f} times {ratios[1]:9.2f} times"
    )
    return mine.cpu_seconds, other.cpu_seconds


def children_of(pid: int) -> Iterator[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    yield from map(int, found)


def job(stack: ExitStack, ranks: int, workers: int) -> list[int]:
    """Processes as a launcher would start them; the pids of ranks and workers. They end when their input does."""
    pids = []
    for rank in range(ranks):
        environ = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "bench",
        }
        command = [sys.executable, "-S", "-c", RANK.format(workers)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ, start_new_session=True)
        stack.callback(child.wait)
        stack.callback(child.stdin.close)  # type: ignore[union-attr]
        while len(workers_of := list(children_of(child.pid))) < workers and child.poll() is None:
            pass
        pids += [child.pid, *workers_of]
    return pids


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--workers", type=int, default=8, help="loader workers of each rank")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--python", default=sys.executable)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as compiled:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = compiled
        python = Path(os.path.abspath(chosen.python))  # noqa: PTH100 - not where a link of the environment leads
        measure(python, chosen.ranks, chosen.workers, chosen.rounds)


def measure(python: Path, ranks: int, workers: int, rounds: int) -> None:
    print(f"{'':54} {'hangwatch':>9} {'beside':>9} {'CPU':>13} {'wall clock':>15}")
    hangwatch, empty = python.with_name("hangwatch"), quietly(python, "-c", "pass")
    helps = [f"{name} --help" for name in ("explain", "report", "merge", "dump", "check", "status")]
    for words in ("--version", *helps):
        beside(f"hangwatch {words}, an empty Python", quietly(hangwatch, *words.split()), empty, rounds)
    begin = msgspec.json.encode(Begin(sample_seconds=1.0, parent_pid=os.getpid())).decode()
    reads_driver = quietly(python, "-m", "hangwatch.probes.nvml.child", begin)
    beside("the child that asks the driver, an empty Python", reads_driver, empty, rounds)
    with ExitStack() as stack:
        pids = job(stack, ranks, workers)
        alone = job(stack, 1, 0)
        seats = [pid for pid in pids if list(children_of(pid))]

        def both(ranks: list[int], processes: list[int]) -> tuple[float, float]:
            def plain() -> None:
                for pid in processes:
                    quietly(pyspy.find(), "dump", "--nonblocking", "--json", "--pid", pid)()

            dump = quietly(hangwatch, "dump", *(word for pid in ranks for word in ("--pid", pid)))
            name = f"hangwatch dump, py-spy on the same {words_of(len(processes))}"
            return beside(name, dump, plain, rounds)

        one, all_ = both(alone, alone), both(seats, pids)
        more = len(pids) - len(alone)
        each = [(of_all - of_one) / more for of_all, of_one in zip(all_, one, strict=True)]
        print(
            f"once: {one[0] - each[0]:.3f} s of CPU; each further process: {1e3 * each[0]:.1f} ms, "
            f"py-spy alone {1e3 * each[1]:.1f} ms ({each[0] / each[1]:.2f} times)"
        )


def words_of(processes: int) -> str:
    return "process" if processes == 1 else f"{processes} processes"


if __name__ == "__main__":
    main()
