"""Processes with memory that their user has locked forever. They must not block a reader of environments."""

import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hangwatch.model import Fault, Process
from hangwatch.probes.base import procfs
from hangwatch.probes.process import locked_memory, proc_pid
from hangwatch.probes.process.process_scan import ProcessScan
from tests.conftest import identity, wait_for
from tests.fake_driver import FakeDriver
from tests.integration import targets
from tests.locked_memory_processes import locked
from tests.real_daemon import RealDaemon
from tests.simulated.node import SimulatedNode

NOBODY = 65534


def scanned(scan: ProcessScan) -> dict[int, Process]:
    """Return the processes by pid. A scan that overruns its deadline is abandoned."""
    found: list[tuple[Process, ...]] = []
    thread = threading.Thread(target=lambda: found.append(scan.processes()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "the scan overran"
    return {process.id.pid: process for process in found[0]}


def reading_threads() -> set[threading.Thread]:
    """Return the threads that read the memory of processes at present."""
    return {thread for thread in threading.enumerate() if thread.name == "memory"}


def test_a_scan_goes_on_and_leaves_a_bounded_number_of_threads_behind(tmp_path: Path) -> None:
    scan = ProcessScan()
    with targets.python(targets.SLEEPING, tmp_path, RANK="3") as rank, locked(tmp_path, NOBODY, 6) as pids:
        found: dict[int, Process] = {}

        def is_read() -> bool:
            found.update(scanned(scan))
            faults = [fault.reason for pid in pids for fault in found[pid].faults]
            return found[rank].environ.get("RANK") == "3" and faults == ["NoAnswer"] * locked_memory.MOST_OF_ONE_OWNER

        # On a busy machine the deadline of a scan may pass before all processes are read. The next scan continues.
        wait_for(is_read, "the rank without a locked memory")
        assert {found[pid].uid for pid in pids} == {NOBODY}
        assert scan.unread[f"uid {NOBODY}"] >= len(pids)  # this user may run other processes, too
        wait_for(lambda: len(reading_threads()) == locked_memory.MOST_OF_ONE_OWNER, "the thread that read all others")
        waiting = reading_threads()
        scanned(scan)
        wait_for(
            lambda: reading_threads() == waiting, "the same threads: a process that did not respond is not read again"
        )
    wait_for(lambda: not reading_threads(), "the threads to return")


def test_a_process_that_lets_go_is_read(tmp_path: Path) -> None:
    reads = locked_memory.Readers(deadline_seconds=0.02)
    target = locked_memory.Target(identity(1), "root")
    free = threading.Event()
    first = reads.read_one(target, lambda _: free.wait(20))
    again = reads.read_one(target, lambda _: "asked again")
    free.set()
    wait_for(lambda: not reading_threads(), "the thread to come back")
    assert [type(first), type(again), reads.read_one(target, lambda _: "read")] == [Fault, Fault, "read"]


def test_gpu_process_is_read_although_blocked_threads_are_at_the_limit() -> None:
    """The blocked threads read processes of many uids, which may all belong to one person."""
    reads = locked_memory.Readers(deadline_seconds=0.02)
    free = threading.Event()
    me = identity(1)
    strangers = [
        locked_memory.Target(procfs.ProcessId(pid=pid, start_ticks=0), f"uid {pid // 4}")
        for pid in range(locked_memory.MOST)
    ]
    reads.read(strangers, lambda _: free.wait(60))
    assert len(reading_threads()) == locked_memory.MOST
    assert isinstance(reads.read_one(locked_memory.Target(me, "victim"), lambda _: "read"), Fault)
    assert reads.read_one(locked_memory.Target(me, "victim", holds_gpu=True), lambda _: "read") == "read"
    free.set()
    wait_for(lambda: not reading_threads(), "the threads to return")


ASKED: dict[str, Callable[[int], object]] = {
    "environ": lambda pid: proc_pid.variables(Path("/proc"), pid, {"RANK"}),
    "maps": lambda pid: proc_pid.mapped_files(Path("/proc"), pid, re.compile("libc")),
}


@pytest.mark.parametrize("file", ASKED)
def test_a_check_is_told_that_there_is_no_answer(tmp_path: Path, file: str) -> None:
    answers: list[object] = []
    with locked(tmp_path, NOBODY) as (pid,):
        thread = threading.Thread(target=lambda: answers.append(ASKED[file](pid)), daemon=True)
        thread.start()
        thread.join(60)
        assert [getattr(answer, "reason", answer) for answer in answers] == ["NoAnswer"]
    wait_for(lambda: not reading_threads(), "the threads to return")


def test_a_daemon_finds_jobs_beside_it_and_ends_when_asked(tmp_path: Path, fake_driver: FakeDriver) -> None:
    with locked(tmp_path, NOBODY, 6), SimulatedNode(2) as node:
        fake_driver.add(*(f"gpu {index} pids {pid}" for index, pid in enumerate(node.pids)))
        with RealDaemon(tmp_path / "hw", fake_driver.environ) as daemon:
            daemon.wait_for_state(node.run_id, "training")

            def unread() -> float:
                return sum(n for _, n in daemon.samples("hangwatch_left_out", owner=f"uid {NOBODY}", what="processes"))

            wait_for(lambda: unread() >= 6, "the locked processes")  # this user may run other processes, too
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(timeout=60) == 0, "a thread that never returns does not delay the exit"
