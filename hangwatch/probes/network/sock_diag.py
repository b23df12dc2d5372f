"""Questions to the kernel about the sockets of a network namespace: NETLINK_SOCK_DIAG, see sock_diag(7)."""

import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from hangwatch.probes.base import background

# For one namespace, of the thread: the kernel answers at once, and a busy node delays the thread
CPU_SECONDS = 0.5
PROTOCOL = 4  # NETLINK_SOCK_DIAG
BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
HEADER = struct.Struct("=IHHII")  # nlmsghdr
_NLM_F_REQUEST_DUMP = 0x1 | 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_ATTRIBUTE = struct.Struct("=HH")
_RECEIVE_BYTES = 1 << 18
_CLONE_NEWNET = 0x40000000


def open_channel(pid: int, proc_root: Path) -> socket.socket:
    """Return a socket for requests about the network namespace of a process. Raises OSError if not permitted."""
    space = f"{proc_root}/{pid}/ns/net"
    is_ours = os.readlink(space) == os.readlink("/proc/self/ns/net")  # noqa: PTH115 - magic links, no paths
    return _open() if is_ours else _open_within(space)


def _open() -> socket.socket:
    channel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, PROTOCOL)
    channel.settimeout(CPU_SECONDS)  # for one answer, which the kernel has ready
    return channel


def _open_within(space: str) -> socket.socket:
    """Return a socket in another network namespace. A short-lived thread joins it, see setns(2)."""

    def open_in_thread() -> socket.socket:
        descriptor = os.open(space, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            return _open()
        finally:
            os.close(descriptor)

    return background.start(open_in_thread, "setns").result()


def read_messages(channel: socket.socket, request_type: int, request: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Send a request of this type and yield the messages of the answer: the buffer, and the start and end of each.

    Raises OSError, also if the kernel refuses, or if the answer takes more CPU time than `CPU_SECONDS`.
    """
    end = time.thread_time() + CPU_SECONDS
    length = HEADER.size + len(request)
    channel.send(HEADER.pack(length, request_type, _NLM_F_REQUEST_DUMP, 0, 0) + request)
    while True:
        if time.thread_time() > end:
            raise TimeoutError
        answer = channel.recv(_RECEIVE_BYTES)
        at = 0
        while at + HEADER.size <= len(answer):
            size, kind, _, _, _ = HEADER.unpack_from(answer, at)
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR or size < HEADER.size:
                raise OSError("sock_diag refused")
            yield answer, at + HEADER.size, at + size
            at += (size + 3) & ~3


def find_attribute(answer: bytes, at: int, end: int, wanted: int) -> bytes:
    """Return the content of the attribute of the kind `wanted` of a message; empty if the message has none."""
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(answer, at)
        if length < _ATTRIBUTE.size:
            break
        if kind == wanted:
            return answer[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return b""
