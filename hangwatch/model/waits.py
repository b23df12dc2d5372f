"""Waits of a process, as the kernel shows them: system calls, their targets, locks and the store."""

from typing import Literal

from hangwatch.model.jobs import PortUse
from hangwatch.model.value import Value

ENDED_STATES = frozenset("ZXx")
"""State letters in /proc/PID/stat of a process that has ended: zombie or dead."""

STOPPED_STATES = frozenset("Tt")
"""State letters of a process that a signal or a tracer has stopped."""

SIGNAL_STOPPED_STATE = "T"
"""State letter of a process that a signal has stopped, and no tracer."""

BLOCKED_STATES = frozenset("D")
"""State letter of a process in a system call that no signal can interrupt."""

FUSE_WAITS = frozenset({"request_wait_answer"})
"""Kernel functions in which a process waits for a FUSE server. Its state is S at first (fs/fuse/dev.c)."""

AsksRank = Literal["main", "thread", "child"]
"""The part of a process that receives from another rank: the main thread, another thread, or an awaited child."""

Rests = Literal["sleep", "thread"]
"""A wait of a main thread that needs no other rank: for a time or a signal ("sleep"), or a thread of its process."""


CallObject = Literal["file", "pipe", "socket", "lock", "child"]
"""The object of a system call: a file (also a FIFO, or a path), a pipe, a socket, a file lock or a child process."""


class SystemCall(Value, frozen=True):
    """The system call that a thread is in: its number, name, kind and arguments.

    `descriptors` are its files and sockets. `child` is the pid of the awaited child, in the pid namespace of the
    process; None if the call awaits any child or none. `left_seconds` is the longest remaining time of a sleep or timed
    wait when the call was read, `until_unix_seconds` the same as Unix time. Both are None for a call without an end, or
    if the end was not read. `object` is the kind of the awaited object. It is None if another thread of the process or
    a GPU may end the call. `workers` are the dumped processes of the rank that may end it, directly or for each other.
    """

    number: int
    name: str = ""
    kind: Literal["receives", "awaits_child", "writes", "locks", "sleeps", "other"] = "other"
    descriptors: tuple[int, ...] = ()
    child: int | None = None
    left_seconds: float | None = None
    until_unix_seconds: float | None = None
    object: CallObject | None = None
    workers: tuple[int, ...] = ()


class Sleep(Value, frozen=True):
    """A sleep, or a wait with a timeout, of a main thread. It ends by itself.

    `until_unix_seconds` is its latest end, `seconds` the longest remaining time in any round, and `place` a short hash
    of the lines of its stack. `is_polling`: the rank sleeps again and again at these lines while the other ranks wait
    for it, see `detector.sleepers`.
    """

    until_unix_seconds: float
    seconds: float
    place: str
    is_polling: bool = False


class FileLock(Value, frozen=True):
    """A file lock on `path` that a process waits for, and the holder of the lock.

    `holder_pid` is None if the kernel lists no holder: it is on another node, or has ended and passed the lock to a
    child process. `by_child`: the process waits for a child, and that child waits for the lock.
    """

    path: str
    holder_pid: int | None = None
    holder_comm: str = ""
    by_child: bool = False


class CallTarget(Value, frozen=True):
    """The target of one descriptor of a system call. All texts are bounded and printable.

    `what` is the path of a file, the address of a peer, or the kernel's name of the target. `mount` is the file system
    of a file. `is_remote`: another machine or a process serves that file system.
    `is_local_device`: it is on a disk in this machine. `other_pid`, `other_comm` and
    `other_state` identify a process of this node that has the other end of a pipe, Unix socket or connection. This may
    be the rank itself. `other_pid` is None if no such process was seen. `is_lost`: by the kernel, the other end is
    closed.
    """

    kind: Literal["file", "pipe", "connection", "unix", "listening", "other"]
    what: str
    mount: str = ""
    is_remote: bool = False
    is_local_device: bool = False
    other_pid: int | None = None
    other_comm: str = ""
    is_lost: bool = False
    other_state: str = ""


class KernelCall(Value, frozen=True):
    """The system call that a main thread was in during the last `rounds` rounds of a capture, and still after it.

    `name` is the kernel's name of the call, `says` the name with a preposition for sentences. `descriptors` is the
    number of its descriptors, `behind` the targets of the first few. `path` is the path argument, absolute; of a
    process in another mount namespace than the node, it begins with /proc/PID/root. `child_pid`, `child_comm` and
    `child_state` are set if the call awaits a child, `file_lock` if it awaits a file lock. `thread` is the
    name of the thread in the call, if the main thread waits for that thread. `wchan` is the kernel function in which it
    sleeps, "" if unknown. `is_held`: a signal has stopped every process that can end the call, and all of them belong
    to the job. `may_time_out`: the call has a timeout as an argument.
    """

    name: str
    says: str
    rounds: int
    descriptors: int = 0
    behind: tuple[CallTarget, ...] = ()
    path: str = ""
    child_pid: int | None = None
    child_comm: str = ""
    child_state: str = ""
    file_lock: FileLock | None = None
    thread: str = ""
    wchan: str = ""
    is_held: bool = False
    may_time_out: bool = False

    @property
    def has_object(self) -> bool:
        """True if its file, peer, child or lock is known. The name alone explains little: each lock is a futex call."""
        return bool(self.behind or self.path or self.child_pid or self.file_lock)


class WorkerCall(Value, frozen=True):
    """The system call of the worker process for which a rank waits."""

    pid: int
    call: KernelCall


def is_loopback(host: str) -> bool:
    """True if a host, as a user wrote it, is `localhost` or a loopback address. A name of a node is not resolved."""
    import ipaddress  # not at the start: 0.3 MiB in the process that owns the driver

    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


class Store(Value, frozen=True):
    """The store of a job (MASTER_ADDR), and the state of one process's sockets to it.

    `endpoint` is the address as the user wrote it, bounded and printable.
    """

    endpoint: str
    socket: PortUse

    @property
    def is_on_loopback(self) -> bool:
        """True if its address is a loopback address, so that each node has a different store."""
        return is_loopback(self.endpoint.rpartition(":")[0])

    @property
    def has_connection(self) -> bool:
        """True if the process serves the store, is connected to it, or its request to connect is pending."""
        return self.socket not in ("none", "retries")


WaitEnd = Literal["outside", "program", "sleeps", "lost", "held", "cycle", "process", "unknown"]
"""The end of a wait: a peer outside of the job, a program on this node that is not of the job, a sleep, a closed
connection, a process that is stopped, has ended or is in state D, the waiting process itself, a process of the job, or
a process that was not found."""


class Awaited(Value, frozen=True):
    """The end of a wait that leads out of a process, and its name in a sentence. Its `end` is never "process"."""

    name: str
    end: WaitEnd = "outside"

    @property
    def says(self) -> str:
        """The words for a user: its name, and that it is gone if so."""
        return self.name + (", which is gone" if self.end == "lost" else "")

    @property
    def may_answer(self) -> bool:
        """True if the wait may end by itself."""
        return self.end in ("outside", "program", "sleeps")


class Waits(Value, frozen=True):
    """The waits of a process for anything outside of itself, and its connections to other ranks, by the kernel.

    A field is None if the process has no such wait, or if it was not seen.

    Other processes:
    * `frozen_cgroup`: the control group that freezes it, as its folder below /sys/fs/cgroup. `tracer`: the process that
      traces it while it is stopped ("gdb, pid 4711").
    * `awaited`: the end of the wait of its main thread, outside of the job.
    * `server`: pid of the process that waits for clients, with its main thread on a listening socket. It is this
      process, or a rank or ancestor to which all of the main thread's awaited connections lead.
    * `job_server`: pid of any process of the job on this node that waits for clients.
    * `file_lock`: the file lock that it waits for, or tries to take again and again. `shares_lock`: it waits for a lock
      in memory that another rank maps, too.
    * `asks_rank`: the part that receives from another rank on this node: the main thread, another thread while the main
      thread sleeps, or an awaited child.
    * `store`: the store of the job, with the state of the process's sockets. `awaits_store`: the thread that receives
      from the store: the main thread or, if that sleeps, another.

    The main thread:
    * `object`: the kind of object that it waited for in all rounds. It is set over all rounds only.
    * `stuck_on`: the file or pipe that it reads or writes, if no other process of the job has it open.
    * `waits_in_torch`: it slept in code of torch, NCCL or CUDA. The calling line of Python does not matter.
      `has_device`: its process maps a device, for example a GPU. Without a device, it waits for no GPU.

    Connections:
    * `peers`: number of connections to other ranks of its job. These are open TCP connections to the ranks or their
      store (to any address, if the job has ranks on other nodes). Pipes and Unix sockets on which the main thread
      receives count, too, except those to `server`.
    * `active_peers`: number of those connections that have carried bytes since the first round, or on which the main
      thread has received. In the first round all connections count.
    * `enclosed_at`: the address at which it waits for other ranks, if the job has ranks on other nodes that cannot
      reach this address.
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
    has_device: bool | None = None
    store: Store | None = None
    awaits_store: Literal["main", "thread"] | None = None
    peers: int | None = None
    active_peers: int | None = None
    enclosed_at: str | None = None
    object: CallObject | None = None
