"""A real daemon names the rank of a real torchrun job that is late in each step, and none while all ranks are equal."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.commands import HANGWATCH, Finished, finished
from tests.conftest import wait_for
from tests.real_daemon import RealDaemon, TorchJob

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
SLOW_RANK = 2  # of slow_part.py and slow_rank.py; an import would bring torch into each worker
PROGRESS = {"arrival_seconds": 1.0, "straggler_seconds": 1.0}


def arrival(daemon: RealDaemon, job: TorchJob) -> dict[str, Any]:
    jobs: list[dict[str, Any]] = daemon.status()["jobs"]  # type: ignore[assignment]
    return next((one["arrival"] for one in jobs if one["job_id"] == job.run_id), None) or {"reason": None}


def run_slow(daemon: RealDaemon, *arguments: str) -> Finished:
    command = [*HANGWATCH, "slow", "--config", str(daemon.config)]
    command += ["--url", f"http://{daemon.address}", *arguments]
    return finished(*command)


def test_late_rank_of_a_real_job_is_named_and_none_before(tmp_path: Path) -> None:
    with (
        RealDaemon(tmp_path / "hw", os.environ, progress=PROGRESS) as daemon,
        TorchJob(tmp_path, "slow_rank.py") as job,
    ):
        balanced = wait_for(lambda: (one := arrival(daemon, job))["reason"] == "NoneLate" and one, "300 records", 120)
        assert balanced["records"] >= 300 and balanced["library"] == "gloo" and balanced["step_seconds"] >= 0.02
        assert len(daemon.samples("hangwatch_rank_lateness_seconds", job_id=job.run_id)) == 4
        (tmp_path / f"slow-{SLOW_RANK}").touch()

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

        pid = only["arrival"]["ranks"][0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            saved = wait_for(
                lambda: list(daemon.state.glob(f"incidents/*-{job.run_id}-*/incident.json")), "an incident", 120
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        before = json.loads(saved[0].read_text())["arrival"]
        assert before["is_named"] and before["ranks"][0]["rank"] == SLOW_RANK


def first_names(folder: Path, part: str, seconds: float, steps: int) -> tuple[set[int | None], dict[str, Any]]:
    """Run a job until the records name a rank, or none. Return the named ranks, and the last order."""
    folder.mkdir()
    named, last = set[int | None](), dict[str, Any]()
    with (
        RealDaemon(folder / "hw", os.environ, progress=PROGRESS) as daemon,
        TorchJob(folder, "slow_part.py", arguments=[part, str(seconds)]) as job,
    ):

        def is_over() -> bool:
            last.update(arrival(daemon, job))
            if last.get("is_named"):
                named.add(last["ranks"][0]["rank"])
            return bool(named) or (last["reason"] in ("NoneLate", "LateByRole") and job.steps(0) >= steps)

        wait_for(is_over, f"{steps} steps", 240)
    return named, last


CAUSES = ("loader", "forward", "backward", "contention")


@pytest.mark.parametrize("part", CAUSES)
def test_rank_with_a_slow_part_is_named(part: str, tmp_path: Path) -> None:
    named, last = first_names(tmp_path / "job", part, 0.008, 10_000)
    assert named == {SLOW_RANK}, last


@pytest.mark.series
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "seconds", "steps", "expected"),
    [
        ("late", 0.002, 300, 20),
        ("late", 0.001, 1500, 18),
        ("balanced", 0.0, 1000, 20),
        ("rotating", 0.004, 1000, 20),
    ],
)
def test_series_of_real_jobs(kind: str, seconds: float, steps: int, expected: int, tmp_path: Path) -> None:
    results = []
    for run in range(20):
        part = CAUSES[run % len(CAUSES)] if kind == "late" else "loader" if kind == "balanced" else kind
        named, last = first_names(tmp_path / str(run), part, seconds, steps)
        results.append(named == ({SLOW_RANK} if kind == "late" else set()))
        print(kind, part, "right" if results[-1] else f"wrong: {sorted(named, key=str)}", last.get("message"))
        assert not named - {SLOW_RANK}, "another rank is never named"
    print(f"{kind}, {seconds * 1e3:g} ms: {sum(results)} of {len(results)} right")
    assert sum(results) >= expected
