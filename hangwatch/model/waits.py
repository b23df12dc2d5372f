"""Waits of a process by the kernel: its system call, the targets of that call, the store of its job."""

from __future__ import annotations

import ipaddress
from typing import Literal

from hangwatch.model.jobs import PortUse
from hangwatch.model.value import Value

ENDED_STATES = frozenset("ZXx")
"""Letters of /proc/PID/stat of a process that has ended: a zombie, or dead."""

STOPPED_STATES = frozenset("Tt")
"""Letters of a process that a signal or a tracer has stopped."""

BLOCKED_STATES = frozenset("D")
"""The letter of a process inside a system call that no signal ends."""

FUSE_WAITS = frozenset({"request_wait_answer"})
"""Kernel functions in which a process waits for the answer of a FUSE server, in state S at first (fs/fuse/dev.c)."""

AsksRank = Literal["main", "thread", "child"]
"""The part of a process that receives from another rank: main thread, another thread, or a child that it waits for."""

Rests = Literal["sleep", "thread"]
"""The wait of a main thread that needs no other rank: a sleep or a signal; or a thread of its own process."""


CallObject = Literal["file", "pipe", "socket", "lock", "child"]
"""The object of a system call: a file (also a FIFO, or a path), a pipe, a socket, a file lock or a child process."""


class SystemCall(Value, frozen=True):
    """The system call that a thread is in: its number and name, its kind, and its arguments.

    `descriptors` are its files and sockets; `child` is the one process that it waits for, as numbered in its own pid
    namespace. `left_seconds` and `until_unix_seconds`: the latest end of a sleep or timed wait, from the time at which
    it was read, and by the clock of the node; None if it has no end, or was not read. `object` is the kind of what it
    waits for, if no other thread of its process and no GPU ends the call.
    """

    number: int
    name: str = ""
    kind: Literal["receives", "awaits_child", "writes", "locks", "sleeps", "other"] = "other"
    descriptors: tuple[int, ...] = ()
    child: int | None = None
    left_seconds: float | None = None
    until_unix_seconds: float | None = None
    object: CallObject | None = None


class Sleep(Value, frozen=True):
    """A sleep, or a wait with a timeout, of a main thread: it ends by itself.

    `until_unix_seconds` is its latest end, `seconds` the longest time that was seen to be left, and `place` a short
    hash of the lines of its stack. `is_polling`: sleep follows sleep at these lines, while the other ranks wait for the
    rank; see `detector.sleepers`.
    """

    until_unix_seconds: float
    seconds: float
    place: str
    is_polling: bool = False


class FileLock(Value, frozen=True):
    """A file lock on `path` that a process waits for, and its holder; None if the kernel does not say.

    The kernel lists no holder that has ended and passed its lock to a child process, and none on another node.
    `by_child`: a child process, which this process waits for, waits for the lock.
    """

    path: str
    holder_pid: int | None = None
    holder_comm: str = ""
    by_child: bool = False


class CallTarget(Value, frozen=True):
    """The target of one descriptor of a system call. All texts are bounded and printable.

    `what` is the path of a file, the address of a peer, or the kernel's name for it. `mount` is the file system of a
    file; `is_remote`: another machine or a process serves it. `other_pid` and `other_comm` are a process of this node
    that has the other end of a pipe, Unix socket or connection, maybe the rank itself; None if no such process was
    seen. `is_lost`: the kernel knows that the other end is closed.
    """

    kind: Literal["file", "pipe", "connection", "unix", "listening", "other"]
    what: str
    mount: str = ""
    is_remote: bool = False
    other_pid: int | None = None
    other_comm: str = ""
    is_lost: bool = False


class KernelCall(Value, frozen=True):
    """The system call that the main thread of a rank was in for the last `rounds` rounds of a capture, and after it.

    `name` is the kernel's, `says` the same with a preposition. `behind` are its first few descriptors out of
    `descriptors`; `path` is the path argument, as its owner wrote it. `child_pid`, `child_comm` and `file_lock` are set
    if it waits for a child or a file lock.
    """

    name: str
    says: str
    rounds: int
    descriptors: int = 0
    behind: tuple[CallTarget, ...] = ()
    path: str = ""
    child_pid: int | None = None
    child_comm: str = ""
    file_lock: FileLock | None = None


class WorkerCall(Value, frozen=True):
    """The system call of the worker process for which a rank waits."""

    pid: int
    call: KernelCall


def is_loopback(host: str) -> bool:
    """True if a host, as a user wrote it, is loopback by itself: `localhost` or an address, not the name of a node."""
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


class Store(Value, frozen=True):
    """The store at which the ranks of a job meet, and the state of one process's sockets to it.

    `endpoint` is as its user wrote it, bounded and printable.
    """

    endpoint: str
    socket: PortUse

    @property
    def is_on_loopback(self) -> bool:
        """True if its address, as a user wrote it, is a loopback address: another store on each node."""
        return is_loopback(self.endpoint.rpartition(":")[0])

    @property
    def has_connection(self) -> bool:
        """True if the process serves the store, is connected to it, or its request to connect is pending."""
        return self.socket not in ("none", "retries")


class Awaited(Value, frozen=True):
    """A peer outside of the job for which a process waits; `is_lost`: the kernel knows that the other end is closed."""

    who: str
    is_lost: bool = False


class Waits(Value, frozen=True):
    """Everything that a process waits for outside of itself, and its connections to other ranks, by the kernel.

    `frozen_cgroup` is the control group that freezes it, `tracer` the process that traces and stops it, `awaited` a
    peer outside of the job. `server` is the
    pid of the process that waits for clients and from which this one receives; it may be the process itself.
    `job_server` is any process of its job that waits for clients.
    `file_lock` is the file lock that it waits for; `shares_lock`: it waits for a lock in memory that another rank of
    its job maps too. `asks_rank` names the part of it that receives from another rank of its job. `stuck_on` is the
    file or pipe that it reads or writes, if no other process of its job has it open. `waits_in_torch`: its main
    thread sleeps in code of torch, NCCL or CUDA; None if that was not seen. `store` is the store of its job;
    `awaits_store` names the thread that receives an answer from it. `peers` counts the connections to other ranks, None
    if they were not seen; `active_peers` those that are in use, `most_peers` the most that an earlier scan saw.
    `enclosed_at` is the place of its wait for other ranks, if no other node of the job reaches that place. `object` is
    that of the one call that its main thread was in. Details: `ProcessDump`, `SystemCall`.
    """

    frozen_cgroup: str | None = None
    tracer: str | None = None
    awaited: Awaited | None = None
    server: int | None = None
    job_server: int | None = None
    file_lock: FileLock | None = None
    shares_lock: bool = False
    asks_rank: AsksRank | None = None
    stuck_on: str | None = None
    waits_in_torch: bool | None = None
    store: Store | None = None
    awaits_store: Literal["main", "thread"] | None = None
    peers: int | None = None
    active_peers: int | None = None
    most_peers: int = 0
    enclosed_at: str | None = None
    object: CallObject | None = None
