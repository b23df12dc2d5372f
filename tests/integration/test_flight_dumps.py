"""`hangwatch explain` on flight-recorder dumps of real gloo jobs. Expected results: tests/data/waitfor.toml."""

import json
import subprocess
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from click.testing import CliRunner

from hangwatch.cli.explain import explain
from hangwatch.probes.process import pyspy
from tests.conftest import wait_for
from tests.recorder_jobs.started import KEY, Started, started

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

THREADS_THAT_LOOK = {"gloo_tcp_loop", "dump_when_asked"}  # again and again, also if nothing happens


def verdict(folder: Path) -> dict[str, Any]:
    done = CliRunner().invoke(explain, ["--json", str(folder)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["verdict"]


def ranks(of: list[dict[str, Any]]) -> list[int]:
    return [one["rank"] for one in of]


def settled(job: Started) -> Path:
    """Return the folder of a job's dumps after the job has stopped.

    It has stopped if all threads sleep while those that look for events look twice. On a busy machine a thread that
    does not run may only wait for a core.
    """
    before: dict[Path, int] = {}

    def has_stopped() -> bool:
        nonlocal before
        tasks = [task for rank in job.read for task in Path(f"/proc/{job.pids[rank]}/task").iterdir()]
        looking = {task for task in tasks if (task / "comm").read_text().strip() in THREADS_THAT_LOOK}
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks if task not in looking]
        runs = {task: int((task / "schedstat").read_text().split()[2]) for task in tasks}
        if set(states) != {"S"} or any(runs[task] != before.get(task) for task in runs.keys() - looking):
            before = runs
            return False
        return all(runs[task] >= before.get(task, runs[task]) + 2 for task in looking)

    wait_for(has_stopped, "the job to stop")
    return job.dumps("settled")


@pytest.mark.parametrize(
    "name",
    [
        *("own_code", "two_do_not_join", "enqueued_ahead", "again", "chain_of_groups"),
        *("open_and_stuck", "wrong_group", "skipped", "other_operation"),
        *("wrapped_over_the_open", "detail", "pipeline", "wrapped_reaches_back"),
    ],
)
def test_a_hang_by_its_dumps_alone(name: str, tmp_path: Path) -> None:
    """Name no rank by dumps without stacks. Suspects are only ranks to check first."""
    row = KEY[name]
    with started(name, tmp_path, DUMPS="1") as job:
        folder = settled(job)
    found = verdict(folder)
    first = row.get("check_first") or row.get("named", [])
    assert (found["named"], ranks(found["check_first"])) == ([], list(first)), found["message"]
    kind = "Cycle" if name == "open_and_stuck" else row["kind"]  # only a stack shows that it does not wait
    assert found["kind"] == (kind if kind != "Unknown" and (first or "cycle" in row) else "RecordsOnly")
    assert "the moment when torch wrote its dumps" in found["message"]
    assert ("only stacks show that" in found["message"]) == (found["kind"] == "Cycle")
    if name == "two_do_not_join":
        assert "Ranks 1,4 have not joined" in found["message"]


def test_with_their_stacks_the_rank_is_named(tmp_path: Path) -> None:
    with started("own_code", tmp_path, DUMPS="1") as job:
        folder = settled(job)
        for rank, pid in job.pids.items():
            command = [str(pyspy.find()), "dump", "--pid", str(pid)]
            stack = subprocess.run(command, capture_output=True, check=True, timeout=60)
            (folder / f"stack-rank{rank}.txt").write_bytes(stack.stdout)
    found = verdict(folder)
    assert (found["kind"], ranks(found["named"]), found["confidence"]) == ("NotJoined", [2], "medium")
    assert "prepare_batch" in found["message"] and "the moment when torch wrote its dumps" in found["message"]
    told = [one["message"].rpartition(":")[0] for one in found["evidence"] if one["kind"] == "last_enqueued"]
    assert "rank 2 enqueued last: all_reduce 5 of default_pg, in reduce (program.py" in told


@pytest.mark.parametrize("name", ["healthy", "slow_rank"])
def test_dumps_of_a_healthy_job_at_different_moments_name_no_rank(name: str, tmp_path: Path) -> None:
    """Dump each rank at a different moment."""
    with started(name, tmp_path, DUMPS="1") as job:
        cuts = [copytree(job.dumps(str(number)), tmp_path / f"cut-{number}") for number in range(40)]
    verdicts = list(map(verdict, cuts))
    pointed = [ranks(found["check_first"]) for found in verdicts]
    print([found["kind"] for found in verdicts], pointed)
    assert [found["named"] for found in verdicts] == [[]] * 40
    assert any(one["kind"] == "sequence" for found in verdicts for one in found["evidence"])
