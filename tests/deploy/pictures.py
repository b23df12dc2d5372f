"""Make docs/img/dashboard-*.png: `python -m tests.deploy.pictures [FOLDER]`, about eight minutes.

FOLDER gets the job's dashboard on screens of four widths, to look at.

Jobs train on two simulated nodes with two real hangwatch daemons, and a real Prometheus scrapes the daemons. Then
one rank hangs. drawing.py (not Grafana) draws the dashboards, and headless Chromium takes the pictures.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import wait_for
from tests.deploy import promql
from tests.deploy.daemon_on_simulated_node import hangwatch_on
from tests.deploy.drawing import Source, draw
from tests.deploy.promql import DASHBOARDS, ROOT, RULES
from tests.servers import RealPrometheus, chromium
from tests.simulated.node import SimulatedNode

IMAGES = ROOT / "docs/img"
IMAGE_PIXELS = 1480
SCREEN_PIXELS = (375, 768, 1280, 1920)
LATENESS_DEADLINE_SECONDS = 450.0
AFTERWARDS_SECONDS = 25.0
PAGE = 'ALERTS{alertname="HangwatchTrainingHung",alertstate="firing"}'


def main() -> None:
    """Run the scenario and take one picture of each dashboard."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        nodes = [
            stack.enter_context(SimulatedNode(8, worker="tests.deploy.torch_worker")),
            stack.enter_context(SimulatedNode(4)),
        ]
        daemons = [
            stack.enter_context(hangwatch_on(node, folder / f"hangwatch-{number}", f"node-{number}"))
            for number, node in enumerate(nodes, start=1)
        ]
        targets = {f"node-{number}": f"127.0.0.1:{daemon.port}" for number, daemon in enumerate(daemons, start=1)}
        prometheus = stack.enter_context(RealPrometheus(folder / "prometheus", targets, rules=[RULES]))
        began = time.time()
        wait_for(lambda: len(prometheus.query('hangwatch_job_state{state="training"} == 1')) == 2, "training", 90)
        lateness = "hangwatch_rank_lateness_seconds"
        wait_for(lambda: prometheus.query(lateness), "compared arrivals", LATENESS_DEADLINE_SECONDS)
        nodes[0].order(5, "loader")
        wait_for(lambda: prometheus.query(PAGE), "the page", 90)
        time.sleep(AFTERWARDS_SECONDS)
        variables = {"fleet": {"node": ".*", "job_key": ".*"}, "node": {"node": "node-1", "job_key": ".*", "gpu": ".*"}}
        (info,) = prometheus.query(f'max by (job_key) (hangwatch_job_info{{job_id="{nodes[0].run_id}"}})')
        variables["job"] = {"job_key": info["metric"]["job_key"]}
        source = Source(prometheus.query, prometheus.query_range)
        pictures = [(name, IMAGE_PIXELS, IMAGES / f"dashboard-{name}.png") for name in DASHBOARDS]
        for screens in map(Path, sys.argv[1:]):
            pictures += [("job", pixels, screens / f"job-{pixels}.png") for pixels in SCREEN_PIXELS]
        for name, pixels, picture in pictures:
            page, height = draw(promql.dashboard(name), source, variables[name], time.time() - began, pixels)
            (folder / "page.html").write_text(page)
            photograph(folder / "page.html", picture, pixels, height)
            sys.stdout.write(f"{picture}\n")


def photograph(page: Path, picture: Path, pixels: int, height: int) -> None:
    """Save a PNG picture of a page on a screen of that size, with headless Chromium."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        chromium(page.parent, f"--window-size={pixels},{height}", f"--screenshot={picture}", page.as_uri()),
        check=True,
        timeout=120,
        capture_output=True,
    )


if __name__ == "__main__":
    main()
