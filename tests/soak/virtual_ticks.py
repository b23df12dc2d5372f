"""Play 200,000 seconds in virtual time, with jobs that come, hang and go. What the daemon keeps must not grow.

usage: python -m tests.soak.virtual_ticks [--ticks 200000]

Two jobs run at a time, each for ten minutes; every fourth job hangs before it ends. At the end of each round of jobs,
the command counts what the board holds: its jobs, its bytes as JSON, its series on /metrics, and the memory that
Python has allocated. The median of the last quarter must be within 5 % of that of the second quarter. The first quarter
fills the bounded tables, for example that of earlier hangs. The command exits with 1 if a number grows.
"""

import gc
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from hangwatch.model import Job, ProcessId
from tests import samples
from tests.scenarios.power import LOCKED, TRAINS, WAITS
from tests.scenarios.simulation import SETTINGS, Doing, Node, Simulation
from tests.soak import number_options
from tests.soak.growth import find_growth

RANKS = 2
JOB_SECONDS, GAP_SECONDS, HANG_SECONDS = 540, 60, 300
LIFE_SECONDS = JOB_SECONDS + GAP_SECONDS
ROUND_LIVES = 4


class Size(NamedTuple):
    """Sizes of the data that the daemon holds at one moment."""

    jobs: int
    board_bytes: int
    series: int
    python_bytes: int


@dataclass(frozen=True)
class ComingAndGoing(Node):
    """A node on which each pair of GPUs runs one job after the other."""

    def process(self, gpu: int, t: float) -> ProcessId:
        life = int(t // LIFE_SECONDS)
        return ProcessId(pid=1000 + 10 * (life % 3000) + gpu, start_ticks=100 * life)

    def found_jobs(self, t: float) -> Iterator[Job]:
        now = f"-{int(t // LIFE_SECONDS)}"
        yield from (job for job in super().found_jobs(t) if job.job_id.endswith(now))


def _doing(gpu: int, t: float) -> Doing | None:
    life, second = divmod(t, LIFE_SECONDS)
    if second >= JOB_SECONDS:
        return None
    if life % ROUND_LIVES == ROUND_LIVES - 1 and second >= JOB_SECONDS - HANG_SECONDS and gpu < RANKS:
        return LOCKED if gpu == 0 else WAITS
    return TRAINS


def _measure(simulation: Simulation, t: float) -> Size:
    for job_id in [job_id for job_id in simulation.played if int(job_id.partition("-")[2]) < t // LIFE_SECONDS - 4]:
        del simulation.played[job_id]  # the results of jobs that the board no longer shows
    gc.collect()
    families = samples.metric_families(simulation.snapshot, t)
    return Size(
        jobs=len(simulation.snapshot.jobs),
        board_bytes=len(msgspec.json.encode(simulation.snapshot, enc_hook=str)),
        series=sum(len(family.samples) for family in families),
        python_bytes=tracemalloc.get_traced_memory()[0],
    )


def play(ticks: int) -> list[Size]:
    """Play `ticks` seconds. Return the sizes at the end of each round of jobs."""
    lives = range(ticks // LIFE_SECONDS + 1)
    jobs = tuple((f"{pair}-{life}", range(pair * RANKS, (pair + 1) * RANKS)) for life in lives for pair in range(2))
    simulation = Simulation(ComingAndGoing(_doing, jobs=jobs), SETTINGS, seed=1, has_counters=True)
    sizes = []
    tracemalloc.start()
    for second in range(ticks):
        simulation.second(float(second))
        if second % (ROUND_LIVES * LIFE_SECONDS) == ROUND_LIVES * LIFE_SECONDS - GAP_SECONDS - 1:
            sizes.append(_measure(simulation, float(second)))
    return sizes


def main() -> int:
    sizes = play(number_options(__doc__, ticks=200_000).ticks)
    growing = find_growth(sizes, 4)
    print("\n".join(growing) or f"{len(sizes)} rounds of jobs: nothing grows")
    return int(bool(growing))


if __name__ == "__main__":
    sys.exit(main())
