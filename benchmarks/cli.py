"""What a command costs to start, and what a dump costs beside plain py-spy on the same processes.

    .venv/bin/python benchmarks/cli.py [--ranks 8] [--workers 8] [--rounds 5]

Each command and its counterpart run in turn, so that what else the machine does hits both; the ratio is that of their
median CPU times (user and system, with children). Modules are compiled before, as pip does it. Starts stand beside an
empty Python; `hangwatch dump` of a job of so many real processes beside one `py-spy dump --nonblocking --json` for each
of the same processes, one after the other.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hangwatch.probes import pyspy  # noqa: E402

HANGWATCH = Path(sys.executable).with_name("hangwatch")
WAITS = "import sys; sys.stdin.read()"
LOADER = f"subprocess.Popen([sys.executable, '-S', '-c', {WAITS!r}])"
RANK = f"import subprocess, sys; loaders = [{LOADER} for _ in range({{}})]; {WAITS}"


def cpu_seconds(run: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def quietly(*command: object) -> Callable[[], object]:
    return lambda: subprocess.run(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )


def beside(name: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> None:
    ours()
    pairs = [(cpu_seconds(ours), cpu_seconds(theirs)) for _ in range(rounds)]
    mine, other = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"{name:44} {mine:8.3f} s {other:8.3f} s {mine / other:8.2f} times")


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
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as compiled:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = compiled
        measure(chosen.ranks, chosen.workers, chosen.rounds)


def measure(ranks: int, workers: int, rounds: int) -> None:
    print(f"{'':44} {'hangwatch':>10} {'beside':>10}")
    empty = quietly(sys.executable, "-c", "pass")
    helps = [f"{name} --help" for name in ("explain", "report", "merge", "dump", "check", "status")]
    for words in ("--version", *helps):
        beside(f"hangwatch {words}, an empty Python", quietly(HANGWATCH, *words.split()), empty, rounds)
    with ExitStack() as stack:
        pids = job(stack, ranks, workers)
        seats = [pid for pid in pids if list(children_of(pid))]

        def plain() -> None:
            for pid in pids:
                quietly(pyspy.find(), "dump", "--nonblocking", "--json", "--pid", pid)()

        dump = quietly(HANGWATCH, "dump", *(word for pid in seats for word in ("--pid", pid)))
        beside(f"hangwatch dump, py-spy on the same {len(pids)} processes", dump, plain, rounds)


if __name__ == "__main__":
    main()
