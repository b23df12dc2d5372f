"""Real ranks of torch.distributed whose store nobody serves: the kernel shows that each attempt is refused."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hangwatch import config
from hangwatch.hang import activity, culprit
from hangwatch.hang.capture import capture
from hangwatch.hang.grouping import group_ranks
from hangwatch.hang.jobs import find_jobs
from hangwatch.model import Verdict
from hangwatch.probes.procs import ProcessScan
from tests.conftest import wait_for

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

QUICK = config.Capture(rounds=3, pause_seconds=0.2)
JOINS = """
import datetime, torch.distributed
torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
"""
READS = """
import sys
def read_manifest():
    sys.stdin.read()
read_manifest()
"""


@contextlib.contextmanager
def ranks(*programs: str, world_size: int) -> Iterator[set[int]]:
    """Ranks from the last on, each with its program, at a port of this machine where nobody listens."""
    with socket.socket() as kept:  # bound and not listening: nobody else gets the port
        kept.bind(("127.0.0.1", 0))
        environ = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(kept.getsockname()[1]),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(len(programs)),
            "OMP_NUM_THREADS": "1",
        }
        started = []
        try:
            for place, program in enumerate(programs):
                rank = {"RANK": str(world_size - len(programs) + place), "LOCAL_RANK": str(place)}
                command = [sys.executable, "-c", program]
                started.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environ | rank))
            yield {child.pid for child in started}
        finally:
            for child in started:
                child.kill()
                child.wait()
                child.stdin.close()  # type: ignore[union-attr]


def judged(pids: set[int]) -> Verdict | None:
    """The verdict, once it is of a refusal."""
    jobs = [job for job in find_jobs(ProcessScan().processes(pids)) if pids <= {rank.id.pid for rank in job.ranks}]
    if not jobs:
        return None
    taken = capture(jobs[0], settings=QUICK, node="here")
    verdict = culprit.judge(group_ranks(taken, activity.load(), QUICK), jobs[0].ranks_here)
    return verdict if verdict.kind == "MasterRefused" else None


def test_rank_0_that_reads_while_the_others_are_refused() -> None:
    with ranks(READS, JOINS, world_size=2) as pids:
        verdict = wait_for(lambda: judged(pids), "the other rank to be refused", 200)
    assert [rank.rank for rank in verdict.named] == [0]
    assert "does not listen at MASTER_ADDR:MASTER_PORT (127.0.0.1:" in verdict.message
    assert "read_manifest" in verdict.message


def test_ranks_that_are_refused_by_another_node() -> None:
    with ranks(JOINS, world_size=2) as pids:
        verdict = wait_for(lambda: judged(pids), "the rank to be refused", 200)
    assert verdict.named == ()
    assert "Rank 0, which is to serve it, is not in view: look at its node first." in verdict.message
