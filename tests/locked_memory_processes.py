"""Processes with a locked memory map: a file system does not respond. Any user can start such processes."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import wait_for
from tests.dead_mount import dying_mount
from tests.integration import targets

# Arguments of each program: the file, the number of the file page that the process uses, the user id.
_BEGIN = """
import ctypes, os, sys, threading, time
path, number, uid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.poll.argtypes = [ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int]
file = os.open(path, os.O_RDWR)
"""
_BECOME_USER = """
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
print("ready", flush=True)
sys.stdin.readline()
"""
# The process writes a page of the file and replaces it by another mapping. The kernel first writes the page back
# and holds mmap_lock meanwhile (fuse_vma_close of fs/fuse/file.c).
_LOCKED = f"""
{_BEGIN}
page = libc.mmap(None, 4096, 3, 1, file, 4096 * number)
ctypes.memset(page, 65, 4096)
{_BECOME_USER}
libc.mmap(page, 4096, 3, 0x32, -1, 0)
sys.stdin.readline()
"""
# While the main thread waits in poll(2), a second thread maps the file over the array. The kernel polls with its
# copy; reading the array faults on the file.
_POLLS = f"""
{_BEGIN}
array = libc.mmap(None, 4096, 3, 0x22, -1, 0)
ctypes.memset(array, 255, 4096)
{_BECOME_USER}
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
def locked(folder: Path, uid: int, count: int = 1) -> Iterator[list[int]]:
    """Start `count` Python processes of user `uid` with a locked memory map. Yield their pids. Needs root."""
    with _kept(_LOCKED, folder, uid, count) as children:
        for child in children:
            wait_for(lambda pid=child.pid: targets.state(pid) == "D", "a locked process")
        yield [child.pid for child in children]


@contextlib.contextmanager
def polling(folder: Path, uid: int, count: int) -> Iterator[list[int]]:
    """Start `count` processes of `uid` in poll(2) with an array that cannot be read. Yield their pids. Needs root."""
    with _kept(_POLLS, folder, uid, count) as children:
        for child in children:
            assert child.stdout.readline() == b"mapped\n"
        yield [child.pid for child in children]


@contextlib.contextmanager
def _kept(program: str, folder: Path, uid: int, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start `count` processes that run `program` on pages of one file.

    Make the file system of the file stop responding. Then let the processes continue.
    """
    (folder / "content").write_bytes(bytes(4096 * count))
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    children: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [child.communicate(timeout=60) for child in children])
        fall_silent = stack.enter_context(dying_mount(folder / "mnt", {"f": folder / "content"}))
        stack.callback(lambda: [child.kill() for child in children])
        for number in range(count):
            command = [sys.executable, "-c", program, str(folder / "mnt/f"), str(number), str(uid)]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
            children.append(child)
            assert child.stdout.readline() == b"ready\n"
        fall_silent()
        for child in children:
            child.stdin.write(b"go\n")
            child.stdin.flush()
        yield children
