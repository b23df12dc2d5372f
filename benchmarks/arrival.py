"""Cost of finding late ranks: a minute of 8 ranks with full recorders, and the rule over 16,384 ranks.

usage: python benchmarks/arrival.py
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time

from hangwatch.collectives.arrival import Enqueued, Window, add_reading, judge, list_collectives
from hangwatch.model import ProcessId
from hangwatch.model.flight_records import RankRecords
from hangwatch.probes.base import procfs
from hangwatch.probes.torch_recorder import Recorders

RANK = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for number in range(2200):
    dist.all_reduce(torch.ones(1000 + 1000 * (number % 2)))
print("ready", flush=True)
time.sleep(600)
"""
RANKS, ROWS = 16_384, 300


def measure_minute() -> None:
    """Read one real recorder of 2,000 records eight times, and judge them as eight ranks."""
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True) as rank:
        try:
            assert rank.stdout is not None
            rank.stdout.readline()
            state = procfs.read_state(rank.pid)
            assert state is not None
            recorders = Recorders()
            recorders.read(state[0])  # finds the recorder, once for each process
            began = time.process_time()
            by_rank = {}
            for number in range(8):
                (recorder,) = recorders.read(state[0])
                assert isinstance(recorder, RankRecords)
                by_rank[ProcessId(pid=number, start_ticks=1)] = list_collectives(recorder, ())
            read = time.process_time() - began
            judge(add_reading(Window(), by_rank, 1.0), 1.0)
            print(
                f"8 ranks, {len(recorder.records)} records each: {time.process_time() - began:.2f} s of CPU a reading"
            )
            print(f"  of this {read:.2f} s to read the recorders")
        finally:
            rank.kill()


def measure_many() -> None:
    """Judge 16,384 ranks of which one is late, in readings of 20 collectives."""
    rng, window, cpu_seconds = random.Random(1), Window(), 0.0
    jitter = [int(rng.gauss(0, 2e6)) for _ in range(RANKS)]
    for first in range(1, ROWS + 20, 20):
        numbers = range(max(1, first - 1), first + 20)
        by_rank = {}
        for rank in range(RANKS):
            times = (
                1_700_000_000_000_000_000
                + 20_000_000 * n
                + jitter[(7 * rank + 131 * n) % RANKS]
                + 2_000_000 * (rank == 7)
                for n in numbers
            )
            by_rank[ProcessId(pid=rank, start_ticks=1)] = [
                Enqueued("gloo", "0", "all_reduce", (), n, time_ns) for n, time_ns in zip(numbers, times, strict=True)
            ]
        began = time.process_time()
        window = add_reading(window, by_rank, 5.0)
        cpu_seconds += time.process_time() - began
    began = time.process_time()
    order = judge(window, 5.0)
    judged = time.process_time() - began
    assert order.named == ProcessId(pid=7, start_ticks=1)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{RANKS:,} ranks, {order.records} collectives: {cpu_seconds:.1f} s of CPU to add, {judged:.1f} s to judge")
    print(f"  {memory} MiB with the input")


if __name__ == "__main__":
    measure_minute()
    measure_many()
