"""Cost of each source of evidence: a diagnosis with all sources, with only stacks, with stacks and one source.

    .venv/bin/python benchmarks/evidence.py [--ranks 8] [--turns 5]

A real job over gloo waits in a collective that one rank does not join. Each diagnosis has three rounds, 0.2 s
apart, and runs in a separate process, so that its memory is measured alone. Times are medians of wall clock time,
and of the CPU time of the diagnosis and its children. Each ratio compares with the diagnosis with only the stacks.

One rank reads the time in a loop, which shows if a diagnosis pauses the job: the longest gap between two readings
is printed, with and without a diagnosis.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

from benchmarks.recorder import cpu_seconds, gap_seconds, hung_job  # noqa: E402
from hangwatch import config  # noqa: E402
from hangwatch.capture import diagnosis  # noqa: E402
from hangwatch.capture.request import CaptureRequest  # noqa: E402
from hangwatch.stacks import activity  # noqa: E402
from tests.integration.targets import job_of_pids  # noqa: E402

SOURCES = tuple(one.name for one in msgspec.structs.fields(config.Capture) if isinstance(one.default, bool))
"""The switches of [capture]: one for each source that can be turned off."""
ALL, NOTHING = "all of them", "none of them"


class Cost(NamedTuple):
    """Cost of one diagnosis: seconds, CPU seconds with children, and the peak bytes of its largest process."""

    wall_seconds: float
    cpu_seconds: float
    most_bytes: int


def settings(chosen: str) -> config.Capture:
    are_on = {source: chosen in (ALL, source) for source in SOURCES}
    return msgspec.structs.replace(config.Capture(pause_seconds=0.2), **are_on)


def diagnose_once(chosen: str, pids: Sequence[int]) -> Cost:
    """Diagnose the job of processes `pids` and return the cost. `chosen` is one source of evidence, ALL or NOTHING."""
    job = job_of_pids(pids)
    ranks = tuple(msgspec.structs.replace(rank, rank=number) for number, rank in enumerate(job.ranks))
    job = msgspec.structs.replace(job, ranks=ranks, world_size=len(pids))
    wall, cpu = time.monotonic(), cpu_seconds()
    diagnosis.diagnose_job(job, CaptureRequest(node="here", settings=settings(chosen)), activity.load())
    wall, cpu = time.monotonic() - wall, cpu_seconds() - cpu
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Cost(wall, cpu, most * 1024)


def cost(chosen: str, pids: Sequence[int], turns: int) -> Cost:
    command = [sys.executable, __file__, "--look", chosen, *map(str, pids)]
    told = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(turns)]
    return Cost(*(statistics.median(column) for column in zip(*told, strict=True)))


def measure(folder: Path, pids: Sequence[int], turns: int) -> None:
    still = gap_seconds(folder, lambda: time.sleep(2.0))
    print(f"{len(pids)} ranks; no reader: the longest gap of a rank's own clock is {still * 1e3:.1f} ms")
    print(f"{'beside the stacks':22} {'wall':>9} {'CPU':>9} {'ratio':>6} {'memory':>9} {'longest gap':>12}")
    least = 0.0
    for chosen in (NOTHING, *SOURCES, ALL):
        gaps = []

        def play(chosen: str = chosen, gaps: list[Cost] = gaps) -> None:
            gaps.append(cost(chosen, pids, turns))

        gap = gap_seconds(folder, play)
        (one,) = gaps
        least = least or one.cpu_seconds
        print(
            f"{chosen:22} {one.wall_seconds:7.2f} s {one.cpu_seconds * 1e3:6.0f} ms {one.cpu_seconds / least:6.2f} "
            f"{one.most_bytes / 2**20:5.0f} MiB {gap * 1e3:9.1f} ms"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--look", help=argparse.SUPPRESS)
    options.add_argument("pids", type=int, nargs="*", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.look:
        print(json.dumps(diagnose_once(chosen.look, chosen.pids)))
        return
    with hung_job(chosen.ranks) as (folder, pids):
        measure(folder, pids, chosen.turns)


if __name__ == "__main__":
    main()
