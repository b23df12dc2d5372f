"""Send SIGTERM to a daemon at random moments of captures. It must end within five seconds.

usage: python -m tests.soak.sigterms [--count 200] [--lanes 3] [--seed 1]

Each time a real daemon monitors a job that hangs from the start (fake driver, simulated node) and captures it
repeatedly. The signal is sent at a random moment, chosen by the seed.
"""

import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hangwatch.tools.demo.simulated_node import SimulatedNode
from tests.fake_driver import compile_library
from tests.real_daemon import RealDaemon
from tests.soak import number_options
from tests.soak.sigterms_at_writes import driver_of

DEADLINE_SECONDS = 5.0
BUSY = {
    "detector": {"hold_seconds": 1.0, "startup_hold_seconds": 1.0, "recapture_seconds": 1.0, "cooldown_seconds": 0.0},
    "capture": {"pause_seconds": 0.2, "rounds": 10},
}


def once(library: Path, node: SimulatedNode, seed: int) -> float | None:
    """Start a daemon and send it SIGTERM. Return the seconds until it ended, or None if it overran the deadline."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        daemon = RealDaemon(folder / "hw", driver_of(library, folder / "gpus.scenario", node).environ, **BUSY)
        with daemon:
            time.sleep(random.Random(seed).uniform(0.0, 6.0))
            began = time.monotonic()
            daemon.process.send_signal(signal.SIGTERM)
            try:
                daemon.process.wait(DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.process.kill()
                return None
            return time.monotonic() - began


def main() -> None:
    options = number_options(__doc__, count=200, lanes=3, seed=1)
    with tempfile.TemporaryDirectory() as name, SimulatedNode(2) as node, ThreadPoolExecutor(options.lanes) as pool:
        library = compile_library(Path(name))
        seeds = range(options.seed, options.seed + options.count)
        took = list(pool.map(lambda seed: once(library, node, seed), seeds))
    obeyed = [seconds for seconds in took if seconds is not None]
    print(
        f"{len(obeyed)} of {len(took)} SIGTERMs obeyed within {DEADLINE_SECONDS:g} s, the slowest in {max(obeyed):.2f} s"
    )
    sys.exit(0 if len(obeyed) == len(took) else 1)


if __name__ == "__main__":
    main()
