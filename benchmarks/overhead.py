"""Effect of the daemon on a training loop of torch: steps per second with it and without it, and its CPU and memory.

    .venv/bin/python benchmarks/overhead.py [--ranks 8] [--turns 3] [--seconds 20] [--pause 0.5] [--python PATH]
        [--real-driver]

A real torchrun job over gloo trains a small model. In turns of equal length a real `hangwatch run` with its defaults
monitors it, or none runs. The daemon's progress counters, checks and GPU child are on, the GPUs are those of the fake
driver, its metrics are scraped every five seconds. A turn begins when the daemon follows the counters of all ranks. The
ranks sleep most of a step, so that they and the daemon do not wait for the same core. With `--real-driver`, each rank
keeps a GPU of the node busy instead, and the job uses NCCL. Resolution: the spread of the steps per second between
turns of the same kind. PATH is the Python of an installation as on nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.daemon_cost import Meter, children, fake_driver, scraped, settings  # noqa: E402
from tests.conftest import wait_for  # noqa: E402
from tests.jobs.training_loop import NEWEST_STEP  # noqa: E402
from tests.real_daemon import RealDaemon, TorchJob  # noqa: E402


class Turn(NamedTuple):
    """The results of one turn; CPU and memory are those of the daemon."""

    steps_per_second: float
    cpu_seconds_per_minute: float = 0.0
    rss_mib: float = 0.0


def run_without(job: TorchJob, seconds: float) -> Turn:
    began = read_newest_step(job)
    time.sleep(seconds)
    return Turn(find_rate(began, read_newest_step(job)))


def run_with_daemon(
    job: TorchJob, seconds: float, folder: Path, python: str, pids: Collection[int], *, real_driver: bool
) -> Turn:
    environ = {**os.environ, **({} if real_driver else fake_driver(folder, pids))}
    with RealDaemon(folder, environ, python=python, **settings(with_checks=True)) as daemon:
        followed = "hangwatch_rank_collectives_total"
        wait_for(lambda: len(daemon.samples(followed, job_id=job.run_id)) == len(pids), "counters of all ranks", 120)
        daemon.wait_for_state(job.run_id, "training")
        with scraped(f"http://{daemon.address}/metrics"):
            meter, began, began_at = Meter(daemon.process.pid), read_newest_step(job), time.monotonic()
            time.sleep(seconds)
            cpu_seconds, wall_seconds = meter.cpu_seconds(), time.monotonic() - began_at
            rate = find_rate(began, read_newest_step(job))
        assert daemon.job_state(job.run_id) == "training", daemon.log
        return Turn(rate, 60 * cpu_seconds / wall_seconds, sum(rss for _, rss in meter.memory_mib()))


def read_newest_step(job: TorchJob) -> tuple[int, float]:
    """Return the number of the newest step of rank 0, and the time of its end."""
    number, seconds = NEWEST_STEP.unpack((job.folder / "newest-step").read_bytes())
    return number, seconds


def find_rate(began: tuple[int, float], ended: tuple[int, float]) -> float:
    return (ended[0] - began[0]) / (ended[1] - began[1])


def measure(
    ranks: int, turns: int, seconds: float, pause: float, python: str, *, real_driver: bool
) -> dict[str, float]:
    """Return the results of `turns` turns of each kind."""
    with_daemon, without = [], []
    arguments = ["0", "cuda"] if real_driver else [str(pause)]
    with tempfile.TemporaryDirectory() as name, TorchJob(Path(name), "training_loop.py", ranks, arguments) as job:
        job.wait_for_step(10)
        pids = children(job.process.pid)
        for turn in range(turns):
            folder = Path(name, f"turn-{turn}")
            folder.mkdir()
            with_daemon.append(run_with_daemon(job, seconds, folder, python, pids, real_driver=real_driver))
            without.append(run_without(job, seconds))
    on, off = ([turn.steps_per_second for turn in kind] for kind in (with_daemon, without))
    mean_on, mean_off = statistics.mean(on), statistics.mean(off)
    return {
        "ranks": ranks,
        "steps_with": round(mean_on, 4),
        "steps_without": round(mean_off, 4),
        "change_percent": round(100 * (mean_on / mean_off - 1), 3),
        "resolution_percent": round(100 * max(map(statistics.stdev, (on, off))) / mean_off, 3),
        "cpu_seconds_per_minute": round(statistics.mean(turn.cpu_seconds_per_minute for turn in with_daemon), 3),
        "rss_mib": round(max(turn.rss_mib for turn in with_daemon), 1),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--turns", type=int, default=3, help="of each kind, at least 2")
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--pause", type=float, default=0.5, help="seconds that a rank sleeps in a step")
    options.add_argument("--python", default=sys.executable)
    options.add_argument("--real-driver", action="store_true", help="a GPU for each rank; without a pause")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    python = os.path.abspath(chosen.python)  # noqa: PTH100 - do not resolve the environment's links
    os.chdir("/")  # a folder without another hangwatch that is not an installation
    row = measure(chosen.ranks, chosen.turns, chosen.seconds, chosen.pause, python, real_driver=chosen.real_driver)
    if chosen.json:
        print(json.dumps([row]))
        return
    print(f"{row['ranks']} ranks: steps per second: {row['steps_with']} with, {row['steps_without']} without", end=" ")
    print(f"({row['change_percent']:+} %; resolution {row['resolution_percent']} %)", end="; ")
    print(f"daemon: {row['cpu_seconds_per_minute']} s of CPU per minute, {row['rss_mib']} MiB")


if __name__ == "__main__":
    main()
