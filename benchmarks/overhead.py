"""Cost of the progress counters: CPU of the daemon's readers, and steps of a job per second, with and without them.

    .venv/bin/python benchmarks/overhead.py [--ranks 8 64] [--turns 6] [--seconds 20] [--json]

Real processes enqueue collectives over gloo in eight groups, each in a world of its own. In turns of equal length the
counters are read once a second, as the daemon does, or not at all. CPU seconds are those of the reading process and of
its child. Resolution: the spread of the steps per second between turns of the same kind.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hangwatch.capture.rounds import job_of_pids  # noqa: E402
from hangwatch.config import Detector, Progress  # noqa: E402
from hangwatch.model import Fault, ProcessId  # noqa: E402
from hangwatch.model.flight_records import ProgressCounter  # noqa: E402
from hangwatch.probes.process import procfs  # noqa: E402
from hangwatch.probes.torch_recorder.progress_counters import ProgressCounters  # noqa: E402
from hangwatch.state.board import Snapshot  # noqa: E402
from hangwatch.state.steps import record_counters, record_scan  # noqa: E402

GROUPS = 8
JOB = f"""
import sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.group.WORLD, *(dist.new_group([0]) for _ in range({GROUPS} - 1))]
for group in groups:
    dist.all_reduce(torch.ones(1), group=group)
print("ready", flush=True)
x = torch.ones(1)
while True:
    for group in groups:
        dist.all_reduce(x, group=group)
    time.sleep(float(sys.argv[1]))
"""


def cpu_seconds(ranks: Collection[int]) -> float:
    """Return the CPU seconds of this process and of its children, except the ranks. A child may have ended."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + reaped.ru_utime + reaped.ru_stime
    readers = set(procfs.read_children(os.getpid(), most=4096)).difference(ranks)
    return total + sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9 for pid in readers)


def steps(counters: ProgressCounters) -> int:
    found = counters.read().values()
    return sum(one.total for one in found if isinstance(one, ProgressCounter))


def record(snapshot: Snapshot, counters: Mapping[ProcessId, ProgressCounter | Fault]) -> Snapshot:
    """Let the detector follow the counters, as the daemon does."""
    return record_counters(
        snapshot,
        counters,
        now=time.monotonic(),
        unix_now=time.time(),
        settings=Detector(),
        progress=Progress(),
        capture_seconds=15.0,
        gap_seconds=10.0,
    )[0]


def measure(ranks: list[ProcessId], turns: int, seconds: float) -> dict[str, float]:
    counters, pids = ProgressCounters(), [rank.pid for rank in ranks]
    counters.follow(dict.fromkeys(ranks, "uid 0"))
    for _ in range(20):
        counters.look(60.0)
        if sum(isinstance(one, ProgressCounter) for one in counters.read().values()) == len(ranks):
            break
        time.sleep(1.0)
    snapshot, _ = record_scan(Snapshot(), [job_of_pids(pids)], time.monotonic(), time.time())
    per_second: dict[bool, list[float]] = {True: [], False: []}
    cpu: list[float] = []
    for turn in range(2 * turns):
        is_on = turn % 2 == 0
        before, began = steps(counters), time.monotonic()
        used = cpu_seconds(pids)
        while time.monotonic() - began < seconds:
            time.sleep(1.0)
            if is_on:
                snapshot = record(snapshot, counters.read())
                counters.look()
        if is_on:
            cpu.append((cpu_seconds(pids) - used) / (time.monotonic() - began))
        after = steps(counters)
        per_second[is_on].append((after - before) / (time.monotonic() - began) / len(ranks) / GROUPS)
    on, off = (statistics.mean(per_second[is_on]) for is_on in (True, False))
    spread = max(statistics.stdev(values) for values in per_second.values()) / off
    return {
        "ranks": len(ranks),
        "core_percent": round(100 * statistics.mean(cpu), 3),
        "steps_with": round(on, 2),
        "steps_without": round(off, 2),
        "change_percent": round(100 * (on / off - 1), 2),
        "resolution_percent": round(100 * spread, 2),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    options.add_argument("--turns", type=int, default=6)
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--pause", type=float, default=0.5, help="seconds between two steps of a rank")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    rows = []
    for count in chosen.ranks:
        command = [sys.executable, "-c", JOB, str(chosen.pause)]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) for _ in range(count)]
        try:
            for process in started:
                assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            states = [procfs.read_state(process.pid) for process in started]
            rows.append(measure([state[0] for state in states if state is not None], chosen.turns, chosen.seconds))
        finally:
            for process in started:
                process.kill()
                process.wait()
    if chosen.json:
        print(json.dumps(rows))
    for row in () if chosen.json else rows:
        print(f"{row['ranks']:3} ranks: {row['core_percent']} % of a core", end="; ")
        print(f"steps per second and rank: {row['steps_with']} with, {row['steps_without']} without", end=" ")
        print(f"({row['change_percent']:+} %; resolution {row['resolution_percent']} %)")


if __name__ == "__main__":
    main()
