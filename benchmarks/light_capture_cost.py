"""Cost of one light capture: CPU time of hangwatch and its py-spys, and the context switches of the ranks.

    .venv/bin/python benchmarks/light_capture_cost.py [--ranks 8] [--workers 8] [--rounds 10]

A light capture takes three rounds, pauses no process and does not retry a dump. Here it captures a job of real
ranks and loader workers that sleep. Unlike the daemon, the benchmark does not wait five seconds between two rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from msgspec.structs import replace  # noqa: E402

from benchmarks.checks_cost import cpu_seconds, real_job  # noqa: E402
from hangwatch.capture.diagnosis import diagnose_job  # noqa: E402
from hangwatch.capture.request import CaptureRequest  # noqa: E402
from hangwatch.config import Settings  # noqa: E402
from hangwatch.probes.base import procfs  # noqa: E402
from hangwatch.probes.process import main_thread  # noqa: E402
from hangwatch.probes.process.pyspy import DumpMode  # noqa: E402
from hangwatch.stacks import activity  # noqa: E402


def switches(pids: list[int]) -> int:
    counters = [main_thread.read_counters(pid, procfs.PROC) for pid in pids]
    return sum(one.voluntary_switches or 0 for one in counters if one is not None)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--workers", type=int, default=8, help="loader workers of each rank")
    options.add_argument("--rounds", type=int, default=10)
    chosen = options.parse_args()
    settings = Settings()
    with ExitStack() as stack:
        job = real_job(stack, chosen.ranks, chosen.workers)
        pids = [rank.id.pid for rank in job.ranks]
        table = activity.load(settings.activities.rules)
        before, costs, seconds = switches(pids), [], []
        for _ in range(chosen.rounds):
            began, used = time.monotonic(), cpu_seconds()
            diagnose_job(
                job,
                CaptureRequest(
                    node="node-1", settings=replace(settings.capture, pause_seconds=0.0), mode=DumpMode(may_pause=False)
                ),
                table,
            )
            costs.append(cpu_seconds() - used)
            seconds.append(time.monotonic() - began)
        more = switches(pids) - before
    cost, wall = statistics.median(costs), statistics.median(seconds)
    print(f"{chosen.ranks} ranks with {chosen.workers} loader workers each, {chosen.rounds} light captures")
    print(f"one light capture: {cost:.2f} s of CPU (median; {min(costs):.2f} to {max(costs):.2f}), {wall:.1f} s wall")
    print(f"the ranks, which sleep, were switched to {more} times in all of them")
    for count in (1, 30, 144):
        print(f"{count:4} a day: {count * cost:6.1f} s of CPU a day, {100 * count * cost / 86400:.4f} % of one core")


if __name__ == "__main__":
    main()
