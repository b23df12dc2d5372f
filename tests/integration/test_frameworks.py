"""Real Ray, JAX, DeepSpeed, Lightning and notebooks: each job is found in time, and its planted rank is pointed at.

The extra `test` in pyproject.toml contains Ray and JAX; `make long PART=frameworks` installs `frameworks`.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from hangwatch import config
from hangwatch.capture.job_scan import JobScan
from hangwatch.cli.dump import dump
from hangwatch.jobs.collective_timeout import read_timeouts
from hangwatch.model import Job, Verdict
from hangwatch.verdict import judge as culprit
from tests.conftest import wait_for
from tests.integration import targets
from tests.servers import free_port

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parents[1] / "jobs"
QUICK = config.Capture(rounds=3, pause_seconds=1.0, dump_deadline_seconds=60.0)
FOUND_SECONDS = 30
NOTEBOOK = """
import os, time
from pathlib import Path
from accelerate import notebook_launcher
folder = Path({folder!r})
def wait_for_reward():
    time.sleep(3600)
def train():
    import torch, torch.distributed as dist
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    (folder / f"new-{{rank}}").write_text(str(os.getpid()))
    (folder / f"new-{{rank}}").rename(folder / f"pid-{{rank}}")
    for step in range(1_000_000):
        if (rank, step) == (1, 30):
            wait_for_reward()
        dist.all_reduce(torch.ones(4))
notebook_launcher(train, (), num_processes=3, use_port="{port}")
"""


def needs(module: str) -> pytest.MarkDecorator:
    is_missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(is_missing, reason=f"needs {module}: see pyproject.toml")


@contextlib.contextmanager
def running(folder: Path, *commands: list[str], **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run programs. At the end they and all their descendants are ended by their pids."""
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    own |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environ}
    with (folder / "log").open("wb") as log:
        started = [
            subprocess.Popen(command, env=own, stdout=log, stderr=log, start_new_session=True) for command in commands
        ]
    try:
        yield started[0]
    finally:
        below = [child for each in started for child in psutil.Process(each.pid).children(recursive=True)]
        for process in (*started, *below):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for each in started:
            each.wait()
        psutil.wait_procs(below, timeout=30)


def find(scan: JobScan, pids: dict[int, int], began: float) -> Job:
    """Return the job of these pids, by rank, once a scan shows all of them. Fail after 30 s."""

    def whole() -> Job | None:
        jobs = [job for job in scan.find(None, "here").jobs if {rank.id.pid for rank in job.ranks} & {*pids.values()}]
        return jobs[0] if len(jobs) == 1 and {rank.id.pid for rank in jobs[0].ranks} == {*pids.values()} else None

    job = wait_for(whole, "the job to be found", FOUND_SECONDS)
    assert job is not None and time.monotonic() < began + FOUND_SECONDS
    return job


def wait_for_pids(folder: Path, process: subprocess.Popen[bytes], prefix: str, ranks: int) -> dict[int, int]:
    def written() -> bool:
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        return all((folder / f"{prefix}{rank}").exists() for rank in range(ranks))

    wait_for(written, f"{ranks} ranks", 180)
    return {rank: int((folder / f"{prefix}{rank}").read_text()) for rank in range(ranks)}


def judged(job: Job) -> Verdict:
    verdict = culprit.judge(targets.grouped(job, QUICK, targets.USUAL))
    print(verdict.message)
    return verdict


def pointed_at(job: Job) -> list[int | None]:
    """Return the pids that the verdict names, or else those that it says to check first."""
    verdict = judged(job)
    return [rank.pid for rank in verdict.named or verdict.check_first]


def wait_until_pointed_at(job: Job, pid: int) -> None:
    wait_for(lambda: pointed_at(job) == [pid], f"pid {pid} to be pointed at", 60)


def dump_jobs(*options: str) -> list[dict[str, Any]]:
    """Return each job that `hangwatch dump` shows."""
    jobs: list[dict[str, Any]] = json.loads(CliRunner().invoke(dump, ["--json", *options]).stdout)["jobs"]
    return jobs


def ranks_of_pid(pid: int) -> list[list[int]]:
    """Return the pids of each job that `hangwatch dump --pid` shows for this launcher."""
    groups = (job["groups"] for job in dump_jobs("--pid", str(pid)))
    return [sorted(member["pid"] for group in of_job for member in group["members"]) for of_job in groups]


@needs("ray")
@pytest.mark.parametrize(
    "mode", ["verl", *(pytest.param(mode, marks=pytest.mark.series) for mode in ("train", "environ"))]
)
def test_ray_worker_groups_are_jobs_with_their_ranks(mode: str, tmp_path: Path) -> None:
    temporary = tempfile.mkdtemp(prefix="r")  # its path must be short: Ray's sockets lie below it
    command = [sys.executable, str(PROGRAMS / "ray_groups.py"), mode, str(tmp_path), temporary]
    scan = JobScan()
    try:
        with running(tmp_path, command, RAY_USAGE_STATS_ENABLED="0") as driver:
            actors = wait_for_pids(tmp_path, driver, "pid-Actor-", 3)
            critics = wait_for_pids(tmp_path, driver, "pid-Critic-", 2)
            began = time.monotonic()
            actor, critic = find(scan, actors, began), find(scan, critics, began)
            for job, pids, name in ((actor, actors, "Actor"), (critic, critics, "Critic")):
                assert (job.launcher, job.world_size, job.program) == ("ray", len(pids), name)
                assert [(rank.rank, rank.id.pid) for rank in job.ranks] == sorted(pids.items())
                assert job.job_name in ("", "01000000")  # workers that Ray has started before the job do not know it
            assert actor.key != critic.key
            wait_until_pointed_at(actor, actors[1])
            wait_for(lambda: judged(critic).kind == "NoTask", "Critic to have no task", 60)
            assert sorted(ranks_of_pid(driver.pid)) == sorted(map(sorted, (actors.values(), critics.values())))
            below = {driver.pid, *(child.pid for child in psutil.Process(driver.pid).children(recursive=True))}
            jobs = [job for job in scan.find(None, "here").jobs if below & {process.pid for process in job.processes}]
            assert len(jobs) == 2, "driver, raylet, GCS and idle workers are not jobs"
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@needs("jax")
@pytest.mark.parametrize("processes", [3, pytest.param(5, marks=pytest.mark.series)])
def test_jax_processes_with_their_number_as_an_argument_are_a_job(processes: int, tmp_path: Path) -> None:
    port = str(free_port())
    program = [sys.executable, str(PROGRAMS / "jax_arguments.py"), str(tmp_path)]
    commands = [[*program, str(number), str(processes), port] for number in range(processes)]
    with running(tmp_path, *commands, JAX_PLATFORMS="cpu") as first:
        pids = wait_for_pids(tmp_path, first, "pid-", processes)
        job = find(JobScan(), pids, time.monotonic())
        assert f"pid {pids[0]} is likely rank 0" in job.notes[0]
        assert (job.libraries, read_timeouts(job, job.environ).collective_seconds) == (("jax",), None)
        wait_until_pointed_at(job, pids[1])


@needs("deepspeed")
@pytest.mark.series
def test_deepspeed_launcher_with_zero_2_is_a_job(tmp_path: Path) -> None:
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "3", "--master_port", str(free_port())]
    command = [*launcher, str(PROGRAMS / "deepspeed_zero.py"), str(tmp_path)]
    with running(tmp_path, command, DS_ACCELERATOR="cpu") as runner:
        pids = wait_for_pids(tmp_path, runner, "pid-", 3)
        job = find(JobScan(), pids, time.monotonic())
        assert (job.launcher, job.world_size) == ("deepspeed", 3)
        assert ranks_of_pid(runner.pid) == [sorted(pids.values())]
        assert [(rank.rank, rank.id.pid) for rank in job.ranks] == sorted(pids.items())
        wait_until_pointed_at(job, pids[1])


@needs("lightning")
@pytest.mark.series
def test_lightning_that_starts_its_ranks_itself_is_a_job(tmp_path: Path) -> None:
    with running(tmp_path, [sys.executable, str(PROGRAMS / "lightning_ddp.py"), str(tmp_path)]) as first:
        pids = wait_for_pids(tmp_path, first, "pid-", 3)
        job = find(JobScan(), pids, time.monotonic())
        assert (job.launcher, job.world_size, pids[0]) == ("lightning", 3, first.pid)

        def named() -> list[int]:  # in DDP the others are in backward(), so only the flight recorder shows the late one
            return [rank["pid"] for one in dump_jobs("--job", job.job_id) for rank in one["verdict"]["named"]]

        wait_for(lambda: named() == [pids[1]], "rank 1 to be named", 60)
        assert ranks_of_pid(first.pid) == [sorted(pids.values())]


@needs("ipykernel")
@needs("accelerate")
def test_notebook_launcher_in_a_real_kernel_is_a_job(tmp_path: Path) -> None:
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    kernel = psutil.Process(manager.provisioner.pid)
    try:
        client.start_channels()
        client.wait_for_ready(timeout=120)
        client.execute(NOTEBOOK.format(folder=str(tmp_path), port=free_port()))
        wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 3, "three ranks", 180)
        pids = {rank: int((tmp_path / f"pid-{rank}").read_text()) for rank in range(3)}
        job = find(JobScan(), pids, time.monotonic())
        assert (job.launcher, job.world_size) == ("torchrun", 3)  # notebook_launcher runs its agent in the kernel
        assert [(rank.rank, rank.id.pid) for rank in job.ranks] == sorted(pids.items())
        wait_until_pointed_at(job, pids[1])
    finally:
        below = kernel.children(recursive=True)
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=30)
