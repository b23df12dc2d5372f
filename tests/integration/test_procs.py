"""The data that a scan keeps of real processes: after execve(2), with titles, at their end, of other users."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hangwatch.model import Process
from hangwatch.probes.base import procfs
from hangwatch.probes.process.process_scan import ProcessScan
from tests.commands import spawn
from tests.conftest import wait_for
from tests.integration import targets
from tests.proc_tree import lay_out


def look(scan: ProcessScan, pid: int) -> Process:
    (found,) = (process for process in scan.processes() if process.id.pid == pid)
    return found


def test_a_process_that_executes_another_program_is_read_again(tmp_path: Path) -> None:
    again = f"import os, sys\nready()\nopen({str(tmp_path / 'fifo')!r}).read()\n"
    again += "os.environ['RANK'] = '5'\nos.execv(sys.executable, ['python', '-c', 'import time; time.sleep(600)'])"
    scan = ProcessScan()
    with targets.python(again, tmp_path, RANK="4") as pid:
        before = look(scan, pid)
        assert before.environ["RANK"] == "4"
        (tmp_path / "fifo").write_text("go")
        wait_for(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"python\0"), "the second program")
        after = look(scan, pid)
    assert (after.id, after.environ["RANK"], after.cmdline[0]) == (before.id, "5", "python")


def test_a_title_over_the_environment_does_not_take_the_rank_away(tmp_path: Path) -> None:
    """Set the title as setproctitle does: it changes the comm and overwrites the environment."""
    title = """
import ctypes
libc = ctypes.CDLL(None)
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
start, end = int(fields[47]), int(fields[48])
libc.prctl(15, b"trainer", 0, 0, 0)
ctypes.memset(start, 0, end - start)
ready()
open(folder + "/fifo").read()
"""
    scan = ProcessScan()
    first = "ready()\nimport os\nopen(folder + '/fifo').read()\nos.unlink(folder + '/ready')\n"
    with targets.python(first + title, tmp_path, RANK="4") as pid:
        assert look(scan, pid).environ["RANK"] == "4"
        (tmp_path / "ready").unlink()
        (tmp_path / "ready").touch()
        (tmp_path / "fifo").write_text("go")
        wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "trainer\n", "the title")
        wait_for((tmp_path / "ready").exists, "the overwritten environment")
        seen = look(scan, pid)
        assert b"RANK" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert (seen.comm, seen.environ["RANK"]) == ("trainer", "4")


def test_a_zombie_keeps_what_was_known_of_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"RANK": "3"})
    scan = ProcessScan()
    wait_for(lambda: look(scan, child.pid).environ.get("RANK"), "the environment")
    child.stdin.close()
    targets.wait_for_state(child.pid, "Z")
    zombie = look(scan, child.pid)
    child.wait()
    assert (zombie.state, zombie.environ) == ("Z", {"RANK": "3"})
    assert child.pid not in {process.id.pid for process in scan.processes()}


def test_process_whose_main_thread_has_ended_is_not_gone(tmp_path: Path) -> None:
    code = "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    with targets.python(code + "ready()\nctypes.CDLL(None).pthread_exit(None)", tmp_path, RANK="4") as pid:
        wait_for(lambda: ") Z " in Path(f"/proc/{pid}/stat").read_text(), "the main thread to end")
        found = look(ProcessScan(), pid)
        (rank,) = targets.taken(targets.job_of([pid])).ranks
    assert (found.state, found.environ["RANK"]) == ("S", "4")
    assert not rank.gone and [dump.fault.reason for dump in rank.rounds if dump.fault] == ["MainThreadEnded"] * 2


def test_states_and_parents_are_read_at_every_scan(tmp_path: Path) -> None:
    scan = ProcessScan()
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        targets.wait_for_state(pid, "S")
        assert (look(scan, pid).state, look(scan, pid).parent_pid) == ("S", os.getpid())
        targets.stop(pid)
        assert look(scan, pid).state == "T"


def test_only_what_may_belong_to_a_job_is_read(tmp_path: Path) -> None:
    tree = "1 (init) S parent=0 start=1\n + RANK=1\n7 (trainer) S parent=1 start=9\n $ ./trainer\n + RANK=3 SECRET=x\n"
    lay_out(tree + "8 (helper) S parent=7 start=9\n + RANK=4\n", tmp_path)
    read = [{one.id.pid: one.environ for one in ProcessScan(tmp_path).processes(held)} for held in ((), (7,))]
    assert read == [{1: {}, 7: {}, 8: {}}, {1: {}, 7: {"RANK": "3"}, 8: {"RANK": "4"}}]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: becomes another user")
def test_an_environment_that_may_not_be_read_is_a_fault_with_the_remedy(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path, RANK="3") as pid:
        permitted = look(ProcessScan(), pid)
        (found,) = (one for one in _scan_as_nobody() if one.id.pid == pid)
    assert (permitted.environ["RANK"], permitted.faults) == ("3", ())
    assert [fault.reason for fault in found.faults] == ["PermissionDenied"]
    (fault,) = found.faults
    assert (found.environ, found.cmdline, fault.subject) == ({}, permitted.cmdline, f"pid {pid}")
    assert "CAP_SYS_PTRACE" in fault.remedy and "environ" in fault.detail


def _scan_as_nobody() -> tuple[Process, ...]:
    """Scan as user `nobody` in a fork, which needs no Python or module that this user cannot read."""
    ProcessScan().processes()  # imports all modules
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(msgspec.json.encode(ProcessScan().processes()))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return msgspec.json.decode(text, type=tuple[Process, ...])


def test_counters_grow_with_use_and_tell_where_a_process_waits(tmp_path: Path) -> None:
    with targets.python(targets.SPINNING, tmp_path) as pid:
        first = procfs.read_counters(pid)
        wait_for(lambda: (procfs.read_counters(pid).cpu_seconds or 0) > (first.cpu_seconds or 0) + 0.05, "CPU time")
    code = "ready()\nopen('/dev/zero', 'rb').read(1 << 20)\nopen(folder + '/fifo').read()"
    with targets.python(code, tmp_path) as pid:
        wait_for(lambda: (procfs.read_counters(pid).io_bytes or 0) > 1 << 20, "I/O")
        waiting = wait_for(lambda: (c := procfs.read_counters(pid)).state == "S" and c.wchan and c, "a wait")
        assert any(word in (waiting.wchan or "") for word in ("fifo", "partner")), waiting.wchan
        if os.geteuid() == 0:
            assert any("fifo_open" in line or "wait_for_partner" in line for line in waiting.kernel_stack)
    assert procfs.read_counters(pid) == procfs.Counters()


def _cpu_seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def test_a_scan_of_2000_processes_costs_little_more_than_reading_their_stat_files() -> None:
    """In turns: on a busy machine both cost twice as much."""
    with contextlib.ExitStack() as kept:
        children = [kept.enter_context(spawn("sleep", 600, stdin=None, stdout=None)) for _ in range(2000)]
        scan = ProcessScan()
        pids = [process.id.pid for process in scan.processes()]
        assert len(pids) >= 2000
        stat = [Path(f"/proc/{child.pid}/stat") for child in children]
        turns = [
            (_cpu_seconds(scan.processes), _cpu_seconds(lambda: [each.read_bytes() for each in stat])) for _ in range(5)
        ]
    scanned, read = (min(column) for column in zip(*turns, strict=True))
    print(f"{len(pids)} processes, {1000 * scanned:.1f} ms of CPU per scan, {1000 * read:.1f} ms for {len(stat)} files")
    assert scanned / len(pids) < 3 * read / len(stat)  # measured: 1.0 to 1.3
