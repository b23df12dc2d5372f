"""Growth of the daemon's memory over many hangs.

    .venv/bin/python benchmarks/daemon_memory.py [--lives 40]

A real `hangwatch run` with short holds runs next to one job of 8 ranks. In each of its lives the job trains and
hangs at a lock. The daemon captures it and pages, and the launcher restarts it. Memory is Rss of
/proc/PID/smaps_rollup, and VmHWM, its maximum. Power is sampled five times a second: the history of 15 minutes has
five times as many samples as by default.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.daemon_cost import memory_mib  # noqa: E402
from tests.conftest import wait_for  # noqa: E402
from tests.fake_driver import FakeDriver, compile_library, h100  # noqa: E402
from tests.real_daemon import RealDaemon  # noqa: E402
from tests.simulated.node import SimulatedNode  # noqa: E402

RANKS, STUCK = 8, 2
HUNG = ("gpu all power_watts 118", f"gpu {STUCK} power_watts 86", f"gpu {STUCK} utilization_ratio 0")
QUICK = {
    "gpu": {"sample_seconds": 0.2},
    "detector": {"hold_seconds": 1.0, "recover_seconds": 0.4, "cooldown_seconds": 0.0},
    "capture": {"pause_seconds": 0.2},
}


def most_mib(pid: int) -> float:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) / 1024


def healthy(node: SimulatedNode) -> list[str]:
    return [*h100(RANKS), *(f"gpu {index} pids {pid}" for index, pid in enumerate(node.pids))]


def powers(daemon: RealDaemon) -> set[float]:
    return {watts for _, watts in daemon.samples("hangwatch_gpu_power_watts")}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--lives", type=int, default=40)
    chosen = options.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        node = stack.enter_context(SimulatedNode(RANKS))
        driver = FakeDriver(compile_library(folder), folder / "gpus", healthy(node))
        daemon = stack.enter_context(RealDaemon(folder / "hw", driver.environ, **QUICK))
        print(f"{'lives':>5} {'Rss MiB':>8} {'most MiB':>9}")
        for life in range(chosen.lives + 1):
            daemon.wait_for_state(node.run_id, "training")
            wait_for(lambda: powers(daemon) == {600.0}, "all at work", 60)
            if life in (0, 1, 5) or life % 10 == 0:
                rss = memory_mib(daemon.process.pid)[1]
                print(f"{life:5} {rss:8.1f} {most_mib(daemon.process.pid):9.1f}", flush=True)
            if life == chosen.lives:
                break
            node.order(STUCK, "lock")
            driver.write([*healthy(node), *HUNG])
            wait_for(lambda: daemon.job_state(node.run_id) in ("hung", "stalled"), "an incident", 90)
            node.restart()
            driver.write(healthy(node))


if __name__ == "__main__":
    main()
