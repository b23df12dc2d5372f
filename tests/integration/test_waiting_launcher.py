"""A torchrun that waits for a second node, found, captured and reported by a daemon until the node joins."""

from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.real_daemon import QUICK, RealDaemon, TorchJob
from tests.servers import free_port

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]


def test_torchrun_that_waits_for_a_node_is_told_and_then_goes_on(fake_driver: FakeDriver, tmp_path: Path) -> None:
    fake_driver.write(h100(1))
    endpoint = f"127.0.0.1:{free_port()}"
    second = tmp_path / "second"
    second.mkdir()
    detector = {
        **QUICK["detector"],
        "startup_no_ranks_hold_seconds": 30.0,
        "recapture_seconds": 5.0,
        "recapture_max_seconds": 5.0,
    }
    with (
        RealDaemon(tmp_path / "hw", fake_driver.environ, detector=detector) as daemon,
        TorchJob(tmp_path, "stuck_on_a_fifo.py", ranks=1, nodes=2, endpoint=endpoint) as job,
    ):
        daemon.wait_for_state(job.run_id, "starting")
        assert daemon.samples("hangwatch_job_ranks", job_id=job.run_id)[0][1] == 0
        wait_for(
            lambda: "which it serves; no other launcher" in _verdict(daemon, job),
            "a look at torchrun once it waits",
            150,
        )
        said = _verdict(daemon, job)
        assert (
            said.startswith("torchrun (pid ") and f"run id {job.run_id}, 2 nodes expected) has started no rank" in said
        )
        assert f"and waits for other nodes at {endpoint}, which it serves; no other launcher is connected" in said
        assert daemon.job_state(job.run_id) == "stalled"
        assert [value for _, value in daemon.samples("hangwatch_job_page", job_id=job.run_id)] == [0]
        assert not daemon.samples("hangwatch_rank_activity"), "a launcher is not a rank"

        other = TorchJob(second, "stuck_on_a_fifo.py", ranks=1, nodes=2, endpoint=endpoint, run_id=job.run_id)
        with other:
            job.wait_for_step(3)
            daemon.wait_for_state(job.run_id, "training")
            assert [value for _, value in daemon.samples("hangwatch_job_ranks", job_id=job.run_id)] == [2]
            assert not daemon.samples("hangwatch_incident_info", job_id=job.run_id)
            assert "-> ended: it was a launcher without ranks" in daemon.log


def _verdict(daemon: RealDaemon, job: TorchJob) -> str:
    rows = daemon.samples("hangwatch_incident_info", job_id=job.run_id, verdict="NoRanks")
    return rows[0][0]["summary"] if rows else ""
