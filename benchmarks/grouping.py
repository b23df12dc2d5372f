"""Time and memory of grouping, merging and judging, for 8 to 100,000 ranks.

usage: python benchmarks/grouping.py [--ranks N ...]

Each size runs in separate processes. A rank has a main thread of 16 frames and two other threads. One rank in 1024
is in its data loader, the others wait in four collectives. Equal frames are one object, as from the parsers of
text; threads, dumps and ranks are separate objects.

"group" groups all ranks at once. "merge" merges the groups of nodes of 8 ranks. "judge" is the verdict. "peak" is
the memory of the whole process with all dumps. "explain" reads the same stacks as py-spy text with prefixes (35
lines per rank), then groups and judges them; its "peak" is the memory of a separate process.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache

from hangwatch import config
from hangwatch.explain import traces
from hangwatch.fleet import merge
from hangwatch.model import Frame, ProcessDump, RankDump, RankId, Thread
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict import judge

SIZES = (8, 512, 16_384, 100_000)
RANKS_PER_NODE = 8
OUTER = [f"layer_{number} (mine/model_{number % 3}.py:{100 + number})" for number in range(10)]
C10D = "torch/distributed/distributed_c10d.py"
LOGGER = "wrapper (torch/distributed/c10d_logger.py:83)"
P2P = "recv_forward (megatron/core/pipeline_parallel/p2p_communication.py:380)"
PIN = "torch/utils/data/_utils/pin_memory.py"
WAITS = [
    [f"all_reduce ({C10D}:2501)", LOGGER, "clip (optim.py:20)"],
    [f"broadcast ({C10D}:2437)", LOGGER, "loss (engine.py:540)"],
    [f"recv ({C10D}:2200)", P2P, "run (schedules.py:9)"],
    [f"all_gather ({C10D}:2900)", LOGGER, "metrics (engine.py:77)"],
]
LOADS = ["wait (threading.py:302)", "get (queue.py:170)", "_try_get_data (torch/utils/data/dataloader.py:1011)"]
PINS = ["get (queue.py:170)", f"do_one_step ({PIN}:28)", f"_pin_memory_loop ({PIN}:52)"]
OTHERS = [
    ("Thread-1 (_pin_memory_loop)", PINS),
    ("Thread-2 (_monitor)", ["wait (threading.py:306)", "run (tqdm/_monitor.py:60)"]),
]
TRAINS = ["train_step (trainer.py:90)", "train (trainer.py:40)", "<module> (train.py:8)"]


def lines_of(rank: int) -> list[str]:
    return [*(LOADS if rank % 1024 == 5 else WAITS[rank // RANKS_PER_NODE % 4]), *OUTER, *TRAINS]


@cache
def frame(text: str) -> Frame:
    function, _, rest = text.rstrip(")").rpartition(" (")
    file, _, line = rest.rpartition(":")
    return Frame(function=function, file=file, line=int(line))


def frames(lines: list[str]) -> tuple[Frame, ...]:
    return tuple(frame(text) for text in lines)


def rank_dump(rank: int) -> RankDump:
    threads = [Thread(name="MainThread", thread_id=str(rank), frames=frames(lines_of(rank)), is_main=True)]
    threads += [Thread(name=name, thread_id=str(rank), frames=frames(lines)) for name, lines in OTHERS]
    identity = RankId(
        node=f"node{rank // RANKS_PER_NODE}", rank=rank, local_rank=rank % RANKS_PER_NODE, pid=1000 + rank
    )
    return RankDump(id=identity, rounds=(ProcessDump(taken_monotonic_seconds=0.0, threads=tuple(threads), state="S"),))


def text(ranks: int) -> Iterator[str]:
    for rank in range(ranks):
        prefix = f"[node{rank // RANKS_PER_NODE}:{rank}]"
        yield f"{prefix}Process {1000 + rank}: python train.py\n"
        yield f"{prefix}Python v3.11.7 (/usr/bin/python3)\n"
        yield f"{prefix}\n"
        for name, lines in (("MainThread", lines_of(rank)), *OTHERS):
            yield f'{prefix}Thread {1000 + rank} (idle): "{name}"\n'
            for line in lines:
                yield f"{prefix}    {line}\n"


def measure(size: int) -> dict[str, float]:
    dumps = [rank_dump(rank) for rank in range(size)]
    table = activity.load()
    gc.collect()
    began = time.perf_counter()
    grouping = group_ranks(dumps, table, config.Capture(), size)
    grouped = time.perf_counter()
    verdict = judge.judge(grouping)
    judged = time.perf_counter()
    peak = peak_megabytes()
    assert [rank.rank for rank in verdict.named] == late(size), verdict.message
    firsts = range(0, size, RANKS_PER_NODE)
    nodes = [group_ranks(dumps[first : first + RANKS_PER_NODE], table, config.Capture()) for first in firsts]
    merging = time.perf_counter()
    merged = merge.merge_all(nodes)
    merge_seconds = time.perf_counter() - merging
    assert merged.groups == grouping.groups
    return {"group": grouped - began, "judge": judged - grouped, "peak": peak, "merge": merge_seconds}


def explain(size: int) -> dict[str, float]:
    began = time.perf_counter()
    found = traces.collect([("stdin", text(size))])
    grouping = group_ranks(found.ranks, activity.load(), config.Capture(), found.world_size)
    assert [rank.rank for rank in judge.judge(grouping).named] == late(size)
    return {"explain": time.perf_counter() - began, "explain_peak": peak_megabytes()}


def late(size: int) -> list[int]:
    return [rank for rank in range(size) if rank % 1024 == 5]


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        work = {"measure": measure, "explain": explain}[options.one[0]]
        print(json.dumps(work(int(options.one[1]))))
        return
    print("| ranks | group s | judge s | both, µs per rank | peak MB | merge s | explain s | peak MB |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for size in options.ranks:
        one = {**run_separately("measure", size), **run_separately("explain", size)}
        each = 1e6 * (one["group"] + one["judge"]) / size
        print(
            f"| {size:,} | {one['group']:.3f} | {one['judge']:.3f} | {each:.0f} | {one['peak']:.0f} "
            f"| {one['merge']:.3f} | {one['explain']:.2f} | {one['explain_peak']:.0f} |",
            flush=True,
        )


def run_separately(work: str, size: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", work, str(size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
