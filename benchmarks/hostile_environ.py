"""Effect of hostile environments on the daemon's memory, on a scrape, and on another user's page.

    .venv/bin/python benchmarks/hostile_environ.py [--large 40] [--world-size 4000000] [--jobs 300]

A real `hangwatch run` with the fake driver of 4 GPUs monitors a job of 4 ranks that trains on them. Then the attack
starts, as another user if this user is root:

* processes with 3 MB of NCCL_* variables each;
* two ranks that claim the job's GPUs and a very large world size;
* jobs with one rank each that claim 1,023 more local ranks each.

The job hangs, and must page. The output is, before and during the attack: the daemon's largest RSS, the slowest
scrape, and the time from the drop of power to the page.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests import hostile_environments  # noqa: E402
from tests.conftest import wait_for  # noqa: E402
from tests.fake_driver import FakeDriver, compile_library, h100  # noqa: E402
from tests.real_daemon import RealDaemon  # noqa: E402
from tests.simulated.node import SimulatedNode  # noqa: E402

SECONDS_UNDER_ATTACK = 20.0


def peak_mebibytes(pid: int) -> float:
    """Return the peak resident set since the process began: VmHWM of proc_pid_status(5)."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) / 1024


def scrape_seconds(daemon: RealDaemon) -> tuple[float, int]:
    """Scrape the daemon once. Return the duration in seconds and the size in bytes."""
    began = time.monotonic()
    size = len(daemon.get("/metrics"))
    return time.monotonic() - began, size


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--large", type=int, default=40)
    options.add_argument("--world-size", type=int, default=4_000_000)
    options.add_argument("--jobs", type=int, default=300)
    chosen = options.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        driver = FakeDriver(compile_library(folder), folder / "gpus", h100(4))
        node = stack.enter_context(SimulatedNode(4))
        driver.add(*(f"gpu {index} pids {pid}" for index, pid in enumerate(node.pids)))
        daemon = stack.enter_context(RealDaemon(folder / "hw", driver.environ))
        daemon.wait_for_state(node.run_id, "training")
        pid = daemon.process.pid
        print(f"before: {peak_mebibytes(pid):.0f} MiB, a scrape {scrape_seconds(daemon)[0]:.2f} s")
        began = time.monotonic()
        environs = [
            *hostile_environments.large_environments(chosen.large),
            *hostile_environments.claim_world(chosen.world_size, "0,1"),
            *hostile_environments.claim_jobs(chosen.jobs),
        ]
        stack.enter_context(hostile_environments.crowd(environs))
        print(f"{len(environs)} processes started in {time.monotonic() - began:.1f} s")
        slowest, largest, end = 0.0, 0, time.monotonic() + SECONDS_UNDER_ATTACK
        while time.monotonic() < end:
            seconds, size = scrape_seconds(daemon)
            slowest, largest = max(slowest, seconds), max(largest, size)
            time.sleep(0.5)
        jobs = len(daemon.samples("hangwatch_job_info"))
        print(f"attack: {peak_mebibytes(pid):.0f} MiB, slowest scrape {slowest:.2f} s of {largest} bytes, {jobs} jobs")
        node.order(1, "loader")
        quiet_at = time.monotonic()
        driver.add("gpu all power_watts 100")
        wait_for(lambda: _pages(daemon, node.run_id), "the page of the job that hangs", 300)
        print(f"paged {time.monotonic() - quiet_at:.1f} s after the fall of power (3 s of it are the hold)")
        print(f"after: {peak_mebibytes(pid):.0f} MiB, a scrape {scrape_seconds(daemon)[0]:.2f} s")


def _pages(daemon: RealDaemon, job_id: str) -> bool:
    return any(value == 1 for _, value in daemon.samples("hangwatch_job_page", job_id=job_id))


if __name__ == "__main__":
    main()
