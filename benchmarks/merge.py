"""Cost of `hangwatch merge`: CPU time and memory for 2,048 and 12,500 nodes of 8 ranks.

usage: python benchmarks/merge.py [--nodes N ...]

Each node's incident.json holds three rounds of stacks as the daemon writes them. A rank has a main thread of 16
frames, two other threads and a flight recorder. One rank in 1024 is in its data loader, the others wait in one
collective. The files are written first. Then the real command reads their folder in a separate process.

"CPU" is the CPU time of that process, including the start of the interpreter, and "peak" its largest resident set.
Each is the best of three turns. Other load on the machine increases CPU time, too. For comparison, "loop" is the
CPU time of 3,000,000 multiplications right before and after a turn. "loops" is the CPU time of a turn divided by
"loop"; the smallest value of all turns is shown.

"whole" is a process that decodes the incidents with the full model, then merges and judges them, once. It shows the
cost of decoding the fields that merging does not use. The first turn compiles the modules, as pip does once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.grouping import LOADS, OTHERS, TRAINS, WAITS, frames  # noqa: E402
from hangwatch import config  # noqa: E402
from hangwatch.collectives.rank_records import drop_unneeded  # noqa: E402
from hangwatch.formats import incident_file  # noqa: E402
from hangwatch.model import (  # noqa: E402
    Capture,
    GpuReadings,
    Incident,
    Job,
    JobState,
    ProcessDump,
    ProcessId,
    Rank,
    RankDump,
    RankId,
    Thread,
)
from hangwatch.model.flight_records import FlightRecord, RankRecords  # noqa: E402
from hangwatch.stacks import activity  # noqa: E402
from hangwatch.stacks.grouping import group_ranks  # noqa: E402
from hangwatch.tools.fleet.merge import merge_all  # noqa: E402
from hangwatch.verdict import judge  # noqa: E402

SIZES = (2_048, 12_500)
RANKS_PER_NODE = 8
TURNS = 3
LATE = 5
LATE_NODES_EVERY = 1024 // RANKS_PER_NODE
NODE, FIRST_RANK = "the-node", 900_000_000  # replaced in the bytes of one node's file
OUTER = [f"layer_{number} (mine/model_{number % 3}.py:{100 + number})" for number in range(10)]


def records(is_late: bool) -> RankRecords:
    """Return the newest 24 completed records of a rank in three groups, and one open record unless the rank is late."""
    done = [_record(number, state="completed") for number in range(24)]
    newest = [] if is_late else [_record(24, state="open")]
    held = (*done, *newest)
    return drop_unneeded(
        RankRecords(
            library="nccl",
            records=held,
            next_id=len(held),
            oldest_id=0,
            is_wrapped=False,
            capacity=2000,
            layout="2.13",
            read_unix_seconds=1_773_458_100.0,
        )
    )


def _record(number: int, state: str) -> FlightRecord:
    return FlightRecord(
        id=number,
        reset_epoch=0,
        group_id=number % 3,
        group_name=str(number % 3),
        group_description="default_pg" if number % 3 == 0 else f"mesh_{number % 3}",
        collective_seq=100 + number // 3,
        p2p_seq=0,
        op_id=number,
        is_p2p=False,
        operation="nccl:all_reduce",
        state="open" if state == "open" else "completed",
        is_started=True,
        is_retired=state != "open",
        created_unix_ns=1_773_458_000_000_000_000 + number,
        timeout_ms=600_000,
        input_sizes=((4096, 1024),),
        output_sizes=((4096, 1024),),
        input_dtypes=("Float",),
        output_dtypes=("Float",),
        thread_id=140_000,
    )


def rank_dump(local: int, is_late: bool) -> RankDump:
    lines = [*(LOADS if is_late else WAITS[0]), *OUTER, *TRAINS]
    threads = [Thread(name="MainThread", thread_id="140000", frames=frames(lines), is_main=True, pthread_id=140_000)]
    threads += [Thread(name=name, thread_id=str(local), frames=frames(other)) for name, other in OTHERS]
    return RankDump(
        id=RankId(node=NODE, rank=FIRST_RANK + local, local_rank=local, pid=4000 + local),
        rounds=tuple(
            ProcessDump(
                taken_monotonic_seconds=5.0 * number,
                threads=tuple(threads),
                state="S",
                cpu_seconds=100.0,
                recorders=(records(is_late),),
            )
            for number in range(3)
        ),
        gpu=GpuReadings(power_watts=70.0, utilization_ratio=0.0)
        if is_late
        else GpuReadings(power_watts=118.0, utilization_ratio=1.0),
    )


def node_file(nodes: int, *, has_late: bool) -> bytes:
    """Return the incident.json of one of `nodes` nodes. With `has_late`, one of its ranks is late."""
    ranks = tuple(rank_dump(local, has_late and local == LATE) for local in range(RANKS_PER_NODE))
    taken = Capture(
        job_id="big",
        node=NODE,
        started_unix_seconds=1_773_458_100.0,
        duration_seconds=10.0,
        rounds=3,
        ranks=ranks,
        world_size=nodes * RANKS_PER_NODE,
        job_key="0123456789abcdef",
    )
    grouping = group_ranks(taken, activity.load(), config.Capture())
    job = Job(
        job_id="big",
        job_key="0123456789abcdef",
        owner="uid 1000",
        launcher="torchrun",
        launcher_id=ProcessId(pid=3999, start_ticks=1),
        ranks=tuple(
            Rank(id=ProcessId(pid=4000 + local, start_ticks=2), rank=FIRST_RANK + local, local_rank=local)
            for local in range(RANKS_PER_NODE)
        ),
        world_size=nodes * RANKS_PER_NODE,
        local_world_size=RANKS_PER_NODE,
        command="python train.py",
    )
    incident = Incident(
        incident_id=NODE,
        node=NODE,
        job=job,
        opened_unix_seconds=1_773_458_100.0,
        state=JobState.HUNG,
        verdict=judge.judge(grouping, RANKS_PER_NODE),
        grouping=grouping,
        captures=(taken,),
    )
    # The verdict sentence may name ranks with a thousands separator. Merging does not read this text.
    return incident_file.encode(incident)


def write_nodes(folder: Path, nodes: int) -> int:
    """Write one folder with an incident.json for each node. Return the total size of the files in bytes."""
    calm, late = (node_file(nodes, has_late=has_late) for has_late in (False, True))
    total = 0
    for number in range(nodes):
        content = late if number % LATE_NODES_EVERY == 0 else calm
        for local in range(RANKS_PER_NODE):
            content = content.replace(str(FIRST_RANK + local).encode(), str(number * RANKS_PER_NODE + local).encode())
        content = content.replace(NODE.encode(), f"gpu-{number:05d}".encode())
        here = folder / f"gpu-{number:05d}"
        here.mkdir()
        (here / incident_file.INCIDENT_FILE).write_bytes(content)
        total += len(content)
    return total


def late_ranks(nodes: int) -> list[int]:
    return [number * RANKS_PER_NODE + LATE for number in range(0, nodes, LATE_NODES_EVERY)]


def whole(folder: Path) -> None:
    """Merge the incidents in `folder` with the full model instead of `fleet.sighting`, and print the named ranks."""
    incidents = [incident_file.load(path) for path in sorted(folder.iterdir())]
    verdict = judge.judge(merge_all(incident.grouping for incident in incidents))
    print(json.dumps({"verdict": {"named": [{"rank": rank.rank} for rank in verdict.named]}}))


class Turn(NamedTuple):
    cpu_seconds: float
    peak_mb: float
    loop_seconds: float

    @property
    def loops(self) -> float:
        return self.cpu_seconds / self.loop_seconds


def run_measured(command: list[str], nodes: int) -> Turn:
    """Run a merge command and return its cost. Fail unless its verdict names the late ranks."""
    before = loop()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        answer = json.load(process.stdout)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.returncode
    assert [rank["rank"] for rank in answer["verdict"]["named"]] == late_ranks(nodes), answer["verdict"]["message"]
    return Turn(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, (before + loop()) / 2)


def loop() -> float:
    began = time.process_time()
    total = 0
    for number in range(3_000_000):
        total += number * number
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument(
        "--whole-at-most", type=int, default=2_048, help="nodes beyond which only the command is measured"
    )
    parser.add_argument("--whole", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.whole:
        whole(options.whole)
        return
    with tempfile.TemporaryDirectory() as compiled:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = compiled
        compare(options.nodes, options.whole_at_most)


def compare(sizes: list[int], whole_at_most: int) -> None:
    print("| nodes | ranks | files MB | CPU s | peak MB | loop s | loops | whole CPU s | whole peak MB |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for nodes in sizes:
        with tempfile.TemporaryDirectory() as folder:
            size = write_nodes(Path(folder), nodes) / 1e6
            command = [sys.executable, "-m", "hangwatch", "merge", "--json", folder]
            turns = [run_measured(command, nodes) for _ in range(TURNS)]
            of_model = "| - | - |"
            if nodes <= whole_at_most:
                whole_turn = run_measured([sys.executable, __file__, "--whole", folder], nodes)
                of_model = f"| {whole_turn.cpu_seconds:.2f} | {whole_turn.peak_mb:.0f} |"
        best = min(turns)
        print(
            f"| {nodes:,} | {nodes * RANKS_PER_NODE:,} | {size:.0f} | {best.cpu_seconds:.2f} | {best.peak_mb:.0f} "
            f"| {best.loop_seconds:.2f} | {min(turn.loops for turn in turns):.1f} {of_model}",
            flush=True,
        )


if __name__ == "__main__":
    main()
