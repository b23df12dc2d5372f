"""Capture live processes 1,000 times. Their state, signals, work and exit code must be as without hangwatch.

usage: python -m tests.soak.captures [--count 1000] [--processes 4]

Each process hashes in one thread, sleeps in another, waits for input in its main thread, and has a blocked signal
pending. After each capture the command reads each process: it must not be stopped or traced, and its signals and file
descriptors must be unchanged. At the end each process must exit with its own code, and the parent repeats its hashes.
Then the same runs without captures. The longest pause that a process saw is printed for both.
"""

import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hangwatch.capture.diagnosis import diagnose_job
from hangwatch.capture.request import CaptureRequest
from hangwatch.config import Capture
from hangwatch.jobs import discovery
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.stacks import activity
from tests.soak import number_options

EXIT_CODE = 7
PROGRAM = f"""
import hashlib, json, os, signal, sys, threading, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
os.kill(os.getpid(), signal.SIGUSR2)
digest, steps, longest, over = b"", 0, 0.0, False
def work():
    global digest, steps, longest
    last = time.monotonic()
    while not over:
        digest, steps = hashlib.sha256(digest).digest(), steps + 1
        if steps % 50 == 0:
            time.sleep(0.002)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
def rest():
    while not over:
        time.sleep(0.01)
threads = [threading.Thread(target=work), threading.Thread(target=rest)]
for thread in threads: thread.start()
print("ready", flush=True)
sys.stdin.readline()
over = True
for thread in threads: thread.join()
pending = signal.SIGUSR2 in signal.sigpending()
print(json.dumps([steps, digest.hex(), longest, pending]), flush=True)
sys.exit({EXIT_CODE})
"""
_UNCHANGED = re.compile(
    r"^(?:SigPnd|ShdPnd|SigBlk|SigIgn|SigCgt|TracerPid|Threads|NoNewPrivs|Seccomp):.*$", re.MULTILINE
)


class Target(NamedTuple):
    """A live process, and the fields of its /proc/PID/status that must not change."""

    process: subprocess.Popen[str]
    fields: tuple[str, ...]
    descriptors: tuple[str, ...]


def _fields(pid: int) -> tuple[str, ...]:
    return tuple(_UNCHANGED.findall(Path(f"/proc/{pid}/status").read_text()))


def _descriptors(pid: int) -> tuple[str, ...]:
    return tuple(sorted(str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()))


def start() -> Target:
    """Start a process. Return it when it works."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    return Target(process, _fields(process.pid), _descriptors(process.pid))


def find_harm(target: Target) -> list[str]:
    """Return a line for each change of a process that lives."""
    pid, harm = target.process.pid, []
    states = {path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")}
    if states & {"T", "t"}:
        harm.append(f"pid {pid} is stopped")
    if (fields := _fields(pid)) != target.fields:
        harm.append(f"pid {pid}: {set(target.fields) ^ set(fields)}")
    if (descriptors := _descriptors(pid)) != target.descriptors:
        harm.append(f"pid {pid}: descriptors {target.descriptors} became {descriptors}")
    return harm


def finish(target: Target) -> tuple[float, list[str]]:
    """End a process. Return the longest pause that it saw in seconds, and a line for each wrong result."""
    output, _ = target.process.communicate("\n", timeout=60)
    steps, digest, longest, is_pending = json.loads(output)
    expected = b""
    for _ in range(steps):
        expected = hashlib.sha256(expected).digest()
    harm = []
    if target.process.returncode != EXIT_CODE:
        harm.append(f"exit code {target.process.returncode}")
    if digest != expected.hex():
        harm.append(f"wrong hash after {steps} steps")
    if not is_pending:
        harm.append("the blocked signal is no longer pending")
    return longest, harm


def run(processes: int, captures: int, seconds: float) -> tuple[float, list[str], int]:
    """Run processes, and capture them or wait for `seconds`. Return the longest pause, all harm, and the stacks read."""
    targets = [start() for _ in range(processes)]
    harm: list[str] = []
    stacks = 0
    pids, table = [target.process.pid for target in targets], activity.load()
    job = discovery.job_of_pids(ProcessScan().processes(pids), pids)
    request = CaptureRequest(node="node", settings=Capture(pause_seconds=0.1), rounds=2)
    for _ in range(captures):
        ranks = diagnose_job(job, request, table).capture.ranks
        stacks += sum(bool(dump.threads) for rank in ranks for dump in rank.rounds)
        harm += [line for target in targets for line in find_harm(target)]
    time.sleep(seconds)
    ended = [finish(target) for target in targets]
    return max(longest for longest, _ in ended), [*harm, *(line for _, lines in ended for line in lines)], stacks


def report(name: str, longest: float, harm: Sequence[str]) -> None:
    print(f"{name}: {len(harm)} changes, longest pause {1e3 * longest:.1f} ms")
    print("".join(f"  {line}\n" for line in harm[:20]), end="")


def main() -> int:
    options = number_options(__doc__, count=1000, processes=4)
    began = time.monotonic()
    longest, harm, stacks = run(options.processes, options.count, 0.0)
    report(f"{options.count} captures of {options.processes} processes, {stacks} stacks", longest, harm)
    longest, without, _ = run(options.processes, 0, min(time.monotonic() - began, 60.0))
    report("without captures", longest, without)
    return int(bool(harm or without or stacks < options.count * options.processes))


if __name__ == "__main__":
    sys.exit(main())
