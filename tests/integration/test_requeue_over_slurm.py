"""deploy/hooks/requeue-slurm.sh on a real Slurm of three nodes: a hung job starts once more, on another node."""

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import config, hooks
from hangwatch.model import JobState
from hangwatch.model.verdicts import ActionKind, RecommendedAction
from tests import samples
from tests.commands import finished
from tests.conftest import wait_for
from tests.slurm_nodes import ask, idle_slurm, needs_slurm

pytestmark = needs_slurm
SCRIPT = Path(__file__).parents[2] / "deploy" / "hooks" / "requeue-slurm.sh"


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with idle_slurm(tmp_path_factory.mktemp("slurm") / "d") as conf:
        yield conf


@pytest.fixture
def claims(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "requeued").mkdir()
    yield tmp_path / "requeued"
    subprocess.run(["scancel", "--user=root"], check=True, timeout=30)
    wait_for(lambda: not ask("squeue", "--noheader"), "an end of all jobs")


def submit(*options: str) -> str:
    """Submit a job that sleeps and wait until it runs. Return its number."""
    command = ["sbatch", "--parsable", "--requeue", "--output=/dev/null", *options, "--wrap", "sleep 600"]
    done = finished(*command, check=True)
    number = done.stdout.strip()
    wait_for(lambda: "RUNNING" in shown(number, "%T"), "the job to run")
    return number


def shown(job: str, fields: str) -> str:
    """Return what Slurm shows of a job, or of each task of an array."""
    return ask("squeue", "--noheader", f"--jobs={job}", f"--format={fields}")


def restarts(job: str) -> str:
    return ask("squeue", "--noheader", f"--jobs={job}", "--Format=RestartCnt:5")


def hang(
    job: str, claims: Path, *arguments: str, action: ActionKind = "restart", exclude: tuple[str, ...] = ()
) -> tuple[str, str]:
    """Run the hook as a daemon does for a job that hangs. Return its outcome and output."""
    sample = samples.mismatch()
    verdict = replace(sample.verdict, action=RecommendedAction(kind=action, exclude_nodes=exclude))
    incident = replace(sample, job=replace(sample.job, owner=f"Slurm job {job}"), verdict=verdict)
    settings = config.Hooks(on_hung=(str(SCRIPT), str(claims), *arguments))
    call = hooks.due_hook(settings, incident, JobState.HUNG, None)
    done = hooks.run(call._replace(environ={**call.environ, "SLURM_CONF": os.environ["SLURM_CONF"]}), 60.0)
    return done.outcome, done.output.decode()


def start_now(job: str) -> None:
    """Start a requeued job without its pause of two minutes."""
    wait_for(lambda: shown(job, "%T") == "PENDING", "the job to wait")
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True, timeout=30)
    wait_for(lambda: shown(job, "%T") == "RUNNING", "the job to run again")


def test_hung_job_is_requeued_once_without_the_faulty_node(claims: Path) -> None:
    job = submit("-N1", "--exclude=n2")
    node = shown(job, "%N")
    with ThreadPoolExecutor(4) as nodes:
        calls = [nodes.submit(hang, job, claims, action="restart_elsewhere", exclude=(node,)) for _ in range(4)]
        results = [call.result() for call in calls]
    assert {outcome for outcome, _ in results} == {"ok"}, results
    assert [f"requeued job {job} without {node}\n" in output for _, output in results].count(True) == 1, results
    assert restarts(job) == "1"
    start_now(job)
    assert {node, "n2", shown(job, "%N")} == {"n0", "n1", "n2"}, "it starts on the only node that is not excluded"
    assert hang(job, claims) == ("ok", f"job {job} is not requeued again: limit 1\n")
    assert (shown(job, "%T"), restarts(job)) == ("RUNNING", "1")
    assert hang(job, claims, "recommended", "2") == ("ok", f"requeued job {job}\n"), "a site may allow a second requeue"


def test_task_with_the_number_of_its_array_is_requeued_alone(claims: Path) -> None:
    array = submit("-N1", "--array=1-3")
    wait_for(lambda: shown(array, "%T").split() == ["RUNNING"] * 3, "all tasks to run")
    assert "requeued" in hang(array, claims)[1]
    assert sorted(restarts(array).split()) == ["0", "0", "1"]


@pytest.mark.parametrize("options", [("-N3",), ("-N1", "--nodelist=n1")])
def test_job_that_needs_the_faulty_node_does_not_wait_for_ever(claims: Path, options: tuple[str, ...]) -> None:
    job = submit(*options)
    outcome, output = hang(job, claims, action="restart_elsewhere", exclude=("n1",))
    assert outcome == "ok" and "cannot run without n1" in output and f"requeued job {job}\n" in output
    assert shown(job, "%x") == ""
    start_now(job)


def test_exclusion_that_slurm_refuses_leaves_no_held_job(claims: Path) -> None:
    job = submit("-N1")
    outcome, output = hang(job, claims, action="restart_elsewhere", exclude=("nosuch",))
    assert outcome == "failed" and "may start there again" in output
    start_now(job)


@pytest.mark.parametrize("action", ["wait", "fix_storage", "fix_program", "investigate"])
def test_job_without_a_recommended_restart_continues(claims: Path, action: ActionKind) -> None:
    job = submit("-N1")
    assert hang(job, claims, action=action) == (
        "ok",
        f"the recommended action is {action}: job {job} is not requeued\n",
    )
    assert (shown(job, "%T"), list(claims.iterdir())) == ("RUNNING", [])
    requeued = "requeued job" in hang(job, claims, "any", action=action)[1]
    assert requeued is (action != "wait"), "a site may requeue any job that hangs, but none that progresses"


def test_limit_of_a_day_counts_all_jobs(claims: Path) -> None:
    first, second = submit("-N1"), submit("-N1")
    limits = ("recommended", "1", "1")
    assert hang(first, claims, *limits)[0] == "ok"
    assert hang(second, claims, *limits) == ("failed", f"job {second} is not requeued: limit 1 a day\n")
    assert shown(second, "%T") == "RUNNING"
    yesterday = time.strftime("%Y-%m-%d", time.gmtime(time.time() - 86400))
    (day,) = claims.glob("day-*")
    day.rename(claims / f"day-{yesterday}.1")
    assert hang(second, claims, *limits)[0] == "ok"
