"""FUSE file systems that never respond or that stop responding. They need root and /dev/fuse."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MNT_DETACH = 2
SERVER = Path(__file__).with_name("fuse_server.py")


@contextmanager
def dead_mount(folder: Path) -> Iterator[Path]:
    """Mount a file system on `folder` that blocks every caller until it is unmounted.

    The kernel queues each request at the descriptor of /dev/fuse, which no process reads. When the descriptor is
    closed, all waiting processes get ENOTCONN.
    """
    with _fuse(folder):
        yield folder


@contextmanager
def dying_mount(folder: Path, files: dict[str, Path]) -> Iterator[Callable[[], None]]:
    """Mount `files` on `folder`. The server stops responding when the test calls the yielded function.

    A process that waits for a request which the server has read cannot be killed until the file system is
    unmounted.
    """
    with _fuse(folder) as descriptor:
        server = subprocess.Popen(
            [sys.executable, "-I", str(SERVER), str(descriptor), *(f"{name}={path}" for name, path in files.items())],
            pass_fds=[descriptor],
        )
        try:
            assert folder.stat().st_ino == 1  # the server responds
            yield lambda: server.send_signal(signal.SIGUSR1)
        finally:
            server.kill()
            server.wait()


@contextmanager
def _fuse(folder: Path) -> Iterator[int]:
    """Mount FUSE. Yield the descriptor of the requests; when it is closed, processes that wait get ENOTCONN."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a file system")
    try:
        descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"needs /dev/fuse: {error.strerror}")
    folder.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(b"deadfs", str(folder).encode(), b"fuse.deadfs", 0, options.encode()) != 0:
        reason = os.strerror(ctypes.get_errno())
        os.close(descriptor)
        pytest.skip(f"needs to mount FUSE: {reason}")
    try:
        yield descriptor
    finally:
        libc.umount2(str(folder).encode(), MNT_DETACH)
        os.close(descriptor)


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of this size on `folder`. Needs root."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a file system")
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "hangwatch-test", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
