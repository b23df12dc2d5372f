"""The daemon beside a fork bomb: the kernel lets it start neither a process nor a thread for a while."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.memory_cgroup import cgroup_below
from tests.real_daemon import RealDaemon
from tests.simulated.node import SimulatedNode


@contextlib.contextmanager
def task_cgroup() -> Iterator[Path]:
    """Make a control group that limits processes and threads, see cgroup-v1/pids.rst. Skip the test if that fails."""
    rows = [row.split(":", 2) for row in Path("/proc/self/cgroup").read_text().splitlines()]
    v1 = next((f"/sys/fs/cgroup/pids{path}" for _, controllers, path in rows if controllers == "pids"), None)
    with cgroup_below(v1 or f"/sys/fs/cgroup{rows[0][2]}") as folder:
        if not (folder / "pids.max").exists():
            pytest.skip("needs the pids controller of control groups")
        yield folder


def test_daemon_that_can_start_no_process_lives_and_pages_afterwards(fake_driver: FakeDriver, tmp_path: Path) -> None:
    with task_cgroup() as group, SimulatedNode(2) as node:
        fake_driver.write([*h100(2), *(f"gpu {index} pids {pid}" for index, pid in enumerate(node.pids))])
        joining = ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"]
        often = {"recapture_seconds": 1.0, "recapture_max_seconds": 1.0}
        with RealDaemon(tmp_path / "hw", fake_driver.environ, prefix=joining, detector=often) as daemon:
            daemon.wait_for_state(node.run_id, "training")
            (group / "pids.max").write_text("0")  # as if all were used: what runs goes on
            node.order(1, "lock")
            fake_driver.add("gpu all power_watts 100")
            daemon.wait_for_state(node.run_id, "stalled")
            assert daemon.get("/healthz") == "ok\n"
            assert daemon.samples("hangwatch_job_page", job_id=node.run_id)[0][1] == 0, "no stack was taken"
            (group / "pids.max").write_text("max")
            wait_for(lambda: daemon.samples("hangwatch_job_page", job_id=node.run_id)[0][1] == 1, "the page")
            log = daemon.log
            assert "lets this daemon start no thread" in log and "please report this" not in log, log
