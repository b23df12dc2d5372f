"""Cost to start a command, and cost of a dump compared with plain py-spy on the same processes.

    .venv/bin/python benchmarks/cli.py [--ranks 8] [--workers 8] [--rounds 5] [--python PATH]

Each command and its counterpart run in turn, so that other load on the machine affects both. The results are the
ratio of their median CPU times (user and system, with children) and the ratio of their median wall clock times. All
modules are compiled first, as pip does. `--python` runs the Python of another installation, as on a node.

The start of a command is compared with an empty Python. `hangwatch dump --rounds 1` of a job of real processes is
compared with one `py-spy dump --nonblocking --json` for each of these processes, one after the other; without
`--rounds`, hangwatch dumps these ranks twice, since none waits for others. `hangwatch check` runs beside the same job,
and has no counterpart. A dump of one process
shows the fixed cost, which does not depend on the number of processes.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hangwatch.probes.gpu.messages import Begin  # noqa: E402
from hangwatch.probes.process import pyspy  # noqa: E402

STARTS = ("--version", *(f"{name} --help" for name in ("status", "dump", "explain", "check", "report", "merge")))
WAITS = "import sys; sys.stdin.read()"
LOADER = f"subprocess.Popen([sys.executable, '-S', '-c', {WAITS!r}], stdin=subprocess.PIPE)"
RANK = f"import subprocess, sys; loaders = [{LOADER} for _ in range(int(sys.argv[1]))]; {WAITS}"
# Rank 1 is blocked, and all others wait for it in a function with the place of torch's all_reduce.
HUNG_RANK = f"""import os, subprocess, sys, threading
loaders = [{LOADER} for _ in range(int(sys.argv[1]))]
if os.environ["RANK"] == "1":
    sys.stdin.read()
lock = threading.Lock()
code = "def all_reduce():\\n    lock.acquire()\\n    lock.acquire()"
exec(compile(code, "torch/distributed/distributed_c10d.py", "exec"))
all_reduce()
"""
# Ranks with torch, gloo and torch's own loader workers: one program trains, the other hangs as above.
_TORCH_RANK = """import os, sys, time, torch
import torch.distributed as dist
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
batches = iter(DataLoader(range(1 << 20), num_workers=int(sys.argv[1])))
next(batches)
dist.barrier()
"""
TRAINING_TORCH_RANK = f"""{_TORCH_RANK}
while True:
    next(batches)
    dist.all_reduce(torch.ones(4))
    time.sleep(0.5)
"""
HUNG_TORCH_RANK = f"""{_TORCH_RANK}
if os.environ["RANK"] == "1":
    sys.stdin.read()
dist.all_reduce(torch.ones(4))
"""


class Cost(NamedTuple):
    """The cost of one command, including its children."""

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


def run_in_turns(runs: Sequence[Callable[[], object]], rounds: int) -> list[list[Cost]]:
    """Call each of `runs` in turn, `rounds` times. Return the costs of each.

    One more turn at the start is not measured.
    """
    for run in runs:
        run()
    turns = [[cost_of(run) for run in runs] for _ in range(rounds)]
    return [list(costs) for costs in zip(*turns, strict=True)]


def show(name: str, ours: Sequence[Cost], theirs: Sequence[Cost]) -> None:
    mine, other = (Cost(*map(statistics.median, zip(*costs, strict=True))) for costs in (ours, theirs))
    ratios = [ours / theirs for ours, theirs in zip(mine, other, strict=True)]
    print(
        f"{name:54} {mine.cpu_seconds:7.3f} s {other.cpu_seconds:7.3f} s {ratios[0]:7.2f} times {ratios[1]:9.2f} times"
    )


def compare(name: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> None:
    show(name, *run_in_turns((ours, theirs), rounds))


def measure_starts(python: Path, rounds: int) -> Iterator[tuple[str, list[Cost], list[Cost]]]:
    """Yield the words of each command of `STARTS`, its costs, and those of an empty Python in turn with it."""
    for words in STARTS:
        runs = quietly(python.with_name("hangwatch"), *words.split()), quietly(python, "-c", "pass")
        ours, theirs = run_in_turns(runs, rounds)
        yield words, ours, theirs


def children_of(pid: int) -> Iterator[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    yield from map(int, found)


def job(stack: ExitStack, ranks: int, workers: int, program: str = RANK) -> list[int]:
    """Start `ranks` processes with `workers` children each, as a launcher does. Return all pids."""
    pids, children = [], []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    for rank in range(ranks):
        environ = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "bench",
        }
        options = [] if "torch.utils" in program else ["-S"]
        command = [sys.executable, "-W", "ignore", *options, "-c", program, str(workers)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ, start_new_session=True)
        stack.callback(child.wait)
        stack.callback(child.kill)
        children.append(child)
    for child in children:
        while len(workers_of := list(children_of(child.pid))) < workers and child.poll() is None:
            time.sleep(0.01)
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
        python = Path(os.path.abspath(chosen.python))  # noqa: PTH100 - do not resolve the environment's links
        measure(python, chosen.ranks, chosen.workers, chosen.rounds)


def measure(python: Path, ranks: int, workers: int, rounds: int) -> None:
    print(f"{'':54} {'hangwatch':>9} {'beside':>9} {'CPU':>13} {'wall clock':>15}")
    hangwatch, empty = python.with_name("hangwatch"), quietly(python, "-c", "pass")
    for words, ours, theirs in measure_starts(python, rounds):
        show(f"hangwatch {words}, an empty Python", ours, theirs)
    begin = msgspec.json.encode(Begin(sample_seconds=1.0, parent_pid=os.getpid())).decode()
    reads_driver = quietly(python, "-m", "hangwatch.probes.gpu.driver_process", begin)
    compare("the child that asks the driver, an empty Python", reads_driver, empty, rounds)
    with ExitStack() as stack:
        pids = job(stack, ranks, workers)
        alone = job(stack, 1, 0)
        slots = [pid for pid in pids if list(children_of(pid))]

        def both(ranks: list[int], processes: list[int]) -> tuple[Callable[[], object], Callable[[], object]]:
            def plain() -> None:
                for pid in processes:
                    quietly(pyspy.find(), "dump", "--nonblocking", "--json", "--pid", pid)()

            return quietly(
                hangwatch, "dump", "--rounds", "1", *(word for pid in ranks for word in ("--pid", pid))
            ), plain

        one, plain_one, every, plain_every, checks = run_in_turns(
            (*both(alone, alone), *both(slots, pids), quietly(hangwatch, "check")), rounds
        )
        seconds = statistics.median(cost.cpu_seconds for cost in checks)
        print(f"{f'hangwatch check, beside {len(pids)} processes':54} {seconds:7.3f} s")
        show("hangwatch dump, py-spy on the same process", one, plain_one)
        show(f"hangwatch dump, py-spy on the same {len(pids)} processes", every, plain_every)
        more = len(pids) - len(alone)
        each, plain_each = (
            statistics.median(
                (of_all.cpu_seconds - of_one.cpu_seconds) / more for of_all, of_one in zip(*costs, strict=True)
            )
            for costs in ((every, one), (plain_every, plain_one))
        )
        print(
            f"once: {statistics.median(cost.cpu_seconds for cost in one) - each:.3f} s of CPU; each further process: "
            f"{1e3 * each:.1f} ms, py-spy alone {1e3 * plain_each:.1f} ms ({each / plain_each:.2f} times)"
        )


if __name__ == "__main__":
    main()
