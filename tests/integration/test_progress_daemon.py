"""A real daemon and a real torchrun job without GPU readings: its counters alone show a hang, and its end."""

import json
import os
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import latency
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.real_daemon import RealDaemon, TorchJob

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

ODD_RANK = 2  # of stuck_on_a_fifo.py
SECTIONS: dict[str, dict[str, object]] = {"progress": {"shortest_gap_seconds": 5.0}, "jobs": {"discover_seconds": 2.0}}


def job_status(daemon: RealDaemon, job: TorchJob) -> dict[str, Any]:
    jobs: list[dict[str, Any]] = daemon.status()["jobs"]  # type: ignore[assignment]
    return next((one for one in jobs if one["job_id"] == job.run_id), {})


def wait_for_usual_gap(daemon: RealDaemon, job: TorchJob) -> None:
    job.wait_for_step(20)
    wait_for(lambda: job_status(daemon, job).get("usual_gap_seconds") is not None, "50 gaps to be known", 120)


@pytest.mark.parametrize("has_gpus", [False, pytest.param(True, marks=pytest.mark.machines)])
def test_blocked_rank_pages_after_hold_and_recovers(fake_driver: FakeDriver, tmp_path: Path, *, has_gpus: bool) -> None:
    """The GPUs of all ranks draw the same power in the hang as before, or there are none."""
    fake_driver.write(h100(4))
    os.mkfifo(tmp_path / "shard")
    sections = {**SECTIONS, "detector": {"hold_seconds": 40.0}}
    environ = fake_driver.environ if has_gpus else os.environ
    with RealDaemon(tmp_path / "hw", environ, **sections) as daemon, TorchJob(tmp_path, "stuck_on_a_fifo.py") as job:
        wait_for_usual_gap(daemon, job)
        assert job_status(daemon, job)["collectives_per_second"] > 1
        (tmp_path / "stop-at-shard").touch()
        daemon.wait_for_state(job.run_id, "suspected")
        status = wait_for(lambda: (one := job_status(daemon, job))["verdict"] and one, "its verdict")
        assert f"Rank {ODD_RANK}" in status["verdict"] and not status["page"] and status["progress_gap_seconds"] < 40
        assert daemon.samples("hangwatch_job_suspected_info", job_id=job.run_id)
        daemon.wait_for_state(job.run_id, "hung")
        wait_for(lambda: job_status(daemon, job)["page"], "the page")
        assert job_status(daemon, job)["progress_gap_seconds"] >= 40
        written = daemon.state / "incidents" / job_status(daemon, job)["incident"] / "incident.json"
        wait_for(written.exists, "the incident to be written")
        totals = json.loads(written.read_text())["collectives"]["totals"]
        assert totals[0] < totals[-1] == totals[-10], "it enqueued collectives, and no longer does"
        with (tmp_path / "shard").open("w") as shard:
            shard.write("data")
        wait_for(lambda: daemon.job_state(job.run_id) in ("recovered", "training"), "the job to recover", 60)
        assert not job_status(daemon, job)["page"]


def test_stopped_rank_pages_before_the_hold(tmp_path: Path) -> None:
    sections = {**SECTIONS, "detector": {"hold_seconds": 300.0}}
    with RealDaemon(tmp_path / "hw", os.environ, **sections) as daemon, TorchJob(tmp_path, "stuck_on_a_fifo.py") as job:
        wait_for_usual_gap(daemon, job)
        odd = latency.pid_of(job, ODD_RANK)
        os.kill(odd, signal.SIGSTOP)
        try:
            wait_for(lambda: job_status(daemon, job)["page"], "the page", 90)
            assert job_status(daemon, job)["state"] == "hung"
            assert 20 <= job_status(daemon, job)["progress_gap_seconds"] < 300
        finally:
            os.kill(odd, signal.SIGCONT)
        wait_for(lambda: daemon.job_state(job.run_id) in ("recovered", "training"), "the job to recover", 60)


@pytest.mark.series
@pytest.mark.timeout(3600)
def test_verdict_and_page_of_real_hangs_come_in_time_at_defaults() -> None:
    found = latency.collect(20, 2, has_counters=True)
    assert max(one.verdict_seconds for one in found) <= 45.0
    assert statistics.median(one.verdict_seconds for one in found) <= 30.0
    for one in found:
        assert one.page_seconds <= (135.0 if one.fault == "fifo" else 60.0), one
