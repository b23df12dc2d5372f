"""Send SIGTERM to a daemon while it captures a job, or while it writes an incident. It must end in time and lose none.

usage: python -m tests.soak.sigterms [--captures 60] [--writes 50] [--lanes 2] [--seed 1]

Each time a real daemon monitors a job that hangs from the start (fake driver, simulated node). In `--captures` runs it
captures the job repeatedly, and the signal is sent at a random moment. In `--writes` runs it is sent up to 60 ms after
the verdict is logged, and the incident or its marker must be readable afterwards. The seed chooses the moments. The
integration test runs some of the seeds.
"""

import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hangwatch.formats import incident_file
from hangwatch.formats.incident_file import StoreError
from hangwatch.store import Store
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, compile_library, h100
from tests.real_daemon import RealDaemon
from tests.simulated.node import SimulatedNode
from tests.soak import number_options

RANKS = 4
CAPTURES_SECONDS, WINDOW_SECONDS = 6.0, 0.06
CAPTURE_DEADLINE_SECONDS, WRITE_DEADLINE_SECONDS = 5.0, 10.0
BUSY = {
    "detector": {"hold_seconds": 1.0, "startup_hold_seconds": 1.0, "recapture_seconds": 1.0, "cooldown_seconds": 0.0},
    "capture": {"pause_seconds": 0.2, "rounds": 10},
}
QUICK = {
    "detector": {"hold_seconds": 1.0, "startup_hold_seconds": 1.0, "cooldown_seconds": 0.0},
    "capture": {"pause_seconds": 0.1, "rounds": 2},
}
_ENDED = "ended in a capture"
_IN_TIME = "incident, written before the signal"
_INCIDENT = "incident, written after the signal"
_MARKER = "marker"
KEPT = {_ENDED, _IN_TIME, _INCIDENT, _MARKER}


def once(environ: Mapping[str, str], folder: Path, job_id: str, seed: int, in_capture: bool = False) -> str:
    """End a daemon while it writes an incident, or in one of its captures. Return one of `KEPT`, or the error."""
    daemon = RealDaemon(folder, environ, **(BUSY if in_capture else QUICK))
    judged = re.compile(rf"job {re.escape(job_id)} .*suspected -> (hung|stalled)")  # only of our job
    with daemon:
        if not in_capture:
            wait_for(lambda: judged.search(daemon.log), "a verdict")
        time.sleep(random.Random(seed).uniform(0.0, CAPTURES_SECONDS if in_capture else WINDOW_SECONDS))
        daemon.process.send_signal(signal.SIGTERM)
        try:
            status = daemon.process.wait(CAPTURE_DEADLINE_SECONDS if in_capture else WRITE_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.process.kill()
            return "did not end"
    if status != 0 or "Traceback" in daemon.log:
        return f"status {status}, or a traceback:\n{daemon.log}"
    return _ENDED if in_capture else _kept_of(daemon, job_id)


def _kept_of(daemon: RealDaemon, job_id: str) -> str:
    kept = Store(daemon.state)
    ours = [summary for summary in kept.summaries() if summary.job_id == job_id]
    if not ours:
        return f"lost:\n{daemon.log}"
    for summary in ours:
        folder = kept.incidents / summary.folder
        if (marker := incident_file.load_marker(folder)) is not None:
            return _MARKER if marker.message else f"{folder}: an empty marker"
        try:
            incident_file.load(folder)
        except StoreError as error:
            return str(error)
    return _IN_TIME if daemon.log.find("incident 20") < daemon.log.find("stopping") else _INCIDENT


def driver_of(library: Path, scenario: Path, node: SimulatedNode) -> FakeDriver:
    """Return a driver with the node's GPUs at low power."""
    pids = [f"gpu {gpu} pids {pid}" for gpu, pid in enumerate(node.pids)]
    return FakeDriver(library, scenario, [*h100(len(pids)), *pids, "gpu all power_watts 100"])


def main() -> None:
    options = number_options(__doc__, captures=60, writes=50, lanes=2, seed=1)
    with (
        tempfile.TemporaryDirectory() as name,
        SimulatedNode(RANKS) as node,
        ThreadPoolExecutor(options.lanes) as pool,
    ):
        node.order(1, "lock")
        driver = driver_of(compile_library(Path(name)), Path(name) / "gpus.scenario", node)

        def run(number: int) -> str:
            in_capture = number < options.captures
            return once(driver.environ, Path(name) / str(number), node.run_id, options.seed + number, in_capture)

        found = list(pool.map(run, range(options.captures + options.writes)))
    outcomes = Counter(outcome.partition("\n")[0] for outcome in found)
    for outcome in found:
        if outcome not in KEPT:
            print(outcome)
    for outcome, count in outcomes.most_common():
        print(f"{count:3} {outcome}")
    kept = sum(outcomes[outcome] for outcome in KEPT)
    print(f"{kept} of {len(found)} SIGTERMs obeyed in time, and no incident was lost")
    sys.exit(0 if kept == len(found) else 1)


if __name__ == "__main__":
    main()
