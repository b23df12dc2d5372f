"""Memory that gives no answer: a process waits in poll(2) over an array that lies in a silent file system of its user's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.probes import main_thread, memory, procs
from tests.conftest import wait_for
from tests.dead_mount import dying_mount

NOBODY = 65534
pytestmark = pytest.mark.timeout(120)

# The array is mapped anew while the main thread waits: the kernel has copied it, and who reads it faults on the file.
POLLS = """
import ctypes, os, sys, threading, time
path, number, uid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.poll.argtypes = [ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int]
file = os.open(path, os.O_RDWR)
array = libc.mmap(None, 4096, 3, 0x22, -1, 0)
ctypes.memset(array, 255, 4096)
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
print("ready", flush=True)
sys.stdin.readline()
def later():
    while "poll" not in open("/proc/self/task/%d/wchan" % os.getpid()).read():
        time.sleep(0.01)
    libc.mmap(array, 4096, 3, 0x11, file, 4096 * number)
    print("mapped", flush=True)
    time.sleep(600)
threading.Thread(target=later, daemon=True).start()
libc.poll(array, 4, -1)
"""


@contextlib.contextmanager
def polling(folder: Path, count: int) -> Iterator[list[int]]:
    """The pids of so many processes of another user whose poll array nobody can read, until the end."""
    (folder / "content").write_bytes(bytes(4096 * count))
    children: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [child.communicate(timeout=20) for child in children])
        fall_silent = stack.enter_context(dying_mount(folder / "mnt", {"f": folder / "content"}))
        stack.callback(lambda: [child.kill() for child in children])
        for number in range(count):
            command = [sys.executable, "-c", POLLS, str(folder / "mnt/f"), str(number), str(NOBODY)]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            children.append(child)
            assert child.stdout is not None and child.stdin is not None
            assert child.stdout.readline() == b"ready\n"
        fall_silent()
        for child in children:
            assert child.stdout is not None and child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"mapped\n"
        yield [child.pid for child in children]


def test_memory_that_gives_no_answer_costs_a_child_and_half_a_second(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with polling(tmp_path, 2) as pids:
        began = time.monotonic()
        calls = [main_thread.read_call(pid, procs.PROC) for pid in (*pids, *pids)]
        assert time.monotonic() - began < 10.0
        assert [call.descriptors for call in calls if call] == [()] * 4
        assert memory.SHARED.left_behind() == 2, "one for each, however often it is asked"
        assert set(threading.enumerate()) == before, "no thread of ours waits"
        own = memory.SHARED.read(procs.PROC / str(os.getpid()) / "mem", id(before), 8)
        assert len(own) == 8, "others are read"
    wait_for(lambda: memory.SHARED.left_behind() == 0, "the children to end with the file system")


def test_so_many_children_are_left_behind_and_no_more(tmp_path: Path) -> None:
    most = memory.MOST_LEFT_BEHIND
    with polling(tmp_path, most + 2) as pids:
        for pid in pids:
            main_thread.read_call(pid, procs.PROC)
        assert memory.SHARED.left_behind() == most
    wait_for(lambda: memory.SHARED.left_behind() == 0, "the children to end with the file system")
