"""`hangwatch dump --jobid J --via srun` on a real Slurm of three nodes."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.conftest import wait_for
from tests.integration.test_check_nodes import answer_of
from tests.integration.test_check_nodes import keep as keep_check
from tests.integration.test_check_nodes import remote as remote_check
from tests.integration.test_dump_nodes import (
    answer,
    end_while_nodes_answer,
    incident_of,
    keep,
    remote,
    running,
)
from tests.integration.test_hostile_input import hangwatch, refused
from tests.slurm_nodes import ask, needs_slurm, slurm, steps

pytestmark = needs_slurm
LONG = "x" * 5000  # srun cuts lines at 1,024 bytes


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with slurm(tmp_path_factory.mktemp("slurm") / "d") as number:
        yield number


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    for number in range(3):
        incident = incident_of(range(8 * number, 8 * number + 8))
        keep(tmp_path / f"n{number}", [replace(incident, job=replace(incident.job, command=LONG))])
    return tmp_path


def test_a_step_beside_the_job_asks_its_nodes(nodes: Path, job: str) -> None:
    remote(nodes, "node=$SLURMD_NODENAME; echo >&2 own words of $node; print")
    command = ("--remote-command", f"sh {nodes}/answer", "--deadline", "60", "--json")
    done = hangwatch("dump", "--jobid", job, "--via", "srun", *command)
    told = answer(done)
    assert (told["answered"], told["unanswered"], told["failed"]) == (["n0", "n1", "n2"], [], [])
    (found,) = told["jobs"]  # type: ignore[misc]
    assert "rank 19 (n2" in found["verdict"]["message"]
    assert found["job"]["command"] == LONG
    assert "n1: own words of n1" in done.stderr
    refused("dump", "--jobid", "999999", "--via", "srun", says="squeue")


def test_suspended_job_is_refused_and_named(job: str) -> None:
    ask("scontrol", "suspend", job)
    try:
        refused("dump", "--jobid", job, "--via", "srun", says="Slurm has suspended this job")
    finally:
        ask("scontrol", "resume", job)


def test_a_task_that_hangs_and_one_without_hangwatch(nodes: Path, job: str) -> None:
    remote(
        nodes,
        """node=$SLURMD_NODENAME
case $node in n0) exec /nonexistent/hangwatch;; n1) exec sleep 600;; esac
print""",
    )
    done = hangwatch(
        "dump", "--jobid", job, "--via", "srun", "--remote-command", f"sh {nodes}/answer", "--deadline", "25", "--json"
    )
    told = answer(done)
    assert (told["answered"], told["unanswered"]) == (["n2"], ["n1"])
    assert [failed["nodes"] for failed in told["failed"]] == [["n0"]]  # type: ignore[attr-defined]
    wait_for(lambda: not running(nodes), "an end of the task that hung")


def test_checks_beside_the_job(tmp_path: Path, job: str) -> None:
    keep_check(tmp_path, "n0", answer_of())
    keep_check(tmp_path, "n1", answer_of())
    keep_check(tmp_path, "n2", answer_of(driver="535.1"))
    remote_check(tmp_path, "node=$SLURMD_NODENAME; print")
    how = ("--jobid", job, "--via", "srun", "--deadline", "60")
    done = hangwatch("check", *how, "--remote-command", f"sh {tmp_path}/answer")
    assert "n2: Differs: driver 550.54 on n[0-1], 535.1 on n2" in done.stdout, done.stderr


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_when_we_are_ended_so_is_the_step(ending: signal.Signals, nodes: Path, job: str) -> None:
    remote(nodes, 'echo up >"$folder/up-$SLURMD_NODENAME"; exec sh -c "sleep 600; true" "$folder"')
    wait_for(lambda: len(steps(job).split()) == 1, "an end of the steps before")
    end_while_nodes_answer(nodes, ending, "--jobid", job, "--via", "srun", count=3)
    wait_for(lambda: len(steps(job).split()) == 1, "an end of the step")
