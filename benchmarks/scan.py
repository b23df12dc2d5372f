"""CPU of the job scan: 2,000 processes, 64 of them candidates that could set their rank after the start.

    .venv/bin/python benchmarks/scan.py [--processes 2000] [--candidates 64] [--scans 12] [--seconds 10] [--other DIR]

Candidates are Python processes that map a file with the name of libtorch and half a gigabyte. They never set a rank, so
they are read again and again. With `--ranks N`, N of them have set theirs before the first scan, and are a job that
only this commit may find. Each round makes a scan every `--seconds`, as the daemon does.
`--other` is a checkout to compare with, e.g. of the previous commit: rounds of both alternate, in processes of their
own. The output is the CPU time of each round, with that of the reading child, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CANDIDATE = """
import mmap, os, sys, time
with open(sys.argv[1], "r+b") as file:
    kept = [mmap.mmap(file.fileno(), 4096), mmap.mmap(-1, 1 << 29)]
if sys.argv[2] == "ranks":
    os.environ.update(RANK=sys.argv[3], WORLD_SIZE=sys.argv[4], MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
print(flush=True)
time.sleep(3600)
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--processes", type=int, default=2000)
    options.add_argument("--candidates", type=int, default=64)
    options.add_argument("--ranks", type=int, default=0)
    options.add_argument("--scans", type=int, default=12)
    options.add_argument("--seconds", type=float, default=10.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--other", type=Path)
    options.add_argument("--scan-only", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.scan_only:
        print(json.dumps(scan(chosen.scans, chosen.seconds)))
        return
    checkouts = [ROOT, *([chosen.other.resolve()] if chosen.other else [])]
    costs: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
    with tempfile.TemporaryDirectory() as folder, crowd(Path(folder), chosen):
        for number in range(chosen.rounds):
            for checkout in checkouts if number % 2 == 0 else reversed(checkouts):
                seconds, jobs = measure(checkout, chosen.scans, chosen.seconds)
                costs[checkout].append(seconds)
                print(f"{checkout}: {seconds * 1e3:.0f} ms of CPU for {chosen.scans} scans, {jobs} jobs", flush=True)
    medians = [statistics.median(costs[checkout]) for checkout in checkouts]
    if len(medians) > 1:
        print(f"ratio of the medians: {medians[0] / medians[1]:.2f}")


def measure(checkout: Path, scans: int, seconds: float) -> tuple[float, int]:
    """Return the CPU seconds of one round of a checkout, and the number of jobs that its last scan found."""
    command = [sys.executable, str(Path(__file__).resolve()), "--scan-only", "--scans", str(scans)]
    command += ["--seconds", str(seconds)]
    environ = {**os.environ, "PYTHONPATH": str(checkout)}
    printed = subprocess.run(command, env=environ, cwd=checkout, check=True, capture_output=True, text=True).stdout
    cpu_seconds, jobs = json.loads(printed)
    return float(cpu_seconds), int(jobs)


def scan(scans: int, seconds: float) -> tuple[float, int]:
    """Scan this node. The first scan reads every process and is not counted."""
    from hangwatch.capture.job_scan import JobScan

    job_scan, jobs = JobScan(), 0
    job_scan.find(None, "here")
    before = cpu_seconds()
    for _ in range(scans):
        time.sleep(seconds)
        jobs = len(job_scan.find(None, "here").jobs)
    return cpu_seconds() - before, jobs


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children, running and ended: schedstat counts nanoseconds."""
    total = time.process_time()
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        total += int(Path(f"/proc/{child}/schedstat").read_text().split()[0]) / 1e9
    times = os.times()
    return total + times.children_user + times.children_system


@contextlib.contextmanager
def crowd(folder: Path, chosen: argparse.Namespace):  # type: ignore[no-untyped-def]
    """Run sleeping processes and candidates until the end of `with`."""
    library = folder / "libtorch_cpu.so"
    library.write_bytes(bytes(4096))
    started = [subprocess.Popen(["sleep", "3600"]) for _ in range(chosen.processes - chosen.candidates)]
    try:
        for number in range(chosen.candidates):
            kind = "ranks" if number < chosen.ranks else "none"
            command = [sys.executable, "-c", CANDIDATE, str(library), kind, str(number), str(chosen.ranks)]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for process in started[-chosen.candidates :]:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
        for process in started:
            process.wait()


if __name__ == "__main__":
    main()
