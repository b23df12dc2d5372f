"""Make docs/img/dashboard-*.png: `python -m tests.deploy.pictures`, about three minutes.

Jobs train on two simulated nodes with two real hangwatch daemons, and a real Prometheus scrapes the daemons. Then
one rank hangs. drawing.py (not Grafana) draws the dashboards, and headless Chromium takes the pictures.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hangwatch.tools.demo.simulated_node import SimulatedNode
from tests.conftest import wait_for
from tests.deploy import promql
from tests.deploy.daemon_on_simulated_node import hangwatch_on
from tests.deploy.drawing import WIDTH, Source, draw
from tests.deploy.promql import DASHBOARDS, ROOT, RULES
from tests.servers import RealPrometheus, chromium

IMAGES = ROOT / "docs/img"
TRAINING_SECONDS = 75.0
AFTERWARDS_SECONDS = 25.0
PAGE = 'ALERTS{alertname="HangwatchTrainingHung",alertstate="firing"}'


def main() -> None:
    """Run the scenario and take one picture of each dashboard."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        nodes = [stack.enter_context(SimulatedNode(ranks)) for ranks in (8, 4)]
        daemons = [
            stack.enter_context(hangwatch_on(node, folder / f"hangwatch-{number}", f"node-{number}"))
            for number, node in enumerate(nodes, start=1)
        ]
        targets = {f"node-{number}": f"127.0.0.1:{daemon.port}" for number, daemon in enumerate(daemons, start=1)}
        prometheus = stack.enter_context(RealPrometheus(folder / "prometheus", targets, rules=[RULES]))
        began = time.time()
        wait_for(lambda: len(prometheus.query('hangwatch_job_state{state="training"} == 1')) == 2, "training", 90)
        time.sleep(TRAINING_SECONDS)
        nodes[0].order(5, "loader")
        wait_for(lambda: prometheus.query(PAGE), "the page", 90)
        time.sleep(AFTERWARDS_SECONDS)
        variables = {"fleet": {"node": ".*", "job_key": ".*"}, "node": {"node": "node-1", "job_key": ".*", "gpu": ".*"}}
        (info,) = prometheus.query(f'max by (job_key) (hangwatch_job_info{{job_id="{nodes[0].run_id}"}})')
        variables["job"] = {"job_key": info["metric"]["job_key"]}
        source = Source(prometheus.query, prometheus.query_range)
        for dashboard in DASHBOARDS:
            page, height = draw(promql.dashboard(dashboard), source, variables[dashboard], time.time() - began)
            (folder / "page.html").write_text(page)
            photograph(folder / "page.html", IMAGES / f"dashboard-{dashboard}.png", height)
            sys.stdout.write(f"{IMAGES / f'dashboard-{dashboard}.png'}\n")


def photograph(page: Path, picture: Path, height: int) -> None:
    """Save a PNG picture of a page, `height` pixels high, with headless Chromium."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        chromium(page.parent, f"--window-size={WIDTH},{height}", f"--screenshot={picture}", page.as_uri()),
        check=True,
        timeout=120,
        capture_output=True,
    )


if __name__ == "__main__":
    main()
