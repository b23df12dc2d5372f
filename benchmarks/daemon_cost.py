"""Cost of hangwatch while all jobs are healthy: memory and CPU of the daemon and its GPU child.

    .venv/bin/python benchmarks/daemon_cost.py [--seconds 60] [--processes 600] [--without-checks] [--python PATH]

A real `hangwatch run` runs with its defaults (1 Hz, 8 GPUs of the fake driver, all checks on). Next to it are idle
processes and a healthy torchrun-like job of 8 ranks. CPU seconds come from /proc/PID/stat of the daemon, its child
and the children that both have reaped. Memory is Rss, and Pss, which counts only a part of each page that other
processes share. The benchmark also watches TracerPid of every rank and counts py-spy processes: both must stay 0
without a suspicion.

PATH is the Python of an installation as on nodes (`pip install .` into a separate environment). Such an
installation lacks the modules that only the tests need. The daemon could load them here: msgspec imports
typing_extensions if it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hangwatch.demo.simulated_node import SimulatedNode  # noqa: E402
from tests.fake_driver import FakeDriver, compile_library, h100  # noqa: E402
from tests.real_daemon import RealDaemon  # noqa: E402

TICKS = os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if folder.name.isdigit() and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
    return found


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def memory_mib(pid: int) -> tuple[float, float]:
    rows = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if ":" in line
    )
    return int(rows["Pss"].split()[0]) / 1024, int(rows["Rss"].split()[0]) / 1024


def tracers(pids: list[int]) -> int:
    return sum("TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text() for pid in pids)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=int, default=60)
    options.add_argument("--processes", type=int, default=600)
    options.add_argument("--without-checks", action="store_true")
    options.add_argument("--python", default=sys.executable)
    chosen = options.parse_args()
    python = os.path.abspath(chosen.python)  # noqa: PTH100 - do not resolve the environment's links
    os.chdir("/")  # a folder without another hangwatch that is not an installation
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        crowd = [subprocess.Popen(["sleep", "1000"]) for _ in range(chosen.processes)]
        stack.callback(lambda: [one.kill() for one in crowd] and [one.wait() for one in crowd])
        node = stack.enter_context(SimulatedNode(8))
        driver = FakeDriver(compile_library(folder), folder / "gpus", h100())
        driver.add(*(f"gpu {i} pids {pid}" for i, pid in enumerate(node.pids)))
        sections: dict[str, dict[str, object]] = {
            "gpu": {"sample_seconds": 1.0},
            "jobs": {"discover_seconds": 10.0},
            "detector": {"hold_seconds": 120.0, "recover_seconds": 10.0},
            "capture": {"pause_seconds": 5.0},
        }
        if chosen.without_checks:
            from hangwatch.checks.framework import registry

            sections |= {f"checks.{name}": {"enabled": False} for name in registry.checks()}
        daemon = stack.enter_context(RealDaemon(folder / "hw", driver.environ, python=python, **sections))
        time.sleep(15)  # the start is not measured
        assert daemon.job_state(node.run_id) == "training", daemon.log
        measured = [daemon.process.pid, *children(daemon.process.pid)]
        before = {pid: cpu_seconds(pid) for pid in measured}
        began, traced, dumpers = time.monotonic(), 0, 0
        while time.monotonic() - began < chosen.seconds:
            traced += tracers(list(node.pids))
            dumpers += sum("py-spy" in _comm(pid) for pid in children(daemon.process.pid))
            time.sleep(0.05)
        wall = time.monotonic() - began
        used = sum(cpu_seconds(pid) - before[pid] for pid in measured)
        memory = {pid: memory_mib(pid) for pid in measured}
        dumps = sum(value for _, value in daemon.samples("hangwatch_dump_seconds_count"))
    print(f"{'process':22} {'Pss MiB':>8} {'Rss MiB':>8}")
    for pid, (pss, rss) in memory.items():
        print(f"{'daemon' if pid == measured[0] else 'GPU child':22} {pss:8.1f} {rss:8.1f}")
    total = [sum(column) for column in zip(*memory.values(), strict=True)]
    print(f"{'together':22} {total[0]:8.1f} {total[1]:8.1f}")
    print(f"CPU: {used * 60 / wall:.2f} s per minute = {100 * used / wall:.2f} % of one core, over {wall:.0f} s")
    print(f"beside {chosen.processes} processes; dumps {dumps:.0f}, py-spy processes {dumpers}, traced ranks {traced}")


def _comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


if __name__ == "__main__":
    main()
