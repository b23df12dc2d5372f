"""Cost of the alert rules on jobs, in a Prometheus, while one large job hangs, for several versions of the rules.

    .venv/bin/python benchmarks/fleet_rule.py [--ranks 1024 4096 16384] [--nodes-of 8] [--json] RULES...

The series are those of an incident: one rank has not joined a collective of the default group, and every rank has
used two more groups. One server on loopback serves the series of all nodes. A real Prometheus scrapes it and
evaluates one file of rules after the other. The result is Prometheus' CPU time between two evaluations of the group
`hangwatch-jobs`, without the scrape. It includes the groups that are evaluated less often. Wall time would depend on
other load on the machine; CPU time does a little, so the cheapest of several windows counts.

With several numbers of ranks, the slope is that of CPU time over ranks, both as logarithms, by least squares from
1,024 ranks on. `--json` prints one object for each measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.grouping import find_slope  # noqa: E402
from hangwatch.detector import job_watch  # noqa: E402
from hangwatch.model import Frame, Group, Grouping, JobState, Member  # noqa: E402
from hangwatch.state.board import JobEntry, Snapshot  # noqa: E402
from tests import samples  # noqa: E402
from tests.servers import RealPrometheus  # noqa: E402
from tests.unit.test_waitfor import WORLD, standing  # noqa: E402

WAIT = Frame(function="all_reduce", file="torch/distributed/distributed_c10d.py", line=9)
OWN = Frame(function="step", file="train.py", line=7)
GROUP = "hangwatch-jobs"
SLOWER = 3  # times: all intervals, so that no evaluation is missed on a busy machine
SCRAPE_SECONDS = 240.0
START_SECONDS = 300.0
MOST_SECONDS = 240.0  # Prometheus forgets a sample after 300 s
_INTERVAL = re.compile(r"^( +interval: )(\d+)", re.MULTILINE)
WINDOW = 6  # evaluations: all groups but `hangwatch-jobs-minutely` are evaluated in that time


def rank(number: int, odd: int) -> Member:
    """Return the progress of rank `number`.

    It has joined collective 6 of the default group, unless `number` is `odd`. It has used two more groups.
    """
    more = {f"tp{number // 8}": (900, 901), f"dp{number % 8}": (70, 71)}
    return standing(number, {WORLD: (5, 6) if number == odd else (6, 6), **more})


def lines(ranks: int, ranks_of_node: int) -> Iterator[str]:
    """Yield the series about the job that all nodes export, with the labels that Prometheus would add."""
    odd = ranks * 3 // 5
    for node, first in enumerate(range(0, ranks, ranks_of_node)):
        here = [rank(number, odd) for number in range(first, min(first + ranks_of_node, ranks))]
        waits = Group(
            key="w",
            activity="collective_wait",
            waits_for="ranks",
            frames=(WAIT,),
            members=tuple(one for one in here if one.id.rank != odd),
        )
        apart = Group(
            key="o",
            activity="unknown",
            waits_for="nothing",
            frames=(OWN,),
            members=tuple(one for one in here if one.id.rank == odd),
        )
        grouping = Grouping(groups=tuple(one for one in (waits, apart) if one.members), world_size=ranks)
        job = structs.replace(samples.job(range(first, first + len(here)), ranks), job_key="k1")
        incident = structs.replace(samples.all_waiting(), job=job, grouping=grouping, state=JobState.HUNG)
        watch = structs.replace(job_watch.begin_watch(job, 0.0), state=JobState.HUNG)
        entry = JobEntry(job=job, watch=watch, page=True, incident=incident)
        yield f'up{{job="hangwatch",instance="node-{node}"}} 1\n'
        yield f'process_start_time_seconds{{job="hangwatch",instance="node-{node}"}} 1\n'
        yield f'hangwatch_time_seconds{{job="hangwatch",instance="node-{node}"}} 9000\n'
        for family in samples.metric_families(Snapshot(jobs={"k1": entry})):
            for sample in family.samples:
                if "job_key" in sample.labels:
                    labels = {"job": "hangwatch", "instance": f"node-{node}", **sample.labels}
                    text = ",".join(f'{name}="{value}"' for name, value in labels.items())
                    yield f"{sample.name}{{{text}}} {float(sample.value)}\n"


def serve(body: bytes) -> ThreadingHTTPServer:
    """Start an HTTP server on loopback that responds with `body`, and to further requests not before it is closed."""
    bodies, is_closed = [body], threading.Event()

    class Exporter(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not bodies:
                is_closed.wait()
                return
            body = bodies.pop()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def server_close(self) -> None:
            is_closed.set()
            super().server_close()

    server = Server(("127.0.0.1", 0), Exporter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class Cost(NamedTuple):
    """CPU seconds of one evaluation of the group, and the number of suspect ranks in the last evaluation."""

    cpu_seconds: float
    evaluations: int
    odd: float


def measure(port: int, rules: Path, windows: int) -> Cost:
    """Measure evaluations after the rules have found a suspect rank. Return the cost of one in the cheapest window."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        slower = Path(folder) / rules.name
        slower.write_text(_INTERVAL.sub(lambda found: f"{found[1]}{int(found[2]) * SLOWER}", rules.read_text()))
        targets = {"all": f"127.0.0.1:{port}"}
        prometheus = stack.enter_context(
            RealPrometheus(Path(folder), targets, rules=[slower], scrape_seconds=SCRAPE_SECONDS, honors_labels=True)
        )
        end = time.monotonic() + START_SECONDS
        while not prometheus.query("count(hangwatch:odd_rank:held)") and time.monotonic() < end:
            time.sleep(0.5)
        assert len(prometheus.query("count by (instance) (hangwatch_job_page)")) > 1, "nodes need a label of their own"
        end = time.monotonic() + MOST_SECONDS
        costs, began = [], _wait_for_evaluations(prometheus, _spent(prometheus), 1, end)
        while len(costs) < windows and time.monotonic() < end:
            done = _wait_for_evaluations(prometheus, began, WINDOW, end)
            costs += [(done[1] - began[1]) / (done[0] - began[0])] if done[0] > began[0] else []
            began = done
        odd = prometheus.query("count(hangwatch:odd_rank:held)")
        return Cost(min(costs, default=math.inf), len(costs) * WINDOW, float(odd[0]["value"][1]) if odd else 0.0)


def _wait_for_evaluations(
    prometheus: RealPrometheus, began: tuple[int, float], count: int, end: float
) -> tuple[int, float]:
    """Return evaluations and CPU seconds when `count` more evaluations are done, at the latest at the time `end`."""
    while (now := _spent(prometheus))[0] < began[0] + count and time.monotonic() < end:
        time.sleep(0.2)
    return now


def _spent(prometheus: RealPrometheus) -> tuple[int, float]:
    """Return the number of evaluations of the group, and the CPU seconds of Prometheus, from its own metrics."""
    with urllib.request.urlopen(f"{prometheus.url}/metrics") as answer:
        text = answer.read().decode()
    iterations, missed = (
        re.findall(rf'^prometheus_rule_group_{name}_total{{[^}}]*{GROUP}"}} (\S+)$', text, re.MULTILINE)[0]
        for name in ("iterations", "iterations_missed")
    )
    (cpu,) = re.findall(r"^process_cpu_seconds_total (\S+)$", text, re.MULTILINE)
    return int(float(iterations) - float(missed)), float(cpu)


def main() -> None:
    """Measure each file of rules with each number of ranks, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", type=Path, nargs="+")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16384])
    parser.add_argument("--nodes-of", type=int, default=8)
    parser.add_argument("--windows", type=int, default=3, help=f"of {WINDOW} evaluations each")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    costs: dict[Path, dict[int, float]] = {path: {} for path in asked.rules}
    for ranks in asked.ranks:
        body = "".join(lines(ranks, asked.nodes_of)).encode()
        print(f"{ranks:,} ranks: {body.count(10):,} series, {len(body) / 1e6:.1f} MB", file=sys.stderr)
        for path in asked.rules:
            server = serve(body)
            try:
                cost = measure(server.server_port, path.resolve(), asked.windows)
            finally:
                server.shutdown()
                server.server_close()
            if cost.odd == 0:
                sys.exit(f"{path}: the rules named no rank of {ranks:,}: there is nothing to measure")
            costs[path][ranks] = cost.cpu_seconds
            text = f"{cost.cpu_seconds:.2f} s of CPU ({cost.evaluations} evaluations), {cost.odd:.0f} odd"
            print(f"{path}: {text}", file=sys.stderr)
    rows = [
        {"ranks": ranks, "step": str(path), "cpu_seconds": round(seconds, 3)}
        for path in asked.rules
        for ranks, seconds in costs[path].items()
    ]
    if asked.json:
        print(json.dumps(rows, indent=1))
    for path in () if asked.json else asked.rules:
        slope = find_slope(costs[path])
        print(f"{path}: slope {'not known' if slope is None else f'{slope:.2f}'}")


if __name__ == "__main__":
    main()
