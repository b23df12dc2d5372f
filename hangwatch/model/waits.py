"""What a process waits for, by the kernel's word: its system call, what is behind that, the store of its job."""

from __future__ import annotations

import ipaddress
from typing import Literal

from hangwatch.model.jobs import PortUse
from hangwatch.model.value import Value

ENDED_STATES = frozenset("ZXx")
"""Letters of /proc/PID/stat of a process that has ended: a zombie, or dead."""

STOPPED_STATES = frozenset("Tt")
"""Letters of a process that a signal or a tracer holds."""

BLOCKED_STATES = frozenset("D")
"""The letter of a process inside a system call that no signal ends."""

FUSE_WAITS = frozenset({"request_wait_answer"})
"""Where in the kernel a process waits for the answer of a FUSE server, in state S at first (fs/fuse/dev.c)."""

AsksRank = Literal["main", "thread", "child"]
"""Who of a process receives from another rank: its main thread, another one, or a process that it awaits."""


class SystemCall(Value, frozen=True):
    """The system call that a thread is in: its number and name, what kind of call that is, and what it is about.

    `descriptors` are its files and sockets; `child` is the one process that it waits for, as its own pid namespace
    numbers it.
    """

    number: int
    name: str = ""
    kind: Literal["receives", "awaits_child", "writes", "locks", "sleeps", "other"] = "other"
    descriptors: tuple[int, ...] = ()
    child: int | None = None


class FileLock(Value, frozen=True):
    """A lock of the file at `path` for which a process waits, and who holds it; None where the kernel does not say.

    It lists no holder that has ended and left its lock to a process that it started, and none on another node.
    `by_child`: who waits for it is a process that this one started and waits for.
    """

    path: str
    holder_pid: int | None = None
    holder_comm: str = ""
    by_child: bool = False


class Behind(Value, frozen=True):
    """What stands behind one descriptor of a system call. All texts are bounded and printable.

    `what` is the path of a file, the address of a peer, or what the kernel calls it; `mount` is the file system of a
    file, which another machine or a process serves where it `is_remote`. `other_pid` and `other_comm` are a process of
    this node that has the other end of a pipe, Unix socket or connection, maybe the rank itself; None where none was
    found. `is_lost`: the kernel knows that nobody is at the other end now.
    """

    kind: Literal["file", "pipe", "connection", "unix", "listening", "other"]
    what: str
    mount: str = ""
    is_remote: bool = False
    other_pid: int | None = None
    other_comm: str = ""
    is_lost: bool = False


class KernelCall(Value, frozen=True):
    """The system call in which the main thread of a rank stood in the last `rounds` of a look, and after it.

    `name` is the kernel's, `says` the same with a preposition. `behind` are its first few descriptors, of so many
    `descriptors`; `path` is what it was called with, as its owner wrote it; the child that it waits for, and the lock
    of a file, where it is about such.
    """

    name: str
    says: str
    rounds: int
    descriptors: int = 0
    behind: tuple[Behind, ...] = ()
    path: str = ""
    child_pid: int | None = None
    child_comm: str = ""
    file_lock: FileLock | None = None


class WorkerCall(Value, frozen=True):
    """The system call of the worker process for which a rank waits."""

    pid: int
    call: KernelCall


def is_loopback(host: str) -> bool:
    """Whether a host, as somebody wrote it, is loopback by itself: `localhost` or an address, no node's name."""
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


class Store(Value, frozen=True):
    """The store at which the ranks of a job meet, and what the sockets of one process show of it.

    `endpoint` is as its user wrote it, bounded and printable.
    """

    endpoint: str
    socket: PortUse

    @property
    def is_on_loopback(self) -> bool:
        """Whether its address is each node's own, as somebody wrote it."""
        return is_loopback(self.endpoint.rpartition(":")[0])

    @property
    def has_connection(self) -> bool:
        """Whether it serves the store, is connected to it, or its request to connect is on its way."""
        return self.socket not in ("none", "retries")


class Awaited(Value, frozen=True):
    """Somebody outside of the job for whom a process waits; `is_lost`: the kernel knows that nobody is there now."""

    who: str
    is_lost: bool = False


class Waits(Value, frozen=True):
    """Everything that a process waits for outside of itself, and its connections to other ranks, by the kernel.

    `frozen_cgroup` is the control group whose freezer holds it, `awaited` a peer outside of the job. `server` is the
    pid of the process that waits for clients and from which this one receives; it may be the process itself.
    `file_lock` is the lock of a file for which it waits; `shares_lock`: it waits for a lock in memory that another rank
    of its job maps too. `asks_rank` names the part of it that receives from another rank of its job. `stuck_on` is the
    file or pipe that it reads or writes and that no other process of its job has open. `waits_in_torch`: its main
    thread sleeps in code of torch, NCCL or CUDA; None if that was not seen. `store` is the store of its job;
    `awaits_store` names the thread that receives an answer of it. `peers` counts the connections to other ranks, None
    if they were not seen. `enclosed_at` is the place of its wait for other ranks, if no other node of the job reaches
    that place. Details: `ProcessDump`.
    """

    frozen_cgroup: str | None = None
    awaited: Awaited | None = None
    server: int | None = None
    file_lock: FileLock | None = None
    shares_lock: bool = False
    asks_rank: AsksRank | None = None
    stuck_on: str | None = None
    waits_in_torch: bool | None = None
    store: Store | None = None
    awaits_store: Literal["main", "thread"] | None = None
    peers: int | None = None
    enclosed_at: str | None = None
