"""CPU time and memory of grouping, merging, judging and reporting, for 8 to 100,000 ranks.

usage: python benchmarks/grouping.py [--json] [--ranks N ...]

Each size runs in separate processes. A rank has a main thread of 16 frames and two other threads. One rank in 1024
is in its data loader, the others wait in four collectives. Equal frames are one object, as from the parsers of
text; threads, dumps and ranks are separate objects.

"group" groups all ranks at once. "judge" is the verdict, with the recommended action and the fingerprint. "merge"
decodes and merges the groups of nodes of 8 ranks, as `hangwatch dump --nodes` does; "merge, lines differ" those of
nodes with equal groups in which a line number is different on each node. "text" and "html" are the reports. "peak" is
the memory of the whole process with all dumps. "explain" reads the same stacks as py-spy text with prefixes (35 lines
per rank), then groups and judges them; its "peak" is the memory of a separate process. "group, recorders" and "judge,
recorders" are the same dumps in two rounds, with NCCL's flight recorder in each rank: the GPU of every other rank is
one collective behind. Times are CPU seconds, the best of three turns; "explain" has one turn. Garbage is collected,
except where the commands for many ranks switch that off: recorders, merge and explain. Each step runs once on 8 ranks
first: rules are compiled then.

The last row has the slopes in the log-log plot of time over ranks, by least squares over all sizes from 1,024 ranks:
1 is linear, 2 quadratic. With --json, the rows are a list of objects: of each step and size the "cpu_seconds".
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import log
from pathlib import Path
from statistics import linear_regression
from typing import TypeVar

import msgspec

from hangwatch import __version__, config
from hangwatch.formats import sighting
from hangwatch.model import (
    INCIDENT_VERSION,
    Frame,
    Grouping,
    Job,
    ProcessDump,
    ProcessId,
    Rank,
    RankDump,
    RankId,
    Thread,
)
from hangwatch.model.flight_records import FlightRecord, RankRecords
from hangwatch.report import html
from hangwatch.report import text as report_text
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tools.explain import traces
from hangwatch.tools.fleet.merge import SightingCollector
from hangwatch.verdict import judge

SIZES = (8, 512, 1_024, 4_096, 16_384, 100_000)
FEWEST_OF_SLOPE = 1_024
TURNS = 3
STEPS = (
    "group",
    "judge",
    "group, recorders",
    "judge, recorders",
    "merge",
    "merge, lines differ",
    "text",
    "html",
    "explain",
)
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


def with_recorder(dump: RankDump) -> RankDump:
    """Return the dump in two rounds, with a flight recorder."""
    rank = dump.id.rank or 0
    records = tuple(
        FlightRecord(
            id=number,
            reset_epoch=0,
            group_id=0,
            group_name="0",
            group_description="default_pg",
            collective_seq=number,
            p2p_seq=0,
            op_id=number,
            is_p2p=False,
            operation="nccl:all_reduce",
            state="completed" if number < 4 - rank % 2 else "open",
            is_started=True,
            is_retired=False,
            created_unix_ns=(1_700_000_000 + number) * 10**9,
            timeout_ms=600_000,
        )
        for number in range(1, 5)
    )
    recorder = RankRecords(
        library="nccl",
        records=records,
        next_id=5,
        oldest_id=1,
        is_wrapped=False,
        capacity=2000,
        layout="2.13",
        read_unix_seconds=1_700_000_100.0,
    )
    each = msgspec.structs.replace(dump.rounds[0], recorders=(recorder,))
    return msgspec.structs.replace(dump, rounds=(each, each))


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


T = TypeVar("T")


def best_of(turns: int, step: Callable[[], T], *, collects_garbage: bool = True) -> tuple[T, float]:
    """Return the result of a step, and the CPU seconds of its fastest turn."""
    seconds = []
    for _ in range(turns):
        gc.collect()
        if not collects_garbage:
            gc.disable()
        began = time.process_time()
        result = step()
        seconds.append(time.process_time() - began)
        gc.enable()
    return result, min(seconds)


def measure(size: int) -> dict[str, float]:
    dumps = [rank_dump(rank) for rank in range(size)]
    table, took = activity.load(), {}
    grouping, took["group"] = best_of(TURNS, lambda: group_ranks(dumps, table, config.Capture(), size))
    verdict, took["judge"] = best_of(TURNS, lambda: judge.judge(msgspec.structs.replace(grouping)))
    took["peak"] = peak_megabytes()
    assert [rank.rank for rank in verdict.named] == late(size), verdict.message
    firsts = range(0, size, RANKS_PER_NODE)
    replies = [reply(dumps[first : first + RANKS_PER_NODE], table, size) for first in firsts]
    merged, took["merge"] = best_of(TURNS, lambda: merge_replies(replies), collects_garbage=False)
    assert merged.groups == grouping.groups
    line = b'"trainer.py","line":%d'
    replies = [content.replace(line % 90, line % (100 + node)) for node, content in enumerate(replies)]
    merged, took["merge, lines differ"] = best_of(TURNS, lambda: merge_replies(replies), collects_garbage=False)
    assert [group.key for group in merged.groups] == [group.key for group in grouping.groups]
    _, took["text"] = best_of(TURNS, lambda: report_text.render_verdict(grouping, verdict))
    _, took["html"] = best_of(TURNS, lambda: html.render_grouping(grouping, verdict))
    return took


def measure_recorders(size: int) -> dict[str, float]:
    dumps = [with_recorder(rank_dump(rank)) for rank in range(size)]
    table, took = activity.load(), {}
    grouping, took["group, recorders"] = best_of(
        TURNS, lambda: group_ranks(dumps, table, config.Capture(), size), collects_garbage=False
    )
    verdict, took["judge, recorders"] = best_of(
        TURNS, lambda: judge.judge(msgspec.structs.replace(grouping)), collects_garbage=False
    )
    assert [rank.rank for rank in verdict.named] == list(range(1, size, 2)), verdict.message
    return took


def reply(dumps: Sequence[RankDump], table: activity.Table, world_size: int) -> bytes:
    """Return the reply of one node to `hangwatch dump --nodes`."""
    node = dumps[0].id.node or ""
    job = Job(
        job_id="big",
        job_key="0123456789abcdef",
        owner="uid 1000",
        launcher="torchrun",
        launcher_id=ProcessId(pid=999, start_ticks=1),
        ranks=tuple(
            Rank(id=ProcessId(pid=dump.id.pid or 0, start_ticks=2), rank=dump.id.rank, local_rank=dump.id.local_rank)
            for dump in dumps
        ),
        world_size=world_size,
        command="python train.py",
    )
    grouping = group_ranks(dumps, table, config.Capture(), world_size)
    found = sighting.Sighting(node=node, job=job, opened_unix_seconds=0.0, grouping=grouping)
    return msgspec.json.encode(
        sighting.GroupedDump(
            schema_version=INCIDENT_VERSION,
            hangwatch_version=__version__,
            node=node,
            printed_unix_seconds=0.0,
            jobs=(found,),
        )
    )


def merge_replies(replies: Iterable[bytes]) -> Grouping:
    collector = SightingCollector()
    for content in replies:
        for job in sighting.parse(Path("reply"), content).jobs:
            collector.add(job)
    return collector.merge_jobs(collector.jobs)


def explain(size: int) -> dict[str, float]:
    def group_and_judge() -> list[int | None]:
        found = traces.collect([("stdin", text(size))])
        grouping = group_ranks(found.ranks, activity.load(), config.Capture(), found.world_size)
        return [rank.rank for rank in judge.judge(grouping).named]

    named, seconds = best_of(1, group_and_judge, collects_garbage=False)
    assert named == late(size)
    return {"explain": seconds, "explain_peak": peak_megabytes()}


WORKS = {"measure": measure, "measure_recorders": measure_recorders, "explain": explain}


def late(size: int) -> list[int]:
    return [rank for rank in range(size) if rank % 1024 == 5]


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        work = WORKS[options.one[0]]
        work(RANKS_PER_NODE)
        print(json.dumps(work(int(options.one[1]))))
        return
    took = {
        size: {step: seconds for work in WORKS for step, seconds in run_separately(work, size).items()}
        for size in options.ranks
    }
    if options.json:
        rows = [
            {"step": step, "ranks": size, "cpu_seconds": round(seconds[step], 6)}
            for size, seconds in took.items()
            for step in STEPS
        ]
        print(json.dumps(rows, indent=1))
    else:
        print(table(took))


def find_slope(seconds_of: Mapping[int, float]) -> float | None:
    """Return the slope of seconds over ranks in the log-log plot. None with fewer than two large sizes."""
    large = [(log(size), log(seconds)) for size, seconds in seconds_of.items() if size >= FEWEST_OF_SLOPE]
    return linear_regression(*zip(*large, strict=True)).slope if len(large) > 1 else None


def table(took: dict[int, dict[str, float]]) -> str:
    slopes = {step: find_slope({size: seconds[step] for size, seconds in took.items()}) for step in STEPS}
    lines = [
        f"| ranks | {' | '.join(f'{step} s' for step in STEPS)} | group + judge, µs per rank | peak MB | explain MB |",
        f"|---:|{'---:|' * (len(STEPS) + 3)}",
    ]
    for size, seconds in took.items():
        each = 1e6 * (seconds["group"] + seconds["judge"]) / size
        times = " | ".join(f"{seconds[step]:.4f}" for step in STEPS)
        lines.append(f"| {size:,} | {times} | {each:.0f} | {seconds['peak']:.0f} | {seconds['explain_peak']:.0f} |")
    shown = ("-" if slopes[step] is None else f"{slopes[step]:.2f}" for step in STEPS)
    return "\n".join((*lines, f"| slope | {' | '.join(shown)} | | | |"))


def run_separately(work: str, size: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", work, str(size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
