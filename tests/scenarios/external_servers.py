"""Resources outside a job that its ranks wait for: servers on loopback and a slow disk."""

import contextlib
import ctypes
import os
import selectors
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.servers import server

DEADLINE_SECONDS = 60.0
BEATS_PER_SECOND = 20
_SO_ATTACH_FILTER = 26
_DROP_ALL = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0: keep no byte


class UnavailableError(Exception):
    """This machine cannot run the scenario. The message names what is missing."""


@server
def answering(listening: socket.socket, over: threading.Event, after_seconds: float) -> None:
    """Run a server that responds to one request after `after_seconds`. Yield its port."""
    with listening.accept()[0] as peer:
        over.wait(after_seconds)
        peer.sendall(b".")


@server
def beating(listening: socket.socket, over: threading.Event, every_seconds: float) -> None:
    """Run a server that sends one client a heartbeat again and again. Yield its port."""
    listening.settimeout(1.0)
    while not over.is_set():
        with contextlib.suppress(OSError), listening.accept()[0] as peer:
            while not over.wait(every_seconds):
                peer.sendall(b".")


@server
def sending(listening: socket.socket, over: threading.Event, bytes_per_second: int, seconds: float) -> None:
    """Run a server that sends at this rate to one client, for `seconds`. Yield its port."""
    with listening.accept()[0] as peer:
        for _ in range(int(seconds * BEATS_PER_SECOND)):
            peer.sendall(bytes(bytes_per_second // BEATS_PER_SECOND))
            over.wait(1 / BEATS_PER_SECOND)


@server
def taking(listening: socket.socket, over: threading.Event, bytes_per_second: int, after_seconds: float = 0.0) -> None:
    """Run a server that receives at this rate from all clients together. Yield its port.

    It receives nothing for `after_seconds` after each client has connected.
    """
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
    with contextlib.ExitStack() as peers, selectors.DefaultSelector() as readers:
        readers.register(listening, selectors.EVENT_READ)
        while not over.wait(1 / BEATS_PER_SECOND):
            ready = [key.fileobj for key, _ in readers.select(0)]
            for one in ready:
                assert isinstance(one, socket.socket)
                if one is listening:
                    readers.register(peers.enter_context(listening.accept()[0]), selectors.EVENT_READ)
                    over.wait(after_seconds)
                elif not one.recv(bytes_per_second // BEATS_PER_SECOND // len(ready)):
                    readers.unregister(one)


@server
def vanishing(listening: socket.socket, over: threading.Event) -> None:
    """Run a server that greets a client and then is silent, as after a power failure. Yield its port."""
    with listening.accept()[0] as peer:
        program = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))
        peer.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)  # before the client can respond
        peer.sendall(b".")
        over.wait()


class Disk(NamedTuple):
    """A file system on a disk with a limited write rate."""

    folder: Path
    write: Callable[[int], None]
    """Function that sets the limit in bytes per second; 0 means no limit."""


@contextlib.contextmanager
def disk(folder: Path, bytes_per_second: int) -> Iterator[Disk]:
    """Make a loop device with a small ext2. Yield its file system.

    The control group of this process limits the write rate. Raises UnavailableError without root, loop devices, or
    this control group (version 1, cgroup-v1/blkio-controller.rst).
    """
    throttle = _throttle()
    image, mount = folder / "image", folder / "disk"
    mount.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(64 << 20)
    _run("mkfs.ext2", "-q", "-F", str(image))
    device = _run("losetup", "--find", "--show", str(image))
    number = Path("/sys/class/block", Path(device).name, "dev").read_text().strip()

    def write(bytes_per_second: int) -> None:
        throttle.write_text(f"{number} {bytes_per_second}")

    try:
        _run("mount", device, str(mount))
        try:
            write(bytes_per_second)
            yield Disk(mount, write)
        finally:
            write(0)
            _run("umount", "--lazy", str(mount))
    finally:
        _run("losetup", "--detach", device)


def _throttle() -> Path:
    if os.geteuid() != 0:
        raise UnavailableError("needs root: mounts a file system")
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for root in (Path("/sys/fs/cgroup/blkio" + groups.get("blkio", "")), Path("/sys/fs/cgroup/blkio")):
        throttle = root / "blkio.throttle.write_bps_device"
        if throttle.exists():
            return throttle
    raise UnavailableError("needs the blkio controller of control groups, version 1")


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    except FileNotFoundError:
        raise UnavailableError(f"needs {command[0]}") from None
    if done.returncode:
        raise UnavailableError(f"needs {command[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
