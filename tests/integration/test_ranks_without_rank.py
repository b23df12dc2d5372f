"""Real ranks without the RANK variable: forks of one program, and processes that a program starts itself."""

from __future__ import annotations

from pathlib import Path

from hangwatch.capture.job_scan import JobScan
from hangwatch.model import Job
from tests.conftest import wait_for
from tests.integration import targets
from tests.proc_tree import sweep

FORKS = """
import multiprocessing, os, time
def train(rank):
    os.environ["RANK"] = str(rank)  # as notebook_launcher does: nobody outside sees it
    open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
    time.sleep(600)
for rank in range(2):
    multiprocessing.get_context("fork").Process(target=train, args=(rank,)).start()
ready()
"""
LED = """
import os, subprocess, sys, time
rank = int(os.environ.get("LOCAL_RANK", "0"))
open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
if rank == 0:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", NODE_RANK="0", WORLD_SIZE="3")
    for other in (1, 2):
        subprocess.Popen(sys.orig_argv, env={**os.environ, "LOCAL_RANK": str(other)})
    ready()
time.sleep(600)
"""


def pids(folder: Path, ranks: int) -> list[int]:
    """Wait until each rank has written its pid. Return the pids in rank order."""

    def said() -> list[int]:
        files = [folder / f"pid-{rank}" for rank in range(ranks)]
        return [int(file.read_text()) for file in files if file.exists() and file.read_text()]

    return wait_for(lambda: found if len(found := said()) == ranks else None, f"{ranks} ranks") or []


def job_of(ranks: list[int]) -> Job | None:
    """Return the job of these ranks, or None if a scan does not find it.

    Each rank holds one GPU.
    """
    found = JobScan().find(sweep({gpu: (pid,) for gpu, pid in enumerate(ranks)}), node="here").jobs
    return next((job for job in found if ranks[0] in {rank.id.pid for rank in job.ranks}), None)


def test_forks_are_found_by_the_gpus_that_they_hold(tmp_path: Path) -> None:
    with targets.python(FORKS, tmp_path) as launcher:
        forks = pids(tmp_path, 2)
        job = job_of(forks)
    assert job is not None
    assert (job.launcher, job.launcher_id is not None and job.launcher_id.pid) == ("fork", launcher)
    assert [(rank.local_rank, rank.id.pid, rank.gpu_uuids) for rank in job.ranks] == [
        (number, pid, (f"GPU-a{number}",)) for number, pid in enumerate(forks)
    ]


def test_a_program_that_starts_the_other_ranks_is_the_first_of_them(tmp_path: Path) -> None:
    with targets.python(LED, tmp_path) as first:
        ranks = pids(tmp_path, 3)
        job = job_of(ranks)
    assert job is not None
    assert (job.launcher, job.world_size, job.local_world_size) == ("lightning", 3, 3)
    assert [(rank.rank, rank.id.pid) for rank in job.ranks] == list(enumerate(ranks))
    assert (ranks[0], job.environ["MASTER_PORT"]) == (first, "29517")
