"""Cost of hangwatch while all jobs are healthy: memory and CPU of the daemon and its GPU child.

    .venv/bin/python benchmarks/daemon_cost.py [--seconds 60] [--processes 600] [--without-checks] [--python PATH]
        [--workers 64 [--without-torch]] [--beside PROGRAM] [--real-driver] [--json]

A real `hangwatch run` runs with its defaults (1 Hz, 8 GPUs of the fake driver, all checks on). Next to it are idle
processes and a healthy torchrun-like job of 8 ranks. With `--workers`, its ranks train with torch, make two steps a
second, and have so many loader workers of torch. `--without-torch`: plain processes, which make no steps.

CPU seconds come from /proc/PID/stat of the daemon, its children and the children that they have reaped. Memory is
Rss, and Pss, which counts only a part of each page that other processes share: the median of readings every five
seconds, and the most, since some children live for seconds. The benchmark also watches TracerPid of every rank and
counts py-spy processes: both must stay 0 without a suspicion.

`--beside` runs another exporter at the same time, on the same fake driver: nvitop-exporter, or a program with the
same options `--port` and `--interval`. Both are scraped every five seconds. `--real-driver` reads the node's own GPUs,
which the job does not use.

PATH is the Python of an installation as on nodes (`pip install .` into a separate environment). Such an
installation lacks the modules that only the tests need. The daemon could load them here: msgspec imports
typing_extensions if it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cli import RANK, TRAINING_TORCH_RANK, children_of, job  # noqa: E402
from tests.fake_driver import FakeDriver, compile_library, h100  # noqa: E402
from tests.real_daemon import RealDaemon  # noqa: E402
from tests.servers import free_port  # noqa: E402
from tests.simulated.node import SimulatedNode  # noqa: E402

RANKS = 8
SCRAPE_SECONDS = 5.0
TICKS = os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if folder.name.isdigit() and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
    return found


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    return [pid, *(further for child in children(pid) for further in tree(child))]


class Meter:
    """Measures the CPU time of a process and all its descendants, from its construction on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = {member: cpu_seconds(member) for member in tree(pid)}

    def cpu_seconds(self) -> float:
        return sum(cpu_seconds(member) - self._before.get(member, 0.0) for member in tree(self._pid))

    def memory_mib(self) -> list[tuple[float, float]]:
        """Return Pss and Rss of each process. A process that has just ended is left out."""
        found = []
        for member in tree(self._pid):
            with contextlib.suppress(OSError):
                found.append(memory_mib(member))
        return found


@contextlib.contextmanager
def scraped(*urls: str) -> Iterator[None]:
    """Read each of these pages every `SCRAPE_SECONDS`."""
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.wait(SCRAPE_SECONDS):
            for url in urls:
                with contextlib.suppress(OSError), urlopen(url, timeout=10) as answer:
                    answer.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def start_beside(program: str, environ: Mapping[str, str], log: Path, stack: contextlib.ExitStack) -> tuple[int, str]:
    """Start another exporter. Return its pid and the URL of its metrics."""
    port = free_port()
    command = [program, "--port", str(port), "--interval", "1.0"]
    with log.open("wb") as stream:
        beside = subprocess.Popen(command, env={**os.environ, **environ}, stdout=stream, stderr=stream)
    stack.callback(beside.wait)
    stack.callback(beside.kill)
    return beside.pid, f"http://127.0.0.1:{port}/metrics"


def start_job(workers: int, program: str, stack: contextlib.ExitStack) -> tuple[str, tuple[int, ...]]:
    """Start a job of `RANKS` ranks with `workers` loader workers. Return its run id and the pids of its ranks.

    Only ranks with loader workers run `program`.
    """
    if not workers:
        node = stack.enter_context(SimulatedNode(RANKS))
        return node.run_id, node.pids
    pids = job(stack, RANKS, workers // RANKS, program)
    return "bench", tuple(pid for pid in pids if list(children_of(pid)))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its reaped children; 0 if it has just been reaped."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS
    return 0.0


def memory_mib(pid: int) -> tuple[float, float]:
    rows = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if ":" in line
    )
    return int(rows["Pss"].split()[0]) / 1024, int(rows["Rss"].split()[0]) / 1024


def tracers(pids: list[int]) -> int:
    return sum("TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text() for pid in pids)


def parse_options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=int, default=60)
    options.add_argument("--processes", type=int, default=600)
    options.add_argument("--workers", type=int, default=0, help="loader workers of the job, a multiple of 8")
    options.add_argument("--without-torch", action="store_true", help="the ranks with loader workers do not use torch")
    options.add_argument("--without-checks", action="store_true")
    options.add_argument("--python", default=sys.executable)
    options.add_argument("--beside", metavar="PROGRAM", help="another exporter, for example nvitop-exporter")
    options.add_argument("--real-driver", action="store_true")
    options.add_argument("--json", action="store_true")
    return options.parse_args()


def main() -> None:
    chosen = parse_options()
    python = os.path.abspath(chosen.python)  # noqa: PTH100 - do not resolve the environment's links
    beside = chosen.beside and os.path.abspath(chosen.beside)  # noqa: PTH100
    os.chdir("/")  # a folder without another hangwatch that is not an installation
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        crowd = [subprocess.Popen(["sleep", "1000"]) for _ in range(chosen.processes)]
        stack.callback(lambda: [one.kill() for one in crowd] and [one.wait() for one in crowd])
        run_id, ranks = start_job(chosen.workers, RANK if chosen.without_torch else TRAINING_TORCH_RANK, stack)
        environ = {} if chosen.real_driver else fake_driver(folder, ranks)
        sections = settings(with_checks=not chosen.without_checks)
        daemon = stack.enter_context(RealDaemon(folder / "hw", {**os.environ, **environ}, python=python, **sections))
        other = start_beside(beside, environ, folder / "beside.log", stack) if beside else None
        time.sleep(15)  # the start is not measured
        if not chosen.real_driver:
            daemon.wait_for_state(run_id, "training")
        meters = {"hangwatch": Meter(daemon.process.pid)} | ({"beside": Meter(other[0])} if other else {})
        memory: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in meters}
        with scraped(f"http://{daemon.address}/metrics", *(other[1:] if other else ())):
            began, traced, dumpers = time.monotonic(), 0, 0
            while time.monotonic() - began < chosen.seconds:
                if time.monotonic() - began > SCRAPE_SECONDS * len(memory["hangwatch"]):
                    for name, meter in meters.items():
                        memory[name].append(sorted(meter.memory_mib(), reverse=True))
                traced += tracers(list(ranks))
                dumpers += sum("py-spy" in _comm(pid) for pid in children(daemon.process.pid))
                time.sleep(0.5)
        wall = time.monotonic() - began
        used = {name: meter.cpu_seconds() for name, meter in meters.items()}
        dumps = sum(value for _, value in daemon.samples("hangwatch_dump_seconds_count"))
    by_rss = {name: sorted(memory[name], key=_rss_mib) for name in meters}
    usual = {name: readings[len(readings) // 2] for name, readings in by_rss.items()}
    rows = [
        {
            "name": name,
            "processes": chosen.processes,
            "workers": chosen.workers,
            "torch": bool(chosen.workers) and not chosen.without_torch,
            "cpu_seconds_per_minute": round(used[name] * 60 / wall, 3),
            "pss_mib": round(sum(pss for pss, _ in usual[name]), 1),
            "rss_mib": round(_rss_mib(usual[name]), 1),
            "most_rss_mib": round(_rss_mib(by_rss[name][-1]), 1),
            "rss_mib_of_each": [round(rss, 1) for _, rss in usual[name]],
            "cpu_ratio": round(used["hangwatch"] / used[name], 3),
        }
        for name in meters
    ]
    print(json.dumps(rows, indent=1) if chosen.json else "\n".join(map(_line, rows)))
    note = f"over {wall:.0f} s; dumps {dumps:.0f}, py-spy processes {dumpers}, traced ranks {traced}"
    print(note, file=sys.stderr if chosen.json else sys.stdout)


def _rss_mib(reading: list[tuple[float, float]]) -> float:
    return sum(rss for _, rss in reading)


def fake_driver(folder: Path, ranks: Iterable[int]) -> Mapping[str, str]:
    driver = FakeDriver(compile_library(folder), folder / "gpus", h100())
    driver.add(*(f"gpu {i} pids {pid}" for i, pid in enumerate(ranks)))
    return driver.environ


def settings(*, with_checks: bool) -> dict[str, dict[str, object]]:
    sections: dict[str, dict[str, object]] = {
        "gpu": {"sample_seconds": 1.0},
        "jobs": {"discover_seconds": 10.0},
        "detector": {"hold_seconds": 120.0, "recover_seconds": 10.0},
        "capture": {"pause_seconds": 5.0},
    }
    if not with_checks:
        from hangwatch.checks.framework import registry

        sections |= {f"checks.{name}": {"enabled": False} for name in registry.checks()}
    return sections


def _line(row: Mapping[str, object]) -> str:
    each = " + ".join(map(str, row["rss_mib_of_each"]))  # type: ignore[call-overload]
    seconds = float(row["cpu_seconds_per_minute"])  # type: ignore[arg-type]
    return (
        f"{row['name']:10} {seconds:6.2f} s of CPU per minute = {seconds / 0.6:5.2f} % of one core; "
        f"Pss {row['pss_mib']} MiB, Rss {row['rss_mib']} MiB ({each}), at most "
        f"{row['most_rss_mib']}; hangwatch is {row['cpu_ratio']} times of it"
    )


def _comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


if __name__ == "__main__":
    main()
