"""Real file locks and semaphores: the file for which a process waits, and the holder by the kernel's list."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import config
from hangwatch.model import FileLock, Group
from hangwatch.probes.base import procfs
from hangwatch.probes.process import shared_locks
from hangwatch.stacks import activity
from hangwatch.verdict.wording import clauses
from tests.commands import first_line, spawn
from tests.conftest import wait_for
from tests.integration import targets

WAITS = "import fcntl\nlock = open(folder + '/the.lock', 'r+')\nready()\n{how}"
HOLDS = """
import fcntl, os, sys
lock = open(sys.argv[1], "r+")
{how}
if {is_left} and os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""
FLOCK, LOCKF = "fcntl.flock(lock, fcntl.LOCK_EX)", "fcntl.lockf(lock, fcntl.LOCK_EX)"


@contextlib.contextmanager
def held(path: Path, how: str, *, is_left: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Hold the lock of this file. Yield the process that took it; if `is_left`, only its child still holds it."""
    path.touch()
    program = HOLDS.format(how=how, is_left=is_left)
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline().strip().isdecimal()
        if is_left:
            holder.wait(60)
        try:
            yield holder
        finally:
            holder.stdin.close()  # its child ends with its standard input


def seen(pid: int) -> Group:
    targets.wait_for_call(pid, "locks")
    (group,) = targets.grouped(targets.job_of([pid])).groups
    return group


@pytest.mark.parametrize("how", [FLOCK, LOCKF], ids=["flock", "fcntl"])
def test_rank_waiting_for_a_file_lock_has_its_file_and_holder(how: str, tmp_path: Path) -> None:
    path = tmp_path / "the.lock"
    with held(path, how) as holder, targets.python(WAITS.format(how=how), tmp_path) as pid:
        group = seen(pid)
    (member,) = group.members
    assert member.waits.file_lock is not None and member.waits.file_lock.holder_comm
    comm = member.waits.file_lock.holder_comm
    assert member.waits.file_lock == FileLock(str(path), holder_pid=holder.pid, holder_comm=comm)
    assert clauses.describe_activity(group) == f"waits for the lock of {path} (held by pid {holder.pid}, {comm})"
    assert group.waits_for == "lock", "by measurement: the table is empty"


def test_a_holder_that_ended_and_left_the_lock_to_its_child_is_not_made_up(tmp_path: Path) -> None:
    with held(tmp_path / "the.lock", FLOCK, is_left=True), targets.python(WAITS.format(how=FLOCK), tmp_path) as pid:
        group = seen(pid)
    (member,) = group.members
    assert member.waits.file_lock == FileLock(str(tmp_path / "the.lock"))  # in any pid namespace
    assert "it has ended and a child inherited the lock" in clauses.describe_activity(group)


def test_sleeping_rank_waits_for_no_file_lock(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        (group,) = targets.grouped(targets.job_of([pid])).groups
    assert [member.waits.file_lock for member in group.members] == [None]


def test_a_name_that_escapes_is_spelt_out(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[2Jb"
    folder.mkdir()
    with held(folder / "the.lock", FLOCK), targets.python(WAITS.format(how=FLOCK), folder) as pid:
        group = seen(pid)
    assert "\\x1b" in clauses.describe_activity(group) and os.sep in clauses.describe_activity(group)
    assert clauses.describe_activity(group).isprintable()


POLLS = """
import fcntl, os, time
lock = open(os.environ["LOCK"], "r+")
def acquire_cache():
    ready()
    while True:
        try:
            {tries}
        except BlockingIOError:
            time.sleep(0.2)
acquire_cache()
"""
TRIES = POLLS.format(tries="fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)")
REOPENS = POLLS.format(
    tries="lock.close() or fcntl.flock(open(os.environ['LOCK'], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
)
KEEPS = """
import fcntl, os
lock = open(os.environ["LOCK"], "r+")
fcntl.flock(lock, fcntl.LOCK_EX)
def fill_cache():
    ready()
    open(folder + "/fifo").read()
fill_cache()
"""
TABLE = activity.load((config.ActivityRule(activity="lock_file", function="acquire_cache"),))


@pytest.mark.parametrize(
    ("tries", "table", "is_open"),
    [(TRIES, TABLE, True), (TRIES, activity.load(), True), (REOPENS, TABLE, False)],
    ids=["keeps it open", "in an unknown function", "opens it again"],
)
def test_holder_of_lock_file_is_known_if_the_pollers_have_it_open(
    tries: str, table: activity.Table, is_open: bool, tmp_path: Path
) -> None:
    """Rank 0 holds the lock and is blocked; the others try to take it again and again."""
    lock = tmp_path / "the.lock"
    lock.touch()
    with targets.started(tmp_path, KEEPS, tries, tries, tries, LOCK=str(lock)) as pids:
        settings = replace(targets.QUICK, rounds=3, pause_seconds=0.5)
        look = targets.diagnosed(targets.job_of(pids), settings, table)
    held = {member.id.pid: member.waits.file_lock for member in look.grouping.members}
    holders = [lock and lock.holder_pid for lock in map(held.get, pids[1:])]
    assert holders == ([pids[0]] * 3 if is_open else [None] * 3)
    assert held[pids[0]] is None
    if is_open:
        pointed = [rank.pid for rank in (*look.verdict.named, *look.verdict.check_first)]
        assert pointed == [pids[0]], look.verdict.message
        assert str(lock) in look.verdict.message


# Each rank opens the semaphore by its name, as ranks of a torchrun job must.
OPENS = """
import _multiprocessing, os, sys
def the_lock(name, is_mine):
    return _multiprocessing.SemLock(1, 1, 1, name, False) if is_mine else _multiprocessing.SemLock._rebuild(0, 1, 1, name)
"""
HOLDS_SEMAPHORE = (
    OPENS
    + """
lock = the_lock(sys.argv[1], True)
lock.acquire()
print("held", flush=True)
sys.stdin.read()
_multiprocessing.sem_unlink(sys.argv[1])
"""
)
AWAITS_SEMAPHORE = OPENS + "lock = the_lock({name!r}, False)\nready()\nlock.acquire()"
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
def held_semaphore(name: str) -> Iterator[int]:
    """Start a process that holds the semaphore `name`. Yield its pid."""
    with spawn(sys.executable, "-c", HOLDS_SEMAPHORE, name) as holder:
        assert first_line(holder) == "held"
        yield holder.pid


def seen_at_semaphore(*pids: int) -> Group:
    """Capture these ranks. Return the group of the last rank, which waits in futex(2)."""
    wait_for(lambda: targets.futex_call(pids[-1]), "the wait for the lock")
    groups = targets.grouped(targets.job_of_pids(pids)).groups
    return next(group for group in groups if any(member.id.pid == pids[-1] for member in group.members))


def test_rank_waiting_for_a_shared_semaphore_waits_for_a_lock(name: str, tmp_path: Path) -> None:
    with held_semaphore(name) as holder, targets.python(AWAITS_SEMAPHORE.format(name=name), tmp_path) as pid:
        group = seen_at_semaphore(holder, pid)
        alone = seen_at_semaphore(pid)
    assert [member.waits.shares_lock for member in group.members] == [True]
    assert group.waits_for == "lock", "by measurement: the table is empty"
    assert clauses.describe_activity(group) == "waits for a lock in memory shared with another rank"
    assert [member.waits.shares_lock for member in alone.members] == [False], "no other process of its job has it"


@pytest.mark.parametrize("code", [OF_A_THREAD, OF_ITS_CHILD], ids=["of a thread", "of a child that is not a rank"])
def test_a_lock_of_its_own_is_not_shared(code: str, name: str, tmp_path: Path) -> None:
    with held_semaphore(name) as other, targets.python(code, tmp_path) as pid:
        group = seen_at_semaphore(other, pid)
    assert not any(member.waits.shares_lock for member in group.members)


def test_of_a_process_that_is_gone_nothing_is_said() -> None:
    assert shared_locks.awaited_address(1 << 22, procfs.PROC) is None
    assert shared_locks.regions(1 << 22, procfs.PROC) == {}
