"""Memory that cannot be read: a rank is in poll(2), and its array is in a file that does not respond."""

import marshal
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hangwatch.probes.base import procfs
from hangwatch.probes.base.child_runner import MOST_ABANDONED_OF_SHARE
from hangwatch.probes.process import main_thread, process_memory
from tests.commands import finished
from tests.conftest import wait_for
from tests.locked_memory_processes import polling

NOBODY = 65534


def test_memory_that_gives_no_answer_costs_a_child_and_half_a_second(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with polling(tmp_path, NOBODY, 2) as pids:
        began = time.monotonic()
        calls = [main_thread.read_call(pid, procfs.PROC) for pid in (*pids, *pids)]
        assert time.monotonic() - began < 60.0
        assert [call.descriptors for call in calls if call] == [()] * 4
        assert process_memory.SHARED.abandoned.count() == 2, "one for each, however often it is asked"
        assert set(threading.enumerate()) <= before, "no thread of ours waits"
        own = process_memory.SHARED.read(procfs.PROC / str(os.getpid()) / "mem", id(before), 8)
        assert len(own) == 8, "others are read"
    wait_for(lambda: process_memory.SHARED.abandoned.count() == 0, "the children to end with the file system")


def test_so_many_children_are_left_behind_and_no_more(tmp_path: Path) -> None:
    most = MOST_ABANDONED_OF_SHARE
    with polling(tmp_path, NOBODY, most + 2) as pids:
        for pid in pids:
            main_thread.read_call(pid, procfs.PROC)
        assert process_memory.SHARED.abandoned.count() == most
    wait_for(lambda: process_memory.SHARED.abandoned.count() == 0, "the children to end with the file system")


def test_thread_that_waits_for_the_reader_comes_before_the_thread_that_has_just_read() -> None:
    """A capture of many ranks reads again and again. Reads for other owners come in between."""
    turns, order = process_memory.Turns(), list[str]()

    def wait_for_turn() -> None:
        with turns:
            order.append("waiting")

    waiting = threading.Thread(target=wait_for_turn)
    with turns:
        waiting.start()
        wait_for(lambda: turns.count() == 2, "the thread to wait")
    with turns:
        order.append("again")
    waiting.join()
    assert order == ["waiting", "again"]


def test_a_child_that_has_no_core_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep a child that runs beyond its deadline if it computes: it is slow, not blocked."""
    busy = tmp_path / "busy_child.py"
    work = "end = time.monotonic() + 1.5\n                while time.monotonic() < end: pass\n                number, pieces = answer("
    busy.write_text(
        process_memory.CHILD.read_text()
        .replace("number, pieces = answer(", work)
        .replace("import sys", "import sys, time")
    )
    monkeypatch.setattr(process_memory, "CHILD", busy)
    monkeypatch.setattr(process_memory, "STARTUP_SECONDS", 0.5)
    reader = process_memory.MemoryReader()
    assert len(reader.read(procfs.PROC / str(os.getpid()) / "mem", id(busy), 8)) == 8
    assert reader.abandoned.count() == 0


def test_ctrl_c_does_not_reach_the_memory_child() -> None:
    """Send SIGINT to the process group, as a terminal does for Ctrl-C. The child must not print a traceback."""
    script = (
        "import os, signal\n"
        "from hangwatch.probes.base import procfs as procs\n"
        "from hangwatch.probes.process import process_memory as memory\n"
        "value = os.urandom(8)\n"
        "def read(): return len(memory.SHARED.read(procs.PROC / str(os.getpid()) / 'mem', id(value), 8))\n"
        "first = read()\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.killpg(0, signal.SIGINT)\n"
        "print(first, read())\n"
    )
    done = finished(sys.executable, "-c", script, start_new_session=True)
    assert (done.stdout, done.stderr) == ("8 8\n", "")


@pytest.mark.parametrize("most_bytes", [None, 20, 2, 0], ids=["whole question", "a part", "half a length", "none"])
def test_memory_child_ends_silently_after_its_parent(most_bytes: int | None) -> None:
    """An earlier version wrote a traceback to the journal."""
    files = marshal.dumps([("/proc/self/maps", [(0, 100_000)], 0)])
    question = (len(files).to_bytes(4, sys.byteorder) + files)[:most_bytes]
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", str(process_memory.CHILD), "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE) as child:
        os.close(writing)
        os.close(reading)
        _, said = child.communicate(question, timeout=60)
    assert (child.returncode, said) == (0, b"")
