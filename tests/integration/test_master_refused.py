"""Real ranks that cannot connect to their store, as the kernel shows it.

The store does not listen, or only its own node can reach it.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hangwatch import config
from hangwatch.capture.request import CaptureRequest
from hangwatch.capture.rounds import capture
from hangwatch.jobs import discovery
from hangwatch.model import Grouping, Verdict
from hangwatch.probes.network import sockets
from hangwatch.probes.process import procfs
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict import judge
from tests.conftest import wait_for

pytestmark = pytest.mark.timeout(400)

QUICK = config.Capture(rounds=3, pause_seconds=0.2, dump_deadline_seconds=60.0)
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


LISTENS = """
import socket, sys
listening = socket.create_server(({address!r}, 0))
sys.stdin.read()
"""
CONNECTS = """
import os, socket, sys
ours = socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])))
sys.stdin.read()
"""


@contextlib.contextmanager
def ranks(*programs: str, world_size: int, master: str = "127.0.0.1", is_served: bool = False) -> Iterator[set[int]]:
    """Start the last ranks of a job, one for each program. Yield their pids.

    The test reserves the port of their master, and listens on it only if `is_served`.
    """
    with socket.socket() as kept:  # bound and not listening: no other process gets the port
        kept.bind(("", 0))
        if is_served:
            kept.listen()
        environ = {
            **os.environ,
            "MASTER_ADDR": master,
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


def looked_at(pids: set[int]) -> tuple[Grouping, int] | None:
    """Return the grouping of the job's ranks, and the number of ranks on this node.

    Return None until the job is found.
    """
    jobs = [
        job
        for job in discovery.find_jobs(ProcessScan().processes(pids)).jobs
        if pids <= {rank.id.pid for rank in job.ranks}
    ]
    if not jobs:
        return None
    taken = capture(jobs[0], CaptureRequest(settings=QUICK, node="here"))
    return group_ranks(taken, activity.load(), QUICK), jobs[0].ranks_here


def judged(pids: set[int]) -> Verdict | None:
    """Return the verdict on the job if it reports a refused connection, else None."""
    found = looked_at(pids)
    verdict = judge.judge(*found) if found else None
    return verdict if verdict is not None and verdict.kind == "MasterRefused" else None


@pytest.mark.torch
def test_rank_0_that_reads_while_the_others_are_refused() -> None:
    with ranks(READS, JOINS, world_size=2) as pids:
        verdict = wait_for(lambda: judged(pids), "the other rank to be refused", 200)
    assert [rank.rank for rank in verdict.named] == [0]
    assert "does not listen at MASTER_ADDR:MASTER_PORT (127.0.0.1:" in verdict.message
    assert "read_manifest" in verdict.message


@pytest.mark.torch
def test_ranks_that_are_refused_by_another_node() -> None:
    with ranks(JOINS, world_size=2, master=socket.gethostname()) as pids:  # a name with the address of this machine
        verdict = wait_for(lambda: judged(pids), "the rank to be refused", 200)
    assert verdict.named == ()
    assert "Rank 0 should serve that address, but was not captured: check its node first." in verdict.message


@pytest.mark.parametrize(
    ("address", "world_size", "expected"),
    [
        ("127.0.1.1", 3, "127.0.1.1 port "),
        ("127.0.1.1", 2, None),  # all ranks of the job are on this node
        ("0.0.0.0", 3, None),
    ],
)
def test_ranks_that_wait_at_an_address_of_this_node_alone(address: str, world_size: int, expected: str | None) -> None:
    program = LISTENS.format(address=address)
    with ranks(program, program, world_size=world_size, master="192.0.2.1") as pids:

        def places() -> list[str | None] | None:
            found = looked_at(pids)
            members = found[0].members if found else ()
            return [member.waits.enclosed_at for member in members] or None

        wait_for(lambda: all(map(_listens, pids)), "both to listen")
        found = wait_for(places, "both to be seen")
    assert [place and place.rstrip("0123456789") for place in found] == [expected] * 2


@pytest.mark.parametrize(
    ("program", "expected"),
    [(CONNECTS, "the store at 127.0.0.1"), (READS, None)],  # a variable alone is not evidence
)
def test_a_store_at_loopback_of_a_job_with_ranks_elsewhere(program: str, expected: str | None) -> None:
    with ranks(program, world_size=2, is_served=True) as pids:
        if expected:
            wait_for(lambda: all(map(_is_connected, pids)), "it to connect")
        found = wait_for(lambda: looked_at(pids), "the rank to be seen")
    (member,) = found[0].members
    assert (member.waits.enclosed_at and member.waits.enclosed_at[:22]) == expected


def _sockets(pid: int) -> list[sockets.Connection]:
    table, held = sockets.read(pid, procfs.PROC) or {}, sockets.sockets_of_process(pid, procfs.PROC) or {}
    return [table[inode] for inode in held.values() if inode in table]


def _listens(pid: int) -> bool:
    return any(one.listens for one in _sockets(pid))


def _is_connected(pid: int) -> bool:
    return any(one.is_open for one in _sockets(pid))
