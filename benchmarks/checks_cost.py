"""Cost of each check: CPU time of one run, and the load on a core at the check's own interval.

    .venv/bin/python benchmarks/checks_cost.py [--ranks 8] [--workers 8] [--rounds 20]

Each check runs repeatedly and keeps its window, as in the daemon, next to a job of real ranks and loader workers.
CPU time includes the children that a check starts and reaps. The machine needs no GPU: then a GPU check only finds
that the driver is missing. `benchmarks/daemon_cost.py` measures the whole daemon with eight fake GPUs.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hangwatch.checks.framework import registry, runner  # noqa: E402
from hangwatch.model import Job  # noqa: E402
from hangwatch.probes.node.machine import Node  # noqa: E402
from tests.node_tree import job, real_rank  # noqa: E402

SLEEPER = [sys.executable, "-S", "-c", "import sys; print('ready', flush=True); sys.stdin.read()"]


def cpu_seconds() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def real_job(stack: ExitStack, ranks: int, workers: int) -> Job:
    def process() -> int:
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NCCL_SOCKET_IFNAME": "lo"}
        child = subprocess.Popen(SLEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
        stack.callback(child.wait)
        stack.callback(child.stdin.close)  # type: ignore[union-attr]
        child.stdout.readline()  # type: ignore[union-attr]
        return child.pid

    return job(
        *(real_rank(process(), local_rank, workers=[process() for _ in range(workers)]) for local_rank in range(ranks))
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--workers", type=int, default=8, help="loader workers of each rank")
    options.add_argument("--rounds", type=int, default=20)
    chosen = options.parse_args()
    with ExitStack() as stack:
        node = Node(jobs=(real_job(stack, chosen.ranks, chosen.workers),), state_directory=Path("/var/tmp"))
        total = 0.0
        print(f"{chosen.ranks} ranks with {chosen.workers} loader workers each, {chosen.rounds} rounds")
        print(f"{'check':<20} {'every':>6} {'CPU, median':>12} {'of a core':>10}  verdict")
        for name, check in registry.checks().items():
            window, settings, costs = runner.Window(check), check.settings(), []
            for _ in range(chosen.rounds):
                before = cpu_seconds()
                result = runner.run(check, node, settings, window)
                costs.append(cpu_seconds() - before)
            cost = statistics.median(costs)
            total += cost / check.every_seconds
            share = f"{100 * cost / check.every_seconds:.4f} %"
            print(f"{name:<20} {check.every_seconds:>4g} s {cost * 1000:>9.2f} ms {share:>10}  {result.verdict.reason}")
        print(f"all checks together: {100 * total:.3f} % of one core")
        print(f"resident memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.1f} MiB")


if __name__ == "__main__":
    main()
