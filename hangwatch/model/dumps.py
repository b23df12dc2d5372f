"""Dumps, what a look holds of every rank: probes -> hang.capture -> hang.grouping."""

from __future__ import annotations

from typing import Literal

from hangwatch.model.flight_records import RankRecords
from hangwatch.model.gpus import GpuUse, PortTraffic
from hangwatch.model.jobs import Died, Waiting
from hangwatch.model.stacks import Thread
from hangwatch.model.value import Fault, Value
from hangwatch.model.waits import AsksRank, Awaited, FileLock, KernelCall, Store, SystemCall, WorkerCall


class ThreadCounters(Value, frozen=True):
    """What the kernel counted of one thread: seconds on a core (user and system), system time alone, its switches.

    `delay_seconds`: ready to run, it waited for a core. It gave the core away itself in voluntary switches (it slept,
    it waited), and lost it in involuntary ones.
    """

    read_monotonic_seconds: float
    cpu_seconds: float
    system_seconds: float | None = None
    delay_seconds: float | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None


class ProcessDump(Value, frozen=True):
    """One process in one round: its stacks, or the fault that stands in their place, and what the kernel says of it.

    `state` is the letter of /proc/PID/stat, None when the process was gone. `io_bytes` is rchar + wchar of
    /proc/PID/io, `fetched_bytes` its read_bytes: what storage gave, for pages of mapped files as well. `state_after` is
    read again once the dump is over, so that a process left stopped is noticed. `called` is the device (major:minor) of
    the file system on whose file it is in a system call, asked only where py-spy itself hangs.

    Of the main thread: `call`, the system call it was in, and its counters before and after the dump, which makes
    switches of its own. `socket_bytes` were carried by its TCP connections since the first round, `children_bytes` and
    `children_cpu_seconds` are what its child processes moved and used that are no workers, asked only where it waits
    for one. `awaited` is outside of the job. Of one that is in `D` in a call that writes: `device_bytes` that the
    device of the file has written, and `dirty_bytes` that wait in the whole node for being written. None: not seen.

    `frozen_cgroup` is the control group whose freezer holds it. `peers` are the ways that lead from it to other ranks
    of its job: open TCP connections to them or to their store (to anybody, where the job has ranks on other nodes), and
    pipes and Unix sockets on which its main thread receives, but for such to its `server`. None: not seen.

    `server` is the process that waits for clients, its main thread on a socket that listens: itself, or a rank or a
    process above it to which all lead from which its own main thread receives. `file_lock` is the lock of a file for
    which its main thread waits, `shares_lock` whether it waits for a lock in memory that another rank of its job maps,
    too. `store` is what its sockets show of the store of its job; `awaits_store` says which thread receives an answer
    of it: the main thread, or, where that sleeps, another. `asks_rank` says who of it receives from another rank of its
    job here: the main thread, where that sleeps another, or a process that it started and waits for. `stuck_on` is the
    file or pipe that its main thread reads or writes, where nobody of its job has it open. `enclosed_at` is where it
    waits for others of its job, if no other node reaches that while the job has ranks there. `recorders` are PyTorch's
    flight recorders in its memory, one for each library, shortened (`hang.recorded.shortened`); `recorder_faults` say
    why one could not be read. None of both: it is a worker, or was not asked any more in this round. `waits_in_torch`:
    its main thread slept in code of torch, NCCL or CUDA, whatever line of Python called that.
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
    peers: int | None = None
    server: int | None = None
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


class KernelLine(Value, frozen=True):
    """A line of the kernel's log about a rank, a file system that it has mounted, or a device of its node.

    `name` is its row of kernel_lines.toml, `subject` what it names, `where` the library in which it happened; a process
    chooses the names of both. `text` is the line, bounded and printable.
    """

    name: str
    text: str
    unix_seconds: float
    subject: str = ""
    where: str = ""


class OutputEnd(Value, frozen=True):
    """The end of a regular file to which a rank writes: its bytes, as they are, and which file of which size it is.

    `file` is equal for ranks that share it; `path` is printable, and the job's word.
    """

    file: str
    path: str
    size_bytes: int
    text: bytes
    is_deleted: bool = False


class LastLines(Value, frozen=True):
    """The last lines of a file to which a rank writes, bounded and printable: the job's words."""

    path: str
    lines: tuple[str, ...]


class ProcessDetails(Value, frozen=True):
    """What psutil tells of a process; None, or nothing listed, where it could not be read. Texts are the job's words.

    `cpus` are those on which it may run, folded; of the lists the first 32, bounded and printable.
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
    """Who a rank is, for people and across nodes. Fields are None where the source does not say."""

    node: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None

    def sort_key(self) -> tuple[int, str, int, int]:
        """Orders by global rank, then node, local rank and pid; unknown numbers last."""
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


class Launched(Value, frozen=True):
    """How many collectives of one operation a rank has launched in one communicator whose ranks are not alike.

    By NCCL's own word, the same in every answer. `communicator` is its hash, `size` how many ranks it has. `count` is
    None where NCCL does not reach the rank; `lowest` and `highest` are those of all its ranks that answered, on
    whatever node. `is_whole`: all of them did. `elsewhere` says which of its processes that are no ranks of this node
    have launched the least, or are not reached.
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
    """What NCCL's RAS said of one rank in so many answers, the last so many seconds after the first.

    It is in so many `communicators`; in `even` of them all ranks have launched as much of everything, and launched
    nothing more between the answers. `launched` are those that stand still and are not even.
    """

    version: str
    answers: int
    seconds: float
    communicators: int
    even: int
    launched: tuple[Launched, ...] = ()


class RankDump(Value, frozen=True):
    """Everything a capture holds of one rank: one `ProcessDump` per round, its workers, its GPU numbers at that time.

    `gone` is true when this node answers and the process of the rank does not exist; it is never set for a rank of
    another node or one that merely did not answer. `waiting` is set where this is no rank but a launcher that has none.
    `silent_mount` names the file system under its program that gives no answer, so that py-spy hangs on it;
    `waits_for_mount`: in every round the kernel showed it in a call on that one. `busy_power_ratio`: where its power
    lies between the floor (0) and the busy level (1) of its own GPU, None without a history; `works_lightly`: that busy
    level is one that cards draw in a hang, too. What its NVLinks and its PCIe carried per second is the sum of both
    directions, of the busiest of its GPUs, over the rounds; `gpu_use` is that of the GPU whose SM had most to do, and
    `ports` are those of its node. `kernel_call` is read once the ranks are judged, of those that are named or to be
    looked at first, and so are `worker_call`, where it waits for a worker, `last_lines` and `details`. `kernel_lines`
    are those of the kernel's log since the job began. `nccl_ras` is None where NCCL was not asked, and `nccl_ras_fault`
    says why, or why it said nothing. `died` as in `EndedProcess`.
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


class Setting(Value, frozen=True):
    """A value of a variable, None where it is not set, and the ranks that have it: the first 64 of so many."""

    value: str | None
    ranks: tuple[RankId, ...]
    count: int


class Difference(Value, frozen=True):
    """A variable that not all ranks have alike: its values, the rarest first, and what it explains."""

    name: str
    why: str
    settings: tuple[Setting, ...]

    @property
    def odd(self) -> tuple[RankId, ...]:
        """The ranks that have another value than most."""
        return tuple(rank for setting in self.settings[:-1] for rank in setting.ranks)


class Environment(Value, frozen=True):
    """What the ranks were started with, of the variables that `tables/environment_names` allows: bounded, printable."""

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
