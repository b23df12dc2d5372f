"""Processes whose memory is locked for good, made by what any user can do: a file system of his own that is silent."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import wait_for
from tests.dead_mount import dying_mount
from tests.integration import targets

# A page of the file is written to, then something else is mapped in its place: the kernel writes the page back first,
# with mmap_lock held (fuse_vma_close of fs/fuse/file.c).
LOCKED = """
import ctypes, os, sys
path, number, uid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
page = libc.mmap(None, 4096, 3, 1, os.open(path, os.O_RDWR), 4096 * number)
ctypes.memset(page, 65, 4096)
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
print("ready", flush=True)
sys.stdin.readline()
libc.mmap(page, 4096, 3, 0x32, -1, 0)
sys.stdin.readline()
"""


@contextlib.contextmanager
def locked(folder: Path, uid: int, count: int = 1) -> Iterator[list[int]]:
    """The pids of so many Python processes of this user whose memory is locked, until the end. Needs root."""
    (folder / "content").write_bytes(bytes(4096 * count))
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    children: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [child.communicate(timeout=20) for child in children])
        fall_silent = stack.enter_context(dying_mount(folder / "mnt", {"f": folder / "content"}))
        stack.callback(lambda: [child.kill() for child in children])
        for number in range(count):
            command = [sys.executable, "-c", LOCKED, str(folder / "mnt/f"), str(number), str(uid)]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
            children.append(child)
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        fall_silent()
        for child in children:
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()
        for child in children:
            wait_for(lambda pid=child.pid: targets.state(pid) == "D", "a locked process")
        yield [child.pid for child in children]
