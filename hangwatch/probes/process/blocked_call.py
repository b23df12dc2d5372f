"""Read the target of the main thread's system call: the file, pipe, peer or lock that it waits for.

Only a few suspected processes are read, from /proc and sock_diag. No file of a job is opened, and no path of a job is
followed, so a file system that does not respond blocks nothing. See proc_pid_fd(5).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from hangwatch import words
from hangwatch.model import ENDED_STATES, SIGNAL_STOPPED_STATE, CallTarget, KernelCall, ProcessDump, SystemCall
from hangwatch.probes.base import filesystems, procfs, pseudo_files, system_calls
from hangwatch.probes.network import sockets
from hangwatch.probes.process import file_locks, main_thread

_MOST_CHARACTERS = 200
_MOST_SHOWN = 4
_MOST_CHILDREN = 64
_MOST_POLLED = 64  # descriptors in which a child is searched
_SEARCH_CPU_SECONDS = 1.0  # for the links of all processes of the node
_PIDFDS = ("anon_inode:[pidfd]", "pidfd:")  # the second since Linux 6.9
_READ, WRITE = 0o400, 0o200  # mode bits of a link in /proc/PID/fd: open for reading, for writing


def read(
    pid: int, dumps: Sequence[ProcessDump], related_pids: Iterable[int], strangers: Strangers
) -> KernelCall | None:
    """Return the system call in which a process is blocked, with its target; None if it has left the call.

    It is the call of the thread for which the main thread waits, else of the main thread, by the dumps of all rounds.
    The process at the other end of a pipe or socket is searched among `related_pids` first, then among `strangers`.
    """
    proc_root, awaited = strangers.proc_root, dumps[-1].main.awaited_thread if dumps else None
    thread = None if awaited is None else awaited.id
    calls = [dump.main.call if dump.main.awaited_thread == awaited else None for dump in dumps]
    call = follow_child(pid, main_thread.read_call(pid, proc_root, thread), proc_root)
    last_call = calls[-1] if calls else None
    if call is None or last_call is None or not call.name or not _is_same(call, last_call):
        return None
    same = itertools.takewhile(lambda each: each is not None and _is_same(each, last_call), reversed(calls))
    search = _Search(pid, related_pids, proc_root, JobHolders((), lambda *_: (), strangers))
    child, row = _child(pid, call.child, proc_root), system_calls.calls_by_name()[call.name]
    lock = file_locks.find_awaited_lock(pid, call.descriptors[0], proc_root) if call.kind == "locks" else None
    behind = tuple(
        structs.replace(call_target, other_state=_state(call_target.other_pid, proc_root))
        for number in call.descriptors[:_MOST_SHOWN]
        if (call_target := _behind(pid, number, search, proc_root)) is not None
    )
    other_pid = child if lock is None else lock.holder_pid
    return KernelCall(
        name=call.name,
        says=row.says or call.name,
        rounds=sum(1 for _ in same),
        descriptors=len(call.descriptors),
        behind=behind,
        path=words.elided(_path(pid, proc_root, thread), _MOST_CHARACTERS),
        child_pid=child,
        child_comm=procfs.read_comm(child, proc_root) if child is not None else "",
        child_state=_state(child, proc_root),
        file_lock=lock,
        thread="" if awaited is None else awaited.name or str(thread),
        wchan=main_thread.read_state(pid, thread or pid, proc_root)[1] or "",
        is_held=thread is None and search.is_held(call, other_pid or next((each.other_pid for each in behind), None)),
        may_time_out=bool(row.timeout),
    )


def _path(pid: int, proc_root: Path, thread: int | None) -> str:
    """Return the path argument of the call as a shell on the node can reach it; "" if the call has none."""
    path = main_thread.read_path(pid, proc_root, thread) or ""
    spaces = [pseudo_files.read_link(f"{proc_root}/{each}/ns/mnt") for each in (pid, 1, "self")]
    is_elsewhere = spaces[0] and spaces[0] != (spaces[1] or spaces[2])
    return f"{proc_root}/{pid}/root{path}" if is_elsewhere and path.startswith("/") else path


class Strangers:
    """The pipes, sockets and files of the processes outside a job. Each process is read once, when a search needs it.

    Reading takes at most `cpu_seconds` in all: a busy node delays a search, but hides no process.
    """

    def __init__(self, job_pids: Container[int], proc_root: Path, cpu_seconds: float) -> None:
        self.proc_root, self._job_pids = proc_root, job_pids
        self._lock = threading.Lock()
        self._left_seconds = cpu_seconds
        self._unread: deque[int] | None = None
        self._links: dict[int, frozenset[str]] = {}

    @property
    def are_all_read(self) -> bool:
        """True after a search through all processes."""
        return self._unread is not None and not self._unread

    def find_holder(self, pid: int, link: str, mode: int) -> int | None:
        """Return a process other than `pid` that has `link` open as `mode` allows; None if none was read.

        Searches take turns, because the next one needs what this one reads.
        """
        with self._lock:
            others = (other for other, links in self._every() if link in links and other != pid)
            return next((other for other in others if has_open(other, link, mode, self.proc_root)), None)

    def _every(self) -> Iterator[tuple[int, frozenset[str]]]:
        """Yield the processes that were read, with their links. Then read and yield further ones."""
        if self._unread is None:
            every = map(int, procfs.list_pids(str(self.proc_root)))
            self._unread = deque(pid for pid in every if pid not in self._job_pids)
        yield from self._links.items()
        while self._unread and self._left_seconds > 0:
            pid, began = self._unread.popleft(), time.thread_time()
            self._links[pid] = _links(pid, self.proc_root)
            self._left_seconds -= time.thread_time() - began
            yield pid, self._links[pid]


class JobHolders(NamedTuple):
    """A memory shared by the searches of a job's processes: no process is read again for each of them.

    `holding` returns those of `pids`, the processes of the job, that have a link open; with True, open for writing.
    """

    pids: Container[int]
    holding: Callable[[str, bool], Sequence[int]]
    strangers: Strangers


def find_other_process(pid: int, descriptor: int, job: JobHolders, proc_root: Path) -> tuple[str, int] | None:
    """Return the kind and the process at the other end of a pipe ("pipe") or Unix socket ("unix").

    None if the descriptor is a file, a TCP socket or closed, if the process itself has the other end, or if the other
    end is closed. Raises LookupError if the other end was not found (see `Strangers`), may not be read, or can be any
    process.
    """
    found = _behind(pid, descriptor, _Search(pid, (), proc_root, job), proc_root)
    if found is None or found.kind not in ("pipe", "unix", "other") or found.other_pid == pid or found.is_lost:
        return None
    if found.other_pid is None:
        raise LookupError(found.what)
    return found.kind, found.other_pid


def follow_child(pid: int, call: SystemCall | None, proc_root: Path) -> SystemCall | None:
    """Return a call that waits for descriptors as a wait for a child process, if one of them is a pidfd of a child.

    An event loop waits for its children like that; its sockets may be idle ones. See pidfd_open(2).
    """
    if call is None or call.kind != "receives" or call.child is not None:
        return call
    folder = proc_root / str(pid)
    for descriptor in call.descriptors[:_MOST_POLLED]:
        if link_of(pid, descriptor, proc_root).startswith(_PIDFDS):
            rows = pseudo_files.read_or_empty(folder / "fdinfo" / str(descriptor)).splitlines()
            inner = next((row.split()[-1] for row in rows if row.startswith("NSpid:")), "")
            if inner.isdecimal() and _child(pid, int(inner), proc_root) is not None:
                return structs.replace(call, kind="awaits_child", child=int(inner))
    return call


def _is_same(call: SystemCall, previous: SystemCall) -> bool:
    """True if `call` is the same call as `previous`, which has only its first descriptors."""
    kept = len(previous.descriptors)
    return (call.number, call.child, call.descriptors[:kept]) == (previous.number, previous.child, previous.descriptors)


def _child(pid: int, inner_pid: int | None, proc_root: Path) -> int | None:
    children = procfs.read_children(pid, proc_root, _MOST_CHILDREN) if inner_pid is not None else ()
    return next((child for child in children if procfs.read_inner_pid(child, proc_root) == inner_pid), None)


def _state(pid: int | None, proc_root: Path) -> str:
    """Return the state letter of a process; "" if there is none."""
    state = None if pid is None else procfs.read_state(pid, proc_root)
    return state[1] if state is not None else ""


def _behind(pid: int, descriptor: int, search: _Search, proc_root: Path) -> CallTarget | None:
    link, mode = _link(f"{proc_root}/{pid}/fd/{descriptor}")
    if not link:
        return None
    shown = words.elided(link, _MOST_CHARACTERS)
    if link.startswith("/"):
        mount = None if link.startswith("/dev/") else filesystems.mount_of(proc_root, pid, descriptor)
        is_remote = mount is not None and filesystems.is_network(mount)
        mounted = "" if mount is None else words.elided(str(mount), _MOST_CHARACTERS)
        is_local = mount is not None and not is_remote and filesystems.is_on_local_disk(mount)
        if mount is None or is_remote or not _is_fifo(f"{proc_root}/{pid}/fd/{descriptor}"):
            return CallTarget(kind="file", what=shown, mount=mounted, is_remote=is_remote, is_local_device=is_local)
    if link.startswith(("pipe:", "/")):
        other, comm = search.holder_of(link, WRITE if mode & _READ else _READ)
        return CallTarget(kind="pipe", what=shown, other_pid=other, other_comm=comm)
    inode = link.removeprefix("socket:[").removesuffix("]")
    if link.startswith("socket:[") and inode.isdecimal():
        return _socket(int(inode), search) or CallTarget(kind="other", what="a socket without a known peer")
    return CallTarget(kind="other", what=shown)


def _is_fifo(descriptor: str) -> bool:
    """True if an open file of a local file system is a FIFO. Its inode is in memory, so no disk is read."""
    with contextlib.suppress(OSError):
        return stat.S_ISFIFO(os.stat(descriptor).st_mode)  # noqa: PTH116 - a magic link, not a path
    return False


def _socket(inode: int, search: _Search) -> CallTarget | None:
    """Return the TCP or Unix socket with this inode; None for other sockets, or if sockets may not be read."""
    connections = search.connections
    if (connection := connections.get(inode)) is not None:
        if connection.listens:
            return CallTarget(kind="listening", what=sockets.format_end(connection.local))
        other_inodes = (
            other.inode
            for other in connections.values()
            if (other.local, other.remote) == (connection.remote, connection.local)
        )
        other, comm = search.holder_of(f"socket:[{next(other_inodes, None)}]")
        return CallTarget(
            kind="connection",
            what=sockets.format_end(connection.remote),
            other_pid=other,
            other_comm=comm,
            is_lost=connection.is_lost,
        )
    unix = search.unix_sockets.get(inode)
    if unix is None:
        return None
    if unix.listens:
        return CallTarget(kind="listening", what="a Unix socket")
    other, comm = search.holder_of(f"socket:[{unix.peer}]")
    return CallTarget(kind="unix", what="a Unix socket", other_pid=other, other_comm=comm, is_lost=unix.peer is None)


class _Search:
    """A search for the process that holds a pipe or socket: among children and `kin`, then on the node.

    `job` is shared by the searches of the job's processes.
    """

    def __init__(self, pid: int, kin: Iterable[int], proc_root: Path, job: JobHolders) -> None:
        self._pid, self._root, self._job = pid, proc_root, job
        self._children, self._kin = procfs.read_children(pid, proc_root, _MOST_CHILDREN), tuple(kin)

    @cached_property
    def connections(self) -> sockets.Connections:
        """The TCP connections in the network namespace of the process, by inode; empty if they may not be read."""
        return sockets.read(self._pid, self._root) or {}

    @cached_property
    def unix_sockets(self) -> dict[int, sockets.UnixSocket]:
        """The Unix sockets in the network namespace of the process, by inode; empty if they may not be read."""
        return sockets.read_unix(self._pid, self._root) or {}

    def is_held(self, call: SystemCall, other_pid: int | None) -> bool:
        """True if only stopped helpers of the job, and no alarm, can end a call. `other_pid` is one of them."""
        is_timed = procfs.catches_alarm(self._pid, self._root)
        if is_timed or len(call.descriptors) > 1 or not self._is_stopped_helper(other_pid):
            return False
        return call.kind == "awaits_child" or self._are_all_stopped(call.descriptors[0], is_lock=call.kind == "locks")

    def _is_stopped_helper(self, pid: int | None) -> bool:
        """True if a signal, and no tracer, has stopped a process of this rank or a worker of another one.

        Other processes do not count: a scheduler may stop another job as a whole, and continue it later.
        """
        return _state(pid, self._root) == SIGNAL_STOPPED_STATE and pid in (*self._children, *self._kin)

    def _are_all_stopped(self, descriptor: int, *, is_lock: bool) -> bool:
        """True if all other processes with the far end of a descriptor are stopped helpers, and there are some.

        With `is_lock`, these are the processes that can release a lock on its file: a child may have inherited it.
        False if a process cannot be seen, or if one of the same user may not be read.
        """
        latest, count = time.thread_time() + _SEARCH_CPU_SECONDS, 0
        end = link_of(self._pid, descriptor, self._root)
        if end.startswith("socket:["):
            unix = self.unix_sockets.get(int(end[8:-1]))
            end = f"socket:[{unix and unix.peer}]"
        for pid in map(int, procfs.list_pids(str(self._root))):
            links = sockets.descriptors(pid, self._root)
            is_whole = links is not None and len(links) < sockets.MOST_DESCRIPTORS
            if time.thread_time() > latest or (not is_whole and self._may_hide(pid)):
                return False
            numbers = [number for number, link in (links or {}).items() if link == end]
            if is_lock:
                folder = f"{self._root}/{pid}/fdinfo"
                numbers = [number for number in numbers if "lock:" in pseudo_files.read_or_empty(f"{folder}/{number}")]
            if numbers and pid != self._pid:
                count += 1
                if not self._is_stopped_helper(pid):
                    return False
        return count > 0 and procfs.sees_all_pids(self._root)

    def _may_hide(self, pid: int) -> bool:
        users = {procfs.read_user_id(each, self._root) for each in (pid, self._pid)}
        return len(users) == 1 and _state(pid, self._root) not in ENDED_STATES

    def holder_of(self, link: str, mode: int = _READ | WRITE) -> tuple[int | None, str]:
        """Return pid and comm of a process that has `link` open for reading or writing, as `mode` allows.

        (None, "") if none was found. The process itself is tried last.
        """
        near, strangers = self._find_near(link, mode), self._job.strangers
        holder = self._first_of(near, link, mode) or strangers.find_holder(self._pid, link, mode)
        if holder is None and strangers.are_all_read:  # after an incomplete search, another may hold it, too
            holder = self._first_of([self._pid], link, mode)
        return (None, "") if holder is None else (holder, procfs.read_comm(holder, self._root))

    def _first_of(self, pids: Iterable[int], link: str, mode: int) -> int | None:
        return next((pid for pid in pids if has_open(pid, link, mode, self._root)), None)

    def _find_near(self, link: str, mode: int) -> list[int]:
        """Return the children and the related processes, but of those of the job only those that may hold the link."""
        in_job = self._job.holding(link, mode == WRITE and is_pipe_or_path(link))
        children = (child for child in self._children if child in in_job or child not in self._job.pids)
        return [pid for pid in dict.fromkeys((*children, *in_job, *self._kin)) if pid != self._pid]


def link_of(pid: int, descriptor: int, proc_root: Path) -> str:
    """Return the link of a descriptor in /proc/PID/fd; empty if it is closed or may not be read."""
    return _link(f"{proc_root}/{pid}/fd/{descriptor}")[0]


def is_pipe_or_path(link: str) -> bool:
    """True if the link of a descriptor is a pipe or a path, but not a device."""
    return link.startswith(("pipe:", "/")) and not link.startswith("/dev/")


def _links(pid: int, proc_root: Path) -> frozenset[str]:
    """Return the pipes, sockets and files that a process has open; empty if they may not be read."""
    links = sockets.descriptors(pid, proc_root) or {}
    return frozenset(link for link in links.values() if link.startswith("socket:") or is_pipe_or_path(link))


def has_open(pid: int, link: str, mode: int, proc_root: Path, links: Mapping[int, str] | None = None) -> bool:
    """True if a process has this link open as `mode` allows. `links` are its descriptors, if they were read before."""
    links = sockets.descriptors(pid, proc_root) or {} if links is None else links
    now = (_link(f"{proc_root}/{pid}/fd/{number}") for number, other in links.items() if other == link)
    return any(same == link and bits & mode for same, bits in now)


def _link(path: str) -> tuple[str, int]:
    """Return the link of a descriptor and its mode bits; ("", 0) if it is closed or may not be read."""
    try:
        return os.readlink(path), os.lstat(path).st_mode  # noqa: PTH115 - a magic link, not a path
    except OSError:
        return "", 0
