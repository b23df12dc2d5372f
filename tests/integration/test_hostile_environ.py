"""Processes with hostile environments beside a job that hangs: the daemon stays small, and it pages."""

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest

from hangwatch.config import Settings
from hangwatch.daemon import Daemon
from hangwatch.daemon.wiring import STUCK_SECONDS
from hangwatch.probes.gpu.sampler import NvmlSampler
from tests import hostile_environments
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.proc_tree import lay_out
from tests.real_daemon import RealDaemon
from tests.simulated.node import SimulatedNode

pytestmark = pytest.mark.timeout(400)
JOBS_WATCHED = 10


def peak_bytes(pid: int) -> int:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) * 1024


def _value(daemon: RealDaemon, name: str, **labels: str) -> float:
    return sum(value for _, value in daemon.samples(name, **labels))


def _keys(daemon: RealDaemon, owner: str) -> list[str]:
    return [row["job_key"] for row, _ in daemon.samples("hangwatch_job_info", owner=owner)]


def scrape_seconds(daemon: RealDaemon) -> float:
    began = time.monotonic()
    daemon.get("/metrics")
    return time.monotonic() - began


def test_what_others_write_into_environments_keeps_no_page_back(fake_driver: FakeDriver, tmp_path: Path) -> None:
    crowd = [
        *hostile_environments.large_environments(8),
        *hostile_environments.claim_world(4_000_000, "0,1"),
        *hostile_environments.claim_jobs(60),
    ]
    limits = {"max_jobs_per_owner": JOBS_WATCHED}
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(SimulatedNode(4))
        # Written before the daemon starts: in a sample without process lists, the environments of the attackers would
        # decide which process holds a GPU.
        fake_driver.write([*h100(4), *(f"gpu {index} pids {pid}" for index, pid in enumerate(node.pids))])
        daemon = stack.enter_context(RealDaemon(tmp_path / "hw", fake_driver.environ, jobs=limits))
        daemon.wait_for_state(node.run_id, "training")
        owner = f"uid {hostile_environments.NOBODY}" if os.geteuid() == 0 else f"uid {os.geteuid()}"
        with hostile_environments.crowd(crowd):
            # The large environments form one job, and the claimed world another. This user may run other processes,
            # too.
            beyond = len(hostile_environments.claim_jobs(60)) + 2 - JOBS_WATCHED
            wait_for(
                lambda: _value(daemon, "hangwatch_left_out", owner=owner, what="jobs") >= beyond, "what is left out"
            )
            alive = [key for key in _keys(daemon, owner) if _value(daemon, "hangwatch_job_ranks", job_key=key)]
            assert len(alive) <= JOBS_WATCHED
            assert not {row["job_key"] for row, _ in daemon.samples("hangwatch_job_gpu_info")} & set(alive)
            assert min(scrape_seconds(daemon) for _ in range(5)) < 1.0
            node.order(1, "loader")
            fake_driver.add("gpu all power_watts 100")
            wait_for(lambda: _value(daemon, "hangwatch_job_page", job_id=node.run_id) == 1, "the page", 90)
            assert peak_bytes(daemon.process.pid) < 128 << 20
            assert "not monitored: exceeds a limit in [jobs]" in daemon.log


def test_scan_that_does_not_return_is_a_health_problem(tmp_path: Path) -> None:
    """No file of a real /proc is known to block a scan. The test of `locked_memory` has reads that do block."""
    lay_out("1 (init) S parent=0 start=1\n7 (python) S parent=1 start=9\n", tmp_path)
    (tmp_path / "7" / "stat").unlink()
    os.mkfifo(tmp_path / "7" / "stat")
    now = [1000.0]
    gpus = NvmlSampler(sample_seconds=1.0, deadline_seconds=5.0)
    daemon = Daemon(Settings(), gpus, node="here", proc_root=tmp_path, clock=lambda: now[0])
    scan = threading.Thread(target=daemon._discover, daemon=True)
    scan.start()
    wait_for(lambda: "scan" in daemon.board.snapshot.running, "the scan to begin")
    assert daemon.find_health_problem() is None
    now[0] += STUCK_SECONDS + 1
    daemon._sample()  # power is still sampled
    assert daemon.find_health_problem() == "a scan has been running for 61 s"
    (tmp_path / "7" / "stat").write_bytes(b"")
    scan.join(30)
    assert daemon.find_health_problem() is None
    assert daemon.board.snapshot.scan_seconds == STUCK_SECONDS + 1
