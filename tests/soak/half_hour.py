"""Run a real daemon for half an hour while jobs come, hang and end. What it uses must stay flat.

usage: python -m tests.soak.half_hour [--minutes 30]

One job after the other starts, trains, hangs at a lock until the daemon pages, and ends. After each job the command
reads the daemon: memory (Pss of all its processes), threads, descriptors, and series of a scrape. The first third of
the time fills the bounded tables. The median of the last third must be within 5 % of that of the middle third, or
one higher. The command exits with 1 if not. The daemon monitors all jobs that it sees, so other jobs on the machine
would count: run it in a pid namespace of its own, as `make long PART=soak` does.
"""

import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, compile_library, h100
from tests.real_daemon import RealDaemon
from tests.simulated.node import SimulatedNode
from tests.soak import number_options
from tests.soak.growth import find_growth

RANKS, STUCK = 4, 2
HUNG = ("gpu all power_watts 118", f"gpu {STUCK} power_watts 86", f"gpu {STUCK} utilization_ratio 0")
QUICK = {
    "detector": {"hold_seconds": 1.0, "recover_seconds": 0.4, "cooldown_seconds": 0.0},
    "capture": {"pause_seconds": 0.2},
    "jobs": {"discover_seconds": 1.0},
}


class Usage(NamedTuple):
    """Resources that the daemon and its children use at one moment."""

    memory_mib: float
    threads: int
    descriptors: int
    series: int


def measure(daemon: RealDaemon) -> Usage:
    """Return the resources in use now."""
    parent = psutil.Process(daemon.process.pid)
    memory_bytes = threads = descriptors = 0
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            memory_bytes += process.memory_full_info().pss
            threads += process.num_threads()
            descriptors += process.num_fds()
    series = sum(not line.startswith("#") for line in daemon.get("/metrics").splitlines())
    return Usage(memory_bytes / 2**20, threads, descriptors, series)


def live(daemon: RealDaemon, driver: FakeDriver) -> Usage:
    """Run one job until it pages. Return the resources in use at the page."""
    with SimulatedNode(RANKS) as node:
        healthy = [*h100(RANKS), *(f"gpu {index} pids {pid}" for index, pid in enumerate(node.pids))]
        # If the daemon found a rank only after the hang began, it would never see the rank's GPU work, and page later.
        wait_for(
            lambda: [ranks for _, ranks in daemon.samples("hangwatch_job_ranks", job_id=node.run_id)] == [RANKS],
            "all ranks",
        )
        driver.write(healthy)
        daemon.wait_for_state(node.run_id, "training")
        node.order(STUCK, "lock")
        driver.write([*healthy, *HUNG])
        wait_for(lambda: daemon.job_state(node.run_id) in ("hung", "stalled"), "an incident", 120)
        return measure(daemon)


def main() -> int:
    end = time.monotonic() + 60 * number_options(__doc__, minutes=30.0).minutes
    usages: list[Usage] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        driver = FakeDriver(compile_library(folder), folder / "gpus", h100(RANKS))
        daemon = stack.enter_context(RealDaemon(folder / "hw", driver.environ, **QUICK))
        while time.monotonic() < end or len(usages) < 3:
            usages.append(live(daemon, driver))
            if len(usages) % 10 == 1:
                print(f"job {len(usages)}: {usages[-1]}", flush=True)
    growing = find_growth(usages, 3)
    print("\n".join(growing) or f"{len(usages)} jobs: flat")
    return int(bool(growing))


if __name__ == "__main__":
    sys.exit(main())
