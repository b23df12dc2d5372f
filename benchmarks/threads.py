"""Cost of one diagnosis of ranks with many threads, beside that of another commit.

    git worktree add /tmp/before COMMIT
    .venv/bin/python benchmarks/threads.py [--ranks 8] [--threads 200] [--turns 15] --beside /tmp/before

Rank 0 waits for a thread that opens a FIFO without a writer; the main threads of the others wait in a function that
counts as a collective. In each rank half of the other threads wait in the program's own code, and half wait for a task.
A diagnosis has three rounds, 0.1 s apart, and runs in a process of its own. The two commits take turns. Times are
medians of wall clock time, and of CPU time with children.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
RANK = """
import concurrent.futures, os, sys, threading
number, threads, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
forever = threading.Event()
def report(): forever.wait()
def read_shard(): os.open(folder + "/fifo", os.O_RDONLY)
def meet(): forever.wait()
pool, all_started = concurrent.futures.ThreadPoolExecutor(threads), threading.Barrier(threads // 2 + 1)
for _ in range(threads // 2): pool.submit(all_started.wait)
all_started.wait()
for _ in range(threads - threads // 2 - 1): threading.Thread(target=report, daemon=True).start()
task = concurrent.futures.ThreadPoolExecutor(1).submit(read_shard if number == 0 else report)
open(f"{folder}/at-{number}", "w").close()
task.result() if number == 0 else meet()
"""


@contextmanager
def job(ranks: int, threads: int) -> Iterator[list[int]]:
    """Start the ranks of a job; yield their pids when all have started their threads."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(RANK)
        subprocess.run(["mkfifo", folder / "fifo"], check=True)
        command = [sys.executable, folder / "train.py"]
        started = [subprocess.Popen([*command, str(number), str(threads), name]) for number in range(ranks)]
        try:
            while len(list(folder.glob("at-*"))) < ranks:
                time.sleep(0.1)
            yield [one.pid for one in started]
        finally:
            for one in started:
                one.kill()
                one.wait()


def diagnose_once(pids: Sequence[int]) -> tuple[float, float, list[int | None]]:
    """Diagnose the job of processes `pids`. Return wall seconds, CPU seconds, and the ranks that are named."""
    from msgspec.structs import replace

    from benchmarks.recorder import cpu_seconds
    from hangwatch import config
    from hangwatch.capture import diagnosis
    from hangwatch.capture.request import CaptureRequest
    from hangwatch.stacks import activity
    from tests.integration.targets import job_of_pids

    found = job_of_pids(pids)
    ranks = tuple(replace(rank, rank=pids.index(rank.id.pid)) for rank in found.ranks)
    table = activity.load((config.ActivityRule(activity="collective_wait", function="meet"),))
    request = CaptureRequest(node="here", settings=config.Capture(pause_seconds=0.1))
    wall, cpu = time.monotonic(), cpu_seconds()
    verdict = diagnosis.diagnose_job(replace(found, ranks=ranks, world_size=len(pids)), request, table).verdict
    return time.monotonic() - wall, cpu_seconds() - cpu, [one.rank for one in verdict.named]


def measure(folders: Sequence[Path], pids: Sequence[int], turns: int) -> None:
    """Diagnose the job with the code of each folder in turn, and print the costs."""
    costs: dict[Path, list[tuple[float, float, list[int | None]]]] = {folder: [] for folder in folders}
    for _ in range(turns):
        for folder in folders:
            command = [sys.executable, __file__, "--look", str(folder), *map(str, pids)]
            costs[folder].append(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    medians = []
    for folder, taken in costs.items():
        walls, cpus, named = zip(*taken, strict=True)
        medians.append(statistics.median(cpus))
        print(
            f"{folder}: {statistics.median(walls):.2f} s, {medians[-1]:.3f} s of CPU "
            f"({min(cpus):.3f} to {max(cpus):.3f}); ranks named: {named[-1]}"
        )
    if len(medians) > 1:
        print(f"ratio of CPU time: {medians[0] / medians[1]:.2f}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--threads", type=int, default=200, help="of each rank, besides its main thread")
    options.add_argument("--turns", type=int, default=15)
    options.add_argument("--beside", type=Path, help="a work tree of another commit")
    options.add_argument("--look", help=argparse.SUPPRESS)
    options.add_argument("pids", type=int, nargs="*", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.look:
        sys.path.insert(0, chosen.look)
        print(json.dumps(diagnose_once(chosen.pids)))
        return
    with job(chosen.ranks, chosen.threads) as pids:
        measure([ROOT, *([chosen.beside] if chosen.beside else [])], pids, chosen.turns)


if __name__ == "__main__":
    main()
