"""Dumps, the raw content of a capture for every rank: probes -> capture -> stacks.grouping."""

from __future__ import annotations

from typing import Literal

from hangwatch.model.flight_records import RankRecords
from hangwatch.model.gpus import GpuUse, PortTraffic
from hangwatch.model.jobs import Died, Waiting
from hangwatch.model.stacks import Thread
from hangwatch.model.value import Fault, Value
from hangwatch.model.waits import AsksRank, Awaited, FileLock, KernelCall, Store, SystemCall, WorkerCall


class ThreadCounters(Value, frozen=True):
    """Kernel counters of one thread: CPU time (user and system), system time alone, context switches.

    `delay_seconds` is the time in which it was ready to run and waited for a core. A switch is voluntary if the thread
    slept or waited, involuntary if the core was taken from it. `io_bytes` were read and written by calls (a call counts
    when it returns), or from and to storage (also in a long call), whichever is more; receive and send do not count.
    """

    read_monotonic_seconds: float
    cpu_seconds: float
    system_seconds: float | None = None
    delay_seconds: float | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None
    io_bytes: int | None = None


class ProcessDump(Value, frozen=True):
    """One process in one round: its stacks, or the fault in their place, and its state by the kernel.

    None in a field: not seen. `state` is the letter of /proc/PID/stat, None if the process was gone. `state_after` is
    read again after the dump, so that a process which the dump left stopped is noticed. `io_bytes` is rchar + wchar of
    /proc/PID/io, `fetched_bytes` its read_bytes: bytes from storage, including pages of mapped files. `called` is the
    device (major:minor) of the file system of the file that it is in a system call on; read only if py-spy itself
    hangs.

    Of the main thread: `call` is the system call it was in; `main_before` and `main_after` are its counters before and
    after the dump, which causes switches itself. `awaited` is a peer outside of the job. If it is in `D` in a call that
    writes: `device_bytes` is what the device of the file has written, `dirty_bytes` what the whole node has yet to
    write. `waits_in_torch`: it slept in code of torch, NCCL or CUDA, whatever line of Python called that.

    `socket_bytes` were carried by the TCP connections of the process since the first round, `rank_bytes` by those to
    other ranks, `object_bytes` by the one that its main thread is in a call on. `children_bytes` and
    `children_cpu_seconds` are what its child processes moved and used, without workers; read only if it waits for a
    child. `frozen_cgroup` is the control group that freezes it, `tracer` the process that traces it while it is stopped
    ("gdb, pid 4711"). `peers` counts its connections to other ranks of
    its job: open TCP connections to them or to their store (to any address, if the job has ranks on other nodes), and
    pipes and Unix sockets on which its main thread receives, except those to its `server`. `active_peers` counts those
    of them that have carried bytes since the first round or on which the main thread has received; in the first round
    all. `thread_in_file`: its main thread waits for a thread, and a thread is in a call on a file, pipe or child.

    `server` is the process that waits for clients, with its main thread on a listening socket: this process, or a rank
    or a process above it to which all connections lead that its main thread receives from. `job_server` is a process of
    its job on this node that waits for clients, whether it receives from that or not. `file_lock` is the file lock
    that its main thread waits for; `shares_lock`: it waits for a lock in memory that another rank of its job maps, too.
    `store` is what its sockets show of the store of its job; `awaits_store` names the thread that receives an answer
    from the store: the main thread or, if that sleeps, another. `asks_rank` names what receives from another rank of
    its job on this node: the main thread; another thread, if the main thread sleeps; or a child process that it waits
    for. `stuck_on` is the file or pipe that its main thread reads or writes, if no other process of its job has it
    open. `enclosed_at` is the place at which it waits for others of its job, if no other node reaches that place while
    the job has ranks there.

    `recorders` are PyTorch's flight recorders in its memory, one for each library, shortened by
    `collectives.rank_records.drop_unneeded`; `recorder_faults` say why a recorder could not be read. Both are empty
    for a worker, and if the recorders were not read in this round.
    """

    taken_monotonic_seconds: float
    threads: tuple[Thread, ...] = ()
    fault: Fault | None = None
    state: str | None = None
    state_after: str | None = None
    wchan: str | None = None
    called: str | None = None
    kernel_stack: tuple[str, ...] = ()
    cpu_seconds: float | None = None
    io_bytes: int | None = None
    fetched_bytes: int | None = None
    duration_seconds: float | None = None
    call: SystemCall | None = None
    main_before: ThreadCounters | None = None
    main_after: ThreadCounters | None = None
    socket_bytes: int | None = None
    children_bytes: int | None = None
    children_cpu_seconds: float | None = None
    awaited: Awaited | None = None
    device_bytes: int | None = None
    dirty_bytes: int | None = None
    frozen_cgroup: str | None = None
    tracer: str | None = None
    peers: int | None = None
    active_peers: int | None = None
    thread_in_file: bool = False
    server: int | None = None
    job_server: int | None = None
    file_lock: FileLock | None = None
    shares_lock: bool = False
    asks_rank: AsksRank | None = None
    stuck_on: str | None = None
    store: Store | None = None
    awaits_store: Literal["main", "thread"] | None = None
    enclosed_at: str | None = None
    recorders: tuple[RankRecords, ...] = ()
    recorder_faults: tuple[Fault, ...] = ()
    waits_in_torch: bool | None = None
    rank_bytes: int | None = None
    object_bytes: int | None = None


class KernelLine(Value, frozen=True):
    """A kernel log line about a rank, a file system that it has mounted, or a device of its node.

    `name` is its row of kernel_lines.toml, `subject` the thing that the line names, `where` the library in which it
    happened. A process chooses the text of `subject` and `where`. `text` is the line, bounded and printable.
    """

    name: str
    text: str
    unix_seconds: float
    subject: str = ""
    where: str = ""


class OutputEnd(Value, frozen=True):
    """The end of a regular file to which a rank writes: its raw bytes, and the identity and size of the file.

    `file` is equal for ranks that share it; `path` is printable and under the job's control.
    """

    file: str
    path: str
    size_bytes: int
    text: bytes
    is_deleted: bool = False


class LastLines(Value, frozen=True):
    """The last lines of a file to which a rank writes, bounded and printable; the job controls the text."""

    path: str
    lines: tuple[str, ...]


class ProcessDetails(Value, frozen=True):
    """Details of a process from psutil; None or empty if it could not be read. The job controls the texts.

    `cpus` are those on which it may run, folded. Each list has at most 32 entries, bounded and printable.
    """

    resident_bytes: int | None = None
    shared_bytes: int | None = None
    swap_bytes: int | None = None
    niceness: int | None = None
    cpus: str = ""
    threads: int | None = None
    descriptors: int | None = None
    connections: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


class RankId(Value, frozen=True):
    """Identity of a rank, for people and across nodes. A field is None if the source does not tell it.

    `title` is the name that the program gave to its process (setproctitle): letters, digits and `_:.-`.
    """

    node: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    title: str | None = None

    def sort_key(self) -> tuple[int, str, int, int]:
        """Order by global rank, then node, local rank and pid; unknown numbers last."""
        last = 1 << 62
        return (
            last if self.rank is None else self.rank,
            self.node or "",
            last if self.local_rank is None else self.local_rank,
            last if self.pid is None else self.pid,
        )


class WorkerDump(Value, frozen=True):
    """The rounds of one process that works for a rank; `waits_for_mount` as in `RankDump`."""

    pid: int
    comm: str
    rounds: tuple[ProcessDump, ...]
    waits_for_mount: bool = False


class LaunchCount(Value, frozen=True):
    """Number of launches of one operation by one rank, in a communicator with unequal numbers.

    The source is NCCL, with the same numbers in every answer. `communicator` is its hash, `size` its number of ranks.
    `count` is None if NCCL does not reach the rank; `lowest` and `highest` are those of all its ranks that answered, on
    any node. `is_whole`: all ranks answered. `elsewhere` lists those of its processes that are not ranks of this node
    and have launched the least, or are not reached.
    """

    communicator: str
    size: int
    operation: str
    count: int | None
    lowest: int
    highest: int
    is_whole: bool = True
    elsewhere: tuple[str, ...] = ()


class NcclRas(Value, frozen=True):
    """Report of NCCL's RAS about one rank, from `answers` answers within `seconds` seconds.

    The rank is in `communicators` communicators. In `even` of them all ranks have launched the same numbers of
    operations, and launched nothing between the answers. `launched` are those that make no progress and are uneven.
    """

    version: str
    answers: int
    seconds: float
    communicators: int
    even: int
    launched: tuple[LaunchCount, ...] = ()


class RankDump(Value, frozen=True):
    """Everything a capture holds of one rank: one `ProcessDump` per round, its workers, its GPU numbers at that time.

    `gone` is true if this node answers and the process of the rank does not exist; it is never set for a rank of
    another node or a rank that merely did not answer. `waiting` is set if this is a launcher without ranks.
    `silent_mount` names the file system under its program that does not respond, so that py-spy hangs on it;
    `waits_for_mount`: in every round the kernel showed it in a call on that file system.

    `busy_power_ratio` is the position of the power between the floor (0) and the busy level (1) of this GPU, None
    without a history; `works_lightly`: GPUs draw as much as that busy level in a hang, too. NVLink and PCIe bytes are
    the sum of both directions of its busiest GPU, over the rounds. `gpu_use` is that of the GPU with the highest SM
    use, `ports` are those of its node.

    `kernel_call`, `last_lines` and `details` are read after the ranks are judged, only for ranks that are named or to
    be checked first; so is `worker_call`, if the rank waits for a worker. `kernel_lines` are those since the job began.
    `nccl_ras` is None if NCCL was not asked or did not respond; `nccl_ras_fault` says why. `died` as in `EndedProcess`.
    `most_peers` as in `Rank`.
    """

    id: RankId
    rounds: tuple[ProcessDump, ...] = ()
    workers: tuple[WorkerDump, ...] = ()
    gone: bool = False
    power_watts: float | None = None
    utilization_ratio: float | None = None
    busy_power_ratio: float | None = None
    works_lightly: bool = False
    nvlink_bytes_per_second: float | None = None
    pcie_bytes_per_second: float | None = None
    gpu_use: GpuUse | None = None
    ports: PortTraffic | None = None
    silent_mount: str | None = None
    waits_for_mount: bool = False
    waiting: Waiting | None = None
    kernel_call: KernelCall | None = None
    worker_call: WorkerCall | None = None
    kernel_lines: tuple[KernelLine, ...] = ()
    last_lines: tuple[LastLines, ...] = ()
    details: ProcessDetails | None = None
    nccl_ras: NcclRas | None = None
    nccl_ras_fault: Fault | None = None
    died: Died | None = None
    most_peers: int = 0


class Setting(Value, frozen=True):
    """A value of a variable, None if it is not set, and the first 64 of the `count` ranks that have it."""

    value: str | None
    ranks: tuple[RankId, ...]
    count: int


class Difference(Value, frozen=True):
    """A variable that differs between ranks: its values, the rarest first, and what the difference explains."""

    name: str
    why: str
    settings: tuple[Setting, ...]

    @property
    def minority(self) -> tuple[RankId, ...]:
        """The ranks that have another value than most."""
        return tuple(rank for setting in self.settings[:-1] for rank in setting.ranks)


class Environment(Value, frozen=True):
    """Start environment of the ranks: the variables that `tables/environment_names` allows, bounded and printable."""

    differences: tuple[Difference, ...] = ()
    common: tuple[tuple[str, str], ...] = ()


class Capture(Value, frozen=True):
    """Stacks of every rank of a job on this node, taken in one or more rounds."""

    job_id: str
    node: str
    started_unix_seconds: float
    duration_seconds: float
    rounds: int
    ranks: tuple[RankDump, ...]
    world_size: int | None = None
    notes: tuple[str, ...] = ()
    job_key: str = ""
    environment: Environment | None = None
