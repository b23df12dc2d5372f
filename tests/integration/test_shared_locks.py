"""Real semaphores of multiprocessing.

A rank that waits for a semaphore of another rank is not the late rank.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.capture.request import CaptureRequest
from hangwatch.capture.rounds import capture, job_of_pids
from hangwatch.model import Group
from hangwatch.probes.process import procfs, shared_locks
from hangwatch.stacks.activity import Table
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict.wording import clauses
from tests.commands import first_line, spawn
from tests.conftest import wait_for
from tests.integration import targets

SETTINGS = config.Capture(rounds=2, pause_seconds=0.1, dump_deadline_seconds=60.0)
# Each rank opens the semaphore by its name, as ranks of a torchrun job must.
OPENS = """
import _multiprocessing, os, sys
def the_lock(name, is_mine):
    return _multiprocessing.SemLock(1, 1, 1, name, False) if is_mine else _multiprocessing.SemLock._rebuild(0, 1, 1, name)
"""
HOLDS = (
    OPENS
    + """
lock = the_lock(sys.argv[1], True)
lock.acquire()
print("held", flush=True)
sys.stdin.read()
_multiprocessing.sem_unlink(sys.argv[1])
"""
)
WAITS = OPENS + "lock = the_lock({name!r}, False)\nready()\nlock.acquire()"
OF_A_THREAD = "import threading\nlock = threading.Lock()\nlock.acquire()\nready()\nlock.acquire()"
OF_ITS_CHILD = """
import multiprocessing, os
lock = multiprocessing.get_context("fork").Lock()
lock.acquire()
if not os.fork():
    import time
    time.sleep(600)
ready()
lock.acquire()
"""


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"/hangwatch-{abs(hash(request.node.nodeid)) % 10**9}"


@contextlib.contextmanager
def held(name: str) -> Iterator[int]:
    """Start a process that holds the semaphore `name`. Yield its pid."""
    with spawn(sys.executable, "-c", HOLDS, name) as holder:
        assert first_line(holder) == "held"
        yield holder.pid


def seen(*pids: int) -> Group:
    """Capture these ranks. Return the group of the last rank, which waits in futex(2)."""
    wait_for(lambda: targets.futex_call(pids[-1]), "the wait for the lock")
    groups = group_ranks(
        capture(job_of_pids(pids), CaptureRequest(settings=SETTINGS, node="here")), Table(()), SETTINGS
    ).groups
    return next(group for group in groups if any(member.id.pid == pids[-1] for member in group.members))


def test_rank_waiting_for_a_shared_semaphore_waits_for_a_lock(name: str, tmp_path: Path) -> None:
    with held(name) as holder, targets.python(WAITS.format(name=name), tmp_path) as pid:
        group = seen(holder, pid)
        alone = seen(pid)
    assert [member.waits.shares_lock for member in group.members] == [True]
    assert group.waits_for == "lock", "by measurement: the table is empty"
    assert clauses.describe_activity(group) == "waits for a lock in memory shared with another rank"
    assert [member.waits.shares_lock for member in alone.members] == [False], "no other process of its job has it"


@pytest.mark.parametrize("code", [OF_A_THREAD, OF_ITS_CHILD], ids=["of a thread", "of a child that is not a rank"])
def test_a_lock_of_its_own_is_not_shared(code: str, name: str, tmp_path: Path) -> None:
    with held(name) as other, targets.python(code, tmp_path) as pid:
        group = seen(other, pid)
    assert not any(member.waits.shares_lock for member in group.members)


def test_of_a_process_that_is_gone_nothing_is_said() -> None:
    assert shared_locks.awaited_address(1 << 22, procfs.PROC) is None
    assert shared_locks.regions(1 << 22, procfs.PROC) == {}
