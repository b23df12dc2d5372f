"""Cost of reading the flight recorder, compared with py-spy's dump of the same rank in the same run.

    .venv/bin/python benchmarks/recorder.py [--ranks 8] [--rounds 10]

A real job over gloo with full buffers (2,000 records) waits in a collective that one rank does not join, as in a
hang. Times are medians of wall clock time, and of the CPU time of the reader and its children.

One rank reads the time in a loop, which shows if a reader pauses the job. The longest gap between two readings is
measured without any reader, while the recorder is read, and while py-spy dumps with a pause.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hangwatch.collectives import rank_records  # noqa: E402
from hangwatch.model import ProcessId  # noqa: E402
from hangwatch.model.flight_records import RankRecords  # noqa: E402
from hangwatch.probes import torch_recorder  # noqa: E402
from hangwatch.probes.base import procfs, pseudo_files  # noqa: E402
from hangwatch.probes.process import memory_image  # noqa: E402
from hangwatch.probes.torch_recorder import layouts, libraries, search, symbols  # noqa: E402

MOST_SECONDS = 180.0
JOB = """
import ctypes, os, sys, threading, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
pairs = [dist.new_group([first, first + 1], group_desc="tp") for first in range(0, dist.get_world_size(), 2)]
x = torch.ones(4)
for step in range(1100):
    dist.all_reduce(x, group=pairs[rank // 2])
    dist.all_reduce(x)
if rank == 0:
    def clock():
        longest, before = 0, time.monotonic_ns()
        while True:
            now = time.monotonic_ns()
            longest, before = max(longest, now - before), now
            if os.path.exists(folder + "/tell"):
                os.remove(folder + "/tell")
                open(folder + "/gap.new", "w").write(str(longest))
                os.rename(folder + "/gap.new", folder + "/gap")
                longest, before = 0, time.monotonic_ns()
    open(folder + "/pid-0", "w").write(str(os.getpid()))
    clock()
open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
dist.all_reduce(x)
"""


def wait_for(probe: Callable[[], bool]) -> None:
    end = time.monotonic() + MOST_SECONDS
    while not probe():
        if time.monotonic() > end:
            raise SystemExit("the job did not come so far in time")
        time.sleep(0.02)


def cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def median(rounds: int, action: Callable[[], object]) -> tuple[float, float]:
    """Call `action` `rounds` times. Return its median wall clock and CPU seconds."""
    walls, cpus = [], []
    for _ in range(rounds):
        wall, cpu = time.monotonic(), cpu_seconds()
        action()
        walls.append(time.monotonic() - wall)
        cpus.append(cpu_seconds() - cpu)
    return statistics.median(walls), statistics.median(cpus)


def gap_seconds(folder: Path, during: Callable[[], object]) -> float:
    """Return the longest time, in seconds, in which the rank with the clock did not run during `during`."""

    def read_gap() -> float:
        (folder / "tell").touch()
        wait_for((folder / "gap").exists)
        seconds = int((folder / "gap").read_text()) / 1e9
        (folder / "gap").unlink()
        return seconds

    read_gap()
    during()
    return read_gap()


def dump(pid: int, *options: str) -> None:
    program = Path(sys.executable).with_name("py-spy")
    subprocess.run([program, "dump", "--json", *options, "--pid", str(pid)], capture_output=True, check=False)


def row(what: str, wall: float, cpu: float, reference_seconds: float) -> None:
    print(f"{what:52} {wall * 1e3:9.2f} ms {cpu * 1e3:9.2f} ms CPU {wall / reference_seconds:8.2f}")


@contextlib.contextmanager
def hung_job(ranks: int) -> Iterator[tuple[Path, list[int]]]:
    """Start a job that waits in a collective which rank 0 has not joined.

    Yield its folder, and its pids in rank order.
    """
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with (folder / "log").open("wb") as log:
            children = [
                subprocess.Popen(
                    [sys.executable, "-c", JOB, name],
                    env={**os.environ, **place, "RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                )
                for rank in range(ranks)
            ]
        try:
            wait_for(lambda: all((folder / f"pid-{rank}").exists() for rank in range(ranks)))
            yield folder, [child.pid for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--rounds", type=int, default=10)
    chosen = options.parse_args()
    with hung_job(chosen.ranks) as (folder, pids):
        measure(folder, pids, chosen.rounds)


def measure(folder: Path, pids: list[int], rounds: int) -> None:
    states = [procfs.read_state(pid) for pid in pids]
    ranks = [state[0] for state in states if state is not None]
    victim, library = ranks[1], libraries.parse_maps(Path(f"/proc/{pids[1]}/maps").read_bytes())
    mapped = library.libraries[0]

    def read(process: ProcessId, newest: int | None = None) -> RankRecords:
        (answer,) = torch_recorder.SHARED.read(process, newest=newest)
        assert isinstance(answer, RankRecords), answer
        return answer

    def ask_symbols() -> None:
        page = os.pread(memory, pseudo_files.PAGE_BYTES, mapped.start)
        assert symbols.SymbolTables().look_up(mapped, page, victim, "", procfs.PROC).pointer is not None

    def search_shape() -> None:
        found = search.search(
            lambda places: [os.pread(memory, size, address) for address, size in places],
            mapped.data,
            library.writable,
            layouts.candidates("2.13.0"),
        )
        assert len(found) == 1

    memory = os.open(f"/proc/{victim.pid}/mem", os.O_RDONLY)
    try:
        records = read(victim)
        one = median(rounds, lambda: dump(victim.pid, "--nonblocking"))
        print(f"{len(ranks)} ranks, {len(records.records):,} records of {records.layout}; the last column is the ratio")
        row("py-spy dump --nonblocking of a rank", *one, one[0])
        row("the recorder of a rank, whole", *median(rounds, lambda: read(victim)), one[0])
        short = median(rounds, lambda: read(victim, rank_records.NEWEST_KEPT))
        row("the recorder of a rank, as a capture reads it", *short, one[0])
        node = median(rounds, lambda: [read(rank, rank_records.NEWEST_KEPT) for rank in ranks])
        row(f"the recorders of {len(ranks)} ranks, as a capture reads them", *node, one[0])
        all_dumps = median(max(1, rounds // 3), lambda: [dump(rank.pid, "--nonblocking") for rank in ranks])
        row(f"py-spy dump --nonblocking of {len(ranks)} ranks", *all_dumps, one[0])
        row("symbols of a library file, in a child", *median(rounds, ask_symbols), one[0])
        page = os.pread(memory, pseudo_files.PAGE_BYTES, mapped.start)
        known = median(rounds, lambda: symbols.SHARED.look_up(mapped, page, victim, "", procfs.PROC))
        row("symbols that are known", *known, one[0])
        row("search by shape", *median(rounds, search_shape), one[0])
        print(f"bytes of one reading: {memory_image.MOST_BYTES >> 20} MiB at most")
        for what, action in (
            ("without a reader", lambda: time.sleep(1.0)),
            ("the recorder is read 20 times", lambda: [read(ranks[0]) for _ in range(20)]),
            ("py-spy dumps 20 times, with its pause", lambda: [dump(ranks[0].pid) for _ in range(20)]),
        ):
            print(f"longest gap of the target's own clock while {what}: {gap_seconds(folder, action) * 1e3:.2f} ms")
    finally:
        os.close(memory)


if __name__ == "__main__":
    main()
