"""Seconds from a hang to its verdict in `status` and to its page, with progress counters and by power alone.

    .venv/bin/python benchmarks/latency.py [--runs 20] [--jobs 2] [--without-counters]

Real torchrun jobs of four ranks over gloo, and a real `hangwatch run` with its defaults; only the GPUs are those of the
fake driver. When a job has trained for a while, its rank 2 waits for a FIFO or a stopped helper, is stopped or killed,
or calls another operation or group than the others, and the power of its GPUs falls to that of a hang. Time runs from
then on. A child of the killed rank keeps its connections open, and its launcher does not look for ended ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.conftest import wait_for  # noqa: E402
from tests.fake_driver import FakeDriver, compile_library, h100  # noqa: E402
from tests.jobs.stuck_on_a_fifo import ODD_RANK  # noqa: E402
from tests.real_daemon import RealDaemon, TorchJob  # noqa: E402

RANKS = 4
TRAIN_SECONDS = 75.0  # more than the 50 gaps that must be known
LONGEST_SECONDS = 200.0
DEFAULTS: dict[str, dict[str, object]] = {
    "gpu": {"sample_seconds": 1.0, "deadline_seconds": 15.0},
    "jobs": {"discover_seconds": 10.0},
    "detector": {"hold_seconds": 120.0, "recover_seconds": 10.0, "cooldown_seconds": 20.0},
    "capture": {"pause_seconds": 5.0},
}
HELPED = ("child", "loader", "server", "lock")
FAULTS = ("fifo", "stopped", "gone", *HELPED, "mismatch", "cycle")


class Latency(NamedTuple):
    """The seconds from a fault to the verdict and to the page."""

    fault: str
    verdict_seconds: float
    page_seconds: float


def pid_of(job: TorchJob, rank: int) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            names = (folder / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in names and f"TORCHELASTIC_RUN_ID={job.run_id}".encode() in names:
                return int(folder.name)
    raise SystemExit(f"rank {rank} is not running")


def begin_fault(job: TorchJob, fault: str, driver: FakeDriver, gpus: Sequence[int]) -> Callable[[], None]:
    """Begin a fault. Return a function that ends what would outlive the launcher of the job."""
    rank, end = psutil.Process(pid_of(job, ODD_RANK)), lambda: None
    if fault == "stopped":
        rank.suspend()
        end = rank.resume
    else:
        (job.folder / "fault").write_text(fault)
        (job.folder / "fault").rename(job.folder / "stop-at-shard")
        wait_for(lambda: not (job.folder / "stop-at-shard").exists(), "the rank to reach the shard")
    if fault in (*HELPED, "gone"):
        wait_for((job.folder / "helper").exists, "its helper")
        helper = psutil.Process(int((job.folder / "helper").read_text()))
        end = helper.kill
        (rank.kill if fault == "gone" else helper.suspend)()
    driver.add(*(f"gpu {gpu} power_watts {86 if gpu == gpus[ODD_RANK] else 118}" for gpu in gpus))
    return end


def run_batch(folder: Path, driver: FakeDriver, jobs: int, first: int, sections: dict[str, Any]) -> list[Latency]:
    """Run some jobs at the same time, each with its fault. Return the latencies."""
    driver.write(h100(8))
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(RealDaemon(folder / "hw", driver.environ, **sections))
        started = []
        for place in range(jobs):
            own = folder / f"job-{place}"
            own.mkdir()
            os.mkfifo(own / "shard")
            gpus = range(place * RANKS, (place + 1) * RANKS)
            environ = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "PET_MONITOR_INTERVAL": "1000"}
            started.append((stack.enter_context(TorchJob(own, "stuck_on_a_fifo.py", RANKS, environ=environ)), gpus))
        for job, _ in started:
            job.wait_for_step(20)
        time.sleep(TRAIN_SECONDS)
        began: dict[str, tuple[str, float]] = {}
        for number, (job, gpus) in enumerate(started, first):
            fault = FAULTS[number % len(FAULTS)]
            stack.callback(begin_fault(job, fault, driver, gpus))
            began[job.run_id] = fault, time.monotonic()
        return measure(daemon, began)


def measure(daemon: RealDaemon, began: dict[str, tuple[str, float]]) -> list[Latency]:
    verdicts: dict[str, float] = {}
    pages: dict[str, float] = {}
    until = time.monotonic() + LONGEST_SECONDS
    while len(pages) < len(began) and time.monotonic() < until:
        now = time.monotonic()
        for one in daemon.status()["jobs"]:  # type: ignore[attr-defined]
            if one["job_id"] in began:
                seconds = now - began[one["job_id"]][1]
                if one["verdict"]:
                    verdicts.setdefault(one["job_id"], seconds)
                if one["page"]:
                    pages.setdefault(one["job_id"], seconds)
        time.sleep(0.5)
    never = float("inf")
    return [Latency(fault, verdicts.get(job, never), pages.get(job, never)) for job, (fault, _) in began.items()]


def collect(runs: int, jobs: int, *, has_counters: bool, tell: Callable[[str], None] = print) -> list[Latency]:
    """Return the latencies of some runs."""
    found: list[Latency] = []
    sections = {**DEFAULTS, "progress": {"read": has_counters}}
    with tempfile.TemporaryDirectory() as name:
        library = compile_library(Path(name))
        while len(found) < runs:
            folder = Path(name) / f"batch-{len(found)}"
            folder.mkdir()
            driver = FakeDriver(library, folder / "gpus", h100(8))
            found += run_batch(folder, driver, min(jobs, runs - len(found)), len(found), sections)
            tell(f"{len(found)} of {runs}: {found[-1]}")
    return found


def describe(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.0f} s (at most {max(seconds):.0f} s)"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=20)
    options.add_argument("--jobs", type=int, default=2, help="jobs at the same time, of at most 8 GPUs")
    options.add_argument("--without-counters", action="store_true")
    chosen = options.parse_args()
    found = collect(chosen.runs, chosen.jobs, has_counters=not chosen.without_counters)
    print("by power alone" if chosen.without_counters else "with progress counters")
    for fault in FAULTS:
        of_fault = [one for one in found if one.fault == fault]
        if of_fault:
            verdict, page = (describe([one[field] for one in of_fault]) for field in (1, 2))
            print(f"{fault:8} {len(of_fault):3} runs: verdict {verdict}, page {page}")


if __name__ == "__main__":
    main()
