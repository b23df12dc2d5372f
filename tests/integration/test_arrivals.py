"""A real daemon names the rank of a real torchrun job that is late in each step, and none while all ranks are equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.jobs.slow_rank import SLOW_RANK
from tests.real_daemon import RealDaemon, TorchJob

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
PROGRESS = {"arrival_seconds": 1.0, "straggler_seconds": 1.0}


def arrival(daemon: RealDaemon, job: TorchJob) -> dict[str, Any]:
    jobs: list[dict[str, Any]] = daemon.status()["jobs"]  # type: ignore[assignment]
    return next((one["arrival"] for one in jobs if one["job_id"] == job.run_id), None) or {"reason": None}


def run_slow(daemon: RealDaemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hangwatch", "slow", "--config", str(daemon.config)]
    command += ["--url", f"http://{daemon.address}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_late_rank_of_a_real_job_is_named_and_none_before(tmp_path: Path) -> None:
    with (
        RealDaemon(tmp_path / "hw", os.environ, progress=PROGRESS) as daemon,
        TorchJob(tmp_path, "slow_rank.py") as job,
    ):
        wait_for(lambda: arrival(daemon, job)["reason"] == "TooFewRecords", "the first records", 120)
        early = run_slow(daemon, "--job", job.run_id)
        assert early.returncode == 1 and ("of at least 300" in early.stdout or "No rank is late" in early.stdout)
        balanced = wait_for(lambda: (one := arrival(daemon, job))["reason"] == "NoneLate" and one, "300 records", 120)
        assert balanced["records"] >= 300 and not balanced["is_named"] and 0.02 <= balanced["step_seconds"] < 0.2
        assert not daemon.samples("hangwatch_job_straggler_lateness_ratio")
        (tmp_path / "slow").touch()
        named = wait_for(lambda: (one := arrival(daemon, job)).get("is_named") and one, "the late rank", 120)
        assert named["ranks"][0]["rank"] == SLOW_RANK and named["library"] == "gloo"
        assert 0.03 <= named["lateness_ratio"] < 0.5 and f"Rank {SLOW_RANK} " in named["message"]
        ((labels, ratio),) = daemon.samples("hangwatch_job_straggler_lateness_ratio", job_id=job.run_id)
        assert labels["rank"] == str(SLOW_RANK) and ratio >= 0.03
        assert len(daemon.samples("hangwatch_rank_lateness_seconds", job_id=job.run_id)) == 4
        shown = run_slow(daemon)
        assert shown.returncode == 0 and f"Rank {SLOW_RANK} (pid " in shown.stdout
        (only,) = json.loads(run_slow(daemon, "--job", job.run_id, "--json").stdout)["jobs"]
        assert only["job_id"] == job.run_id and only["arrival"]["is_named"]
        assert "no such job" in run_slow(daemon, "--job", "other").stderr
        assert daemon.job_state(job.run_id) == "training"
