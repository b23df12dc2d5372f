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
        balanced = wait_for(lambda: (one := arrival(daemon, job))["reason"] == "NoneLate" and one, "300 records", 120)
        assert balanced["records"] >= 300 and balanced["library"] == "gloo" and balanced["step_seconds"] >= 0.02
        assert len(daemon.samples("hangwatch_rank_lateness_seconds", job_id=job.run_id)) == 4
        (tmp_path / "slow").touch()

        # On a busy machine other ranks may be late at times, too.
        def shows_slow_rank(*arguments: str) -> str:
            shown = run_slow(daemon, *arguments)
            return shown.stdout if shown.returncode == 0 and f"Rank {SLOW_RANK} (pid " in shown.stdout else ""

        wait_for(shows_slow_rank, "the late rank", 120)
        labels = {"job_id": job.run_id, "rank": str(SLOW_RANK)}
        wait_for(lambda: daemon.samples("hangwatch_job_straggler_lateness_ratio", **labels), "its metric", 120)
        shown = wait_for(lambda: shows_slow_rank("--job", job.run_id, "--json"), "it in JSON", 120)
        (only,) = json.loads(shown)["jobs"]
        assert only["job_id"] == job.run_id and only["arrival"]["ranks"][0]["rank"] == SLOW_RANK
        assert 0.03 <= only["arrival"]["lateness_ratio"] < 1.0
        assert "no such job" in run_slow(daemon, "--job", "other").stderr


@pytest.mark.series
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", ["loader", "forward", "backward"])
def test_rank_with_a_slow_part_is_the_first_that_is_named(part: str, tmp_path: Path) -> None:
    for run in range(5):
        folder = tmp_path / str(run)
        folder.mkdir()
        with (
            RealDaemon(folder / "hw", os.environ, progress=PROGRESS) as daemon,
            TorchJob(folder, "slow_part.py", arguments=[part, "0.004"]) as job,
        ):
            named = wait_for(lambda: (one := arrival(daemon, job)).get("is_named") and one, "a name", 240)
            assert named["ranks"][0]["rank"] == SLOW_RANK, (run, named)


@pytest.mark.series
@pytest.mark.timeout(3600)
def test_balanced_jobs_that_compute_name_nobody(tmp_path: Path) -> None:
    for run in range(20):
        folder, reasons = tmp_path / str(run), set[str]()
        folder.mkdir()
        with (
            RealDaemon(folder / "hw", os.environ, progress=PROGRESS) as daemon,
            TorchJob(folder, "slow_part.py", arguments=["loader", "0"]) as job,
        ):

            def saw_1000_steps() -> bool:
                reasons.add(arrival(daemon, job)["reason"])  # noqa: B023
                return job.steps(0) >= 1000

            wait_for(saw_1000_steps, "1000 steps", 300)
            assert "NoneLate" in reasons and "" not in reasons, run
