"""What is behind the system call that the main thread of a process is in: the file, the pipe, the peer, the lock.

Asked of few processes, once they are accused. Only /proc and sock_diag are read: no file of a job is opened, and no
path of it is followed, so a file system that gives no answer holds nobody up. See proc_pid_fd(5).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from hangwatch import words
from hangwatch.model import Behind, KernelCall, SystemCall
from hangwatch.probes.network import sockets
from hangwatch.probes.node import filesystems
from hangwatch.probes.process import file_locks, main_thread, procfs, system_calls

_MOST_CHARACTERS = 200
_MOST_SHOWN = 4
_MOST_CHILDREN = 64
_READ, _WRITE = 0o400, 0o200  # how a link in /proc/PID/fd shows the direction of its file


def read(
    pid: int, seen: Sequence[SystemCall | None], kin: Iterable[int], end: float, proc_root: Path
) -> KernelCall | None:
    """The call in which the main thread of a process stands, and what is behind it.

    `seen` are its calls in the rounds of a look: None where it is no more in the last of them. Who has the other end of
    a pipe or socket is looked for among `kin` first, then on the whole node until `end` (CLOCK_MONOTONIC).
    """
    call = main_thread.read_call(pid, proc_root)
    last = seen[-1] if seen else None
    if call is None or last is None or not call.name or not _is_same(call, last):
        return None
    rounds = sum(1 for _ in itertools.takewhile(lambda one: one is not None and _is_same(one, last), reversed(seen)))
    search = _Search(pid, kin, end, proc_root)
    child = _child(pid, call.child, proc_root)
    is_lock = call.kind == "locks"
    return KernelCall(
        name=call.name,
        says=system_calls.rows()[call.name].says or call.name,
        rounds=rounds,
        descriptors=len(call.descriptors),
        behind=tuple(filter(None, (_behind(pid, one, search, proc_root) for one in call.descriptors[:_MOST_SHOWN]))),
        path=words.elided(main_thread.read_path(pid, proc_root) or "", _MOST_CHARACTERS),
        child_pid=child,
        child_comm=_comm(child, proc_root) if child is not None else "",
        file_lock=file_locks.awaited(pid, call.descriptors[0], proc_root) if is_lock else None,
    )


def _is_same(call: SystemCall, seen: SystemCall) -> bool:
    """Whether it is the call that was seen, of which no more than the first descriptors were kept."""
    kept = len(seen.descriptors)
    return (call.number, call.child, call.descriptors[:kept]) == (seen.number, seen.child, seen.descriptors)


def _child(pid: int, inner_pid: int | None, proc_root: Path) -> int | None:
    children = procfs.read_children(pid, proc_root, _MOST_CHILDREN) if inner_pid is not None else ()
    return next((child for child in children if procfs.read_inner_pid(child, proc_root) == inner_pid), None)


def _comm(pid: int, proc_root: Path) -> str:
    return words.printable(procfs.read_counters(pid, proc_root).comm)


def _behind(pid: int, descriptor: int, search: _Search, proc_root: Path) -> Behind | None:
    link, mode = _link(f"{proc_root}/{pid}/fd/{descriptor}")
    if not link:
        return None
    shown = words.elided(link, _MOST_CHARACTERS)
    if link.startswith("/"):
        mount = None if link.startswith("/dev/") else filesystems.mount_of(proc_root, pid, descriptor)
        is_remote = mount is not None and filesystems.is_network(mount)
        mounted = "" if mount is None else words.elided(str(mount), _MOST_CHARACTERS)
        return Behind(kind="file", what=shown, mount=mounted, is_remote=is_remote)
    if link.startswith("pipe:"):
        other, comm = search.holder_of(link, _WRITE if mode & _READ else _READ)
        return Behind(kind="pipe", what=shown, other_pid=other, other_comm=comm)
    inode = link.removeprefix("socket:[").removesuffix("]")
    if link.startswith("socket:[") and inode.isdecimal():
        return _socket(int(inode), search) or Behind(kind="other", what="a socket")
    return Behind(kind="other", what=shown)


def _socket(inode: int, search: _Search) -> Behind | None:
    """A TCP or Unix socket; None where it is another one, or where sockets may not be asked."""
    table = search.connections
    if (one := table.get(inode)) is not None:
        if one.listens:
            return Behind(kind="listening", what=sockets.words_of(one.local))
        ends = (other.inode for other in table.values() if (other.local, other.remote) == (one.remote, one.local))
        other, comm = search.holder_of(f"socket:[{next(ends, None)}]")
        return Behind(
            kind="connection",
            what=sockets.words_of(one.remote),
            other_pid=other,
            other_comm=comm,
            is_lost=one.is_lost,
        )
    unix = search.unix_sockets.get(inode)
    if unix is None:
        return None
    if unix.listens:
        return Behind(kind="listening", what="a Unix socket")
    other, comm = search.holder_of(f"socket:[{unix.peer}]")
    return Behind(kind="unix", what="a Unix socket", other_pid=other, other_comm=comm, is_lost=unix.peer is None)


class _Search:
    """Who on the node has a pipe or socket open: first the children of a process and `kin`, then all, until `end`."""

    def __init__(self, pid: int, kin: Iterable[int], end: float, proc_root: Path) -> None:
        self._pid, self._end, self._root = pid, end, proc_root
        children = procfs.read_children(pid, proc_root, _MOST_CHILDREN)
        self._near = dict.fromkeys(one for one in (*children, *kin) if one != pid)

    @cached_property
    def connections(self) -> sockets.Connections:
        """The TCP connections in the network namespace of the process; none where they may not be read."""
        return sockets.read(self._pid, self._root) or {}

    @cached_property
    def unix_sockets(self) -> dict[int, sockets.UnixSocket]:
        """The Unix sockets there, likewise."""
        return sockets.read_unix(self._pid, self._root) or {}

    def holder_of(self, link: str, mode: int = _READ | _WRITE) -> tuple[int | None, str]:
        """A process that has `link` open in one of these directions, and its name: itself only where nobody else has.

        (None, "") where none was found.
        """
        for pid in itertools.chain(self._near, self._others(), [self._pid]):
            if _has(pid, link, mode, self._root):
                return pid, _comm(pid, self._root)
            if time.monotonic() > self._end:
                break
        return None, ""

    def _others(self) -> Iterator[int]:
        with os.scandir(self._root) as entries:
            numbers = (int(entry.name) for entry in entries if entry.name.isdecimal())
            yield from (pid for pid in numbers if pid != self._pid and pid not in self._near)


def written(pid: int, proc_root: Path) -> frozenset[str]:
    """The pipes, FIFOs and files that a process has open for writing, as /proc/PID/fd calls them; devices left out."""
    try:
        found = sockets.descriptors(pid, proc_root)
    except OSError:
        return frozenset()
    ways = {number: link for number, link in found.items() if is_way(link)}
    return frozenset(link for number, link in ways.items() if _link(f"{proc_root}/{pid}/fd/{number}")[1] & _WRITE)


def link_of(pid: int, descriptor: int, proc_root: Path) -> str:
    """What a descriptor of a process is, as /proc/PID/fd calls it; empty where it is gone or may not be read."""
    return _link(f"{proc_root}/{pid}/fd/{descriptor}")[0]


def is_way(link: str) -> bool:
    """Whether what a descriptor is called is a pipe or has a path, and is no device."""
    return link.startswith(("pipe:", "/")) and not link.startswith("/dev/")


def _has(pid: int, link: str, mode: int, proc_root: Path) -> bool:
    try:
        found = sockets.descriptors(pid, proc_root)
    except OSError:
        return False
    same = (number for number, what in found.items() if what == link)
    return any(_link(f"{proc_root}/{pid}/fd/{number}")[1] & mode for number in same)


def _link(path: str) -> tuple[str, int]:
    """What a descriptor is and in which directions it is open; ("", 0) where it is gone or may not be read."""
    try:
        return os.readlink(path), os.lstat(path).st_mode  # noqa: PTH115 - a magic link, not a path
    except OSError:
        return "", 0
