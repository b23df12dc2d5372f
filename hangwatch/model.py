"""Every value that passes between rooms, in the order in which they flow. Read this first.

All values are frozen. Units stand in the names; ratios run from 0 to 1; times named `*_unix_seconds` are wall clock
(for people and for other nodes), times named `*_monotonic_seconds` are CLOCK_MONOTONIC (for intervals).

Asking the machine has three outcomes, everywhere the same: a value; `None`, the device does not have it (no error,
nothing is exported); `Fault`, it should have answered and did not. Never 0, -1 or "N/A" in place of a reading.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from enum import Enum
from typing import Literal, TypeAlias

import msgspec

from hangwatch.flight_record import Library, RankRecords


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all values: immutable, compared by content, built by keyword."""


class Fault(Value, frozen=True):
    """Something that should have answered and did not.

    `subject` is what was asked ("gpu 3", "pid 4711"), `reason` a CamelCase word for machines ("GpuIsLost"), `detail`
    the foreign error in its own words, `remedy` what to type or do, empty when there is nothing to do. `about` is
    "target" where the fault says something of what was asked, "tool" where it may be ours alone: said by the door that
    makes the fault, which knows; without a word it is ours, and nobody is accused by it.
    """

    subject: str
    reason: str
    detail: str
    remedy: str = ""
    about: Literal["target", "tool"] = "tool"


# --- 1. GPUs: probes.nvml -> daemon ------------------------------------------------------------------------------


class GpuSample(Value, frozen=True):
    """One reading of one GPU. A field is None where this GPU does not have it, or where `faults` says why."""

    index: int
    uuid: str
    name: str | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_clock_hertz: float | None = None
    temperature_celsius: float | None = None
    energy_joules: float | None = None
    pids: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()


class GpuSweep(Value, frozen=True):
    """All GPUs of the node, read once. One lost GPU of eight is seven samples and one fault."""

    taken_monotonic_seconds: float
    taken_unix_seconds: float
    gpus: tuple[GpuSample, ...] = ()
    faults: tuple[Fault, ...] = ()
    driver_version: str | None = None

    @property
    def unread(self) -> dict[int, Fault]:
        """The GPUs without a reading, by index, each with its fault."""
        read = {f"gpu {gpu.index}" for gpu in self.gpus}
        silent = {fault.subject: fault for fault in self.faults if fault.subject not in read}
        return {int(subject[4:]): fault for subject, fault in silent.items() if subject[4:].isdecimal()}


class GpuUse(Value, frozen=True):
    """What a GPU did over some seconds by its own counters (GPM of NVML, from Hopper on), as ratios of what it could.

    `sm_ratio`: of its multiprocessors (SM) so many had a kernel. `tensor_ratio`: the time in tensor operations.
    `dram_ratio`: of the bandwidth of its memory.
    """

    sm_ratio: float
    tensor_ratio: float
    dram_ratio: float


class GpuTraffic(Value, frozen=True):
    """What the links of one GPU have carried, as (sent, received), and what it did.

    Bytes since some moment that nobody knows, counted by the GPU: they wrap. `nvlink_bytes` is data without protocol,
    over all NVLinks. Each pair is None where this GPU or driver counts nothing, counts in 32 bits, or answers an error;
    all are with MIG, where they are those of other instances as well. `pcie_bytes_per_second`, only without such a
    counter, is what NVML saw in 20 ms. `use` is that since the reading before, None in the first and after a minute.
    """

    index: int
    uuid: str
    taken_monotonic_seconds: float
    nvlink_bytes: tuple[int, int] | None = None
    pcie_bytes: tuple[int, int] | None = None
    pcie_bytes_per_second: tuple[float, float] | None = None
    use: GpuUse | None = None


class PortCounters(Value, frozen=True):
    """One port at one time: what it has carried in both directions, and its counters of errors."""

    name: str
    carried_bytes: int
    errors: tuple[tuple[str, int], ...] = ()


class PortTraffic(Value, frozen=True):
    """What the InfiniBand and RoCE ports of a node did during a look.

    `bytes_per_second` is the sum over all ports and both directions. `worse` are the counters of errors that grew, as
    `mlx5_3/1 link_downed +1`.
    """

    bytes_per_second: float
    worse: tuple[str, ...] = ()


class TrafficSweep(Value, frozen=True):
    """What the links of all GPUs have carried, read once."""

    gpus: tuple[GpuTraffic, ...] = ()
    faults: tuple[Fault, ...] = ()


class SamplerStatus(Value, frozen=True):
    """How the sampling of GPUs itself fares.

    `alive`: the driver is open and answers. `stalled`: it was asked and did not answer within its deadline. `fault`
    says why there are no samples ("DriverNotFound" on a machine without the driver). `restarts` counts sampling
    processes that had to be replaced, `abandoned` those that could not even be killed and still exist.
    """

    alive: bool = False
    stalled: bool = False
    restarts: int = 0
    abandoned: int = 0
    fault: Fault | None = None
    last_answer_monotonic_seconds: float | None = None


# --- 2. Processes and jobs: probes.procs -> hang.jobs --------------------------------------------------------------


class ProcessId(Value, frozen=True, order=True):
    """A process that cannot be confused with a later one of the same pid: pid and start time (ticks since boot)."""

    pid: int
    start_ticks: int


class Process(Value, frozen=True):
    """One process as /proc shows it. `environ` holds only variables of `launcher_table`, as its user wrote them.

    `uid` is the real user id in the namespace of the daemon, `cgroups` are the different paths of /proc/PID/cgroup.
    `is_setuid` where its effective or saved user id is another: then it is more than a process of that user.
    """

    id: ProcessId
    parent_pid: int
    comm: str
    state: str
    cmdline: tuple[str, ...] = ()
    environ: dict[str, str] = {}
    uid: int | None = None
    is_setuid: bool = False
    user: str | None = None
    cgroups: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


class Worker(Value, frozen=True):
    """A process that works for a rank and is no rank itself: a DataLoader worker, a map worker."""

    id: ProcessId
    comm: str


class Rank(Value, frozen=True):
    """One rank of a job on this node. `gpu_uuids` are those it holds by NVML, else those its environment gives it."""

    id: ProcessId
    rank: int | None
    local_rank: int | None
    gpu_uuids: tuple[str, ...] = ()
    workers: tuple[Worker, ...] = ()


INTERFACES_OF_ONE_NODE = frozenset({"lo", "docker0"})
"""Over which no other node is reached: the loopback, and docker's bridge with the same network on each."""

PortUse: TypeAlias = Literal["serving", "connected", "silent", "retries", "none"]
"""What a process has to do with a port that somebody serves; "silent": its request to connect has no answer.

"retries": it has no connection and its main thread sleeps, as one does between attempts that are refused.
"""


class Waiting(Value, frozen=True):
    """A launcher that has no rank: what it was told, as its user wrote it, and what its own sockets show.

    `nodes` is how many it wants ("2", "1:4"), `endpoint` where the launchers of all nodes meet; empty where it was not
    told. All are bounded, printable and believed for words only. What follows is None until it is measured: `seconds`
    since it began; `socket`: it is "serving" the endpoint itself, "connected" to it, its request to connect is "silent"
    (without an answer), or it has "none" there. `peers` are the addresses at the other end, 8 at most.
    """

    launcher: str
    run_id: str = ""
    nodes: str = ""
    endpoint: str = ""
    seconds: float | None = None
    socket: PortUse | None = None
    peers: tuple[str, ...] = ()

    @property
    def port(self) -> int | None:
        """The port of the endpoint, None where it was told none that can be one."""
        number = self.endpoint.rpartition(":")[2]
        is_port = number.isascii() and number.isdecimal() and len(number) < 6 and 0 < int(number) < 1 << 16
        return int(number) if is_port else None

    @property
    def is_for_nodes(self) -> bool:
        """Whether it was told of more than one node."""
        return self.nodes not in ("", "1", "1:1")


class JobName(Value, frozen=True):
    """Which job is meant: its name for people, and the key that tells it from every other. It reads as the name."""

    job_id: str
    job_key: str

    @property
    def labels(self) -> dict[str, str]:
        """What every series about it is labelled with."""
        return {"job_id": self.job_id, "job_key": self.job_key}

    def __str__(self) -> str:
        return self.job_id


class Died(Value, frozen=True):
    """What the files that a dead rank left say of its end: `text` is the owner's word, bounded and printable.

    `of_others`: it complains of a lost or silent rank, so it followed somebody. `is_first`: of all that died on its
    node none has died before it, as far as something tells.
    """

    text: str
    unix_seconds: float
    of_others: bool = False
    is_first: bool = False


class EndedProcess(Value, frozen=True):
    """A rank of a job, or a worker of it, whose process is gone: a scan that ended at `gone_unix_seconds` missed it.

    `died` is known once what it left has been read, see `crash`.
    """

    id: ProcessId
    rank: int | None
    local_rank: int | None
    gone_unix_seconds: float
    is_worker: bool = False
    died: Died | None = None


class Job(Value, frozen=True):
    """All ranks of one job on this node; or its launcher, `launcher_id`, while it has none (`waiting`).

    `job_id` is a name for people, which the job's user chose; `job_key` is a checksum of that, of the owner that the
    kernel names, of the address at which the ranks meet, and of the node where the job is on one node only: what is
    equal on all nodes of a job, and cannot be made equal by somebody else. `owner` and `user` are that owner and the
    name that the environment gives; `uid` is the user id that all ranks have on this node, None where they differ or a
    rank is a setuid program, and in a pod, whose users are not those of the node. `more_launcher_ids` are the launchers
    of its other pods or containers on this node. `share` says who is given a share of
    what one node bears: the owner, and the pod or container where the owner alone tells too little. `holds_gpu`: the
    driver lists one of its ranks. `absent_local_ranks` are those that should be on this node and have no process:
    [first, last] of each range, since an environment says how many there should be. `ended` are processes of it that
    were seen and are gone, so many at most. `notes` are sentences about what was found.

    `job_name` is what the user calls it where a scheduler or an operator tells (Slurm's job name, the PyTorchJob),
    `program` the script that its ranks run: both bounded, of plain characters, and believed for words only.
    """

    job_id: str
    launcher: str
    launcher_id: ProcessId | None
    ranks: tuple[Rank, ...]
    world_size: int | None = None
    local_world_size: int | None = None
    absent_local_ranks: tuple[tuple[int, int], ...] = ()
    command: str = ""
    user: str | None = None
    environ: dict[str, str] = {}
    job_key: str = ""
    owner: str = ""
    uid: int | None = None
    share: str = ""
    holds_gpu: bool = False
    notes: tuple[str, ...] = ()
    waiting: Waiting | None = None
    more_launcher_ids: tuple[ProcessId, ...] = ()
    ended: tuple[EndedProcess, ...] = ()
    job_name: str = ""
    program: str = ""

    @property
    def launcher_ids(self) -> tuple[ProcessId, ...]:
        """The launchers of its ranks on this node: one, none, or one in each of its pods or containers."""
        return (() if self.launcher_id is None else (self.launcher_id,)) + self.more_launcher_ids

    @property
    def processes(self) -> tuple[ProcessId, ...]:
        """The processes that are the job: its ranks, or its launcher while it has none."""
        return tuple(rank.id for rank in self.ranks) or (self.launcher_ids if self.waiting else ())

    @property
    def key(self) -> str:
        """What tells this job from every other; the name in an incident of before there were keys."""
        return self.job_key or self.job_id

    @property
    def name(self) -> JobName:
        """Its name and its key."""
        return JobName(job_id=self.job_id, job_key=self.key)

    @property
    def absent(self) -> tuple[range, ...]:
        """The local ranks that should be on this node and have no process, in rising order."""
        return tuple(range(first, last + 1) for first, last in self.absent_local_ranks)

    @property
    def pids(self) -> frozenset[int]:
        """The processes of its ranks and of their workers."""
        ids = [process for rank in self.ranks for process in (rank.id, *(worker.id for worker in rank.workers))]
        return frozenset(process.pid for process in ids)

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """The GPUs that the ranks hold, each once, in the order of ranks."""
        return tuple(dict.fromkeys(uuid for rank in self.ranks for uuid in rank.gpu_uuids))

    @property
    def ranks_here(self) -> int:
        """How many ranks it should have on this node, those without a process included."""
        return len(self.ranks) + sum(last + 1 - first for first, last in self.absent_local_ranks)

    @property
    def is_elsewhere_too(self) -> bool:
        """Whether it has ranks that are not of this node, as far as anything says how many there are."""
        return (self.world_size or 0) > max(len(self.ranks), self.local_world_size or 0)


class LeftOut(Value, frozen=True):
    """What an owner has on this node beyond what is watched of him: whole jobs, ranks, and processes not even read."""

    owner: str
    jobs: int = 0
    ranks: int = 0
    processes: int = 0

    def __str__(self) -> str:
        return f"of {self.owner}: {self.jobs:,} jobs with {self.ranks:,} ranks, {self.processes:,} processes not read"


class FoundJobs(Value, frozen=True):
    """What a scan found: the jobs to watch, and what was left out."""

    jobs: tuple[Job, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


# --- 3. Detection: hang.detector -> daemon -------------------------------------------------------------------------


class JobState(str, Enum):
    """Where a job stands; see docs/architecture.md for the transitions."""

    STARTING = "starting"
    TRAINING = "training"
    QUIET = "quiet"
    SUSPECTED = "suspected"
    HUNG = "hung"
    STALLED = "stalled"
    WAITS_ELSEWHERE = "waits_elsewhere"
    SUSPENDED = "suspended"
    OVER = "over"
    RECOVERED = "recovered"
    ENDED = "ended"


OPEN_STATES = frozenset({JobState.HUNG, JobState.STALLED, JobState.WAITS_ELSEWHERE, JobState.SUSPENDED, JobState.OVER})
"""The states in which an incident is open."""

RESTING_STATES = frozenset({JobState.SUSPENDED, JobState.OVER})
"""The states of a job that stands still for a reason that is no hang of this node."""


class Motion(str, Enum):
    """Whether a rank made progress between the rounds of a capture; unknown after a single round."""

    FROZEN = "frozen"
    MOVING = "moving"
    UNKNOWN = "unknown"


class Signature(str, Enum):
    """What a rank does by measurement, whatever its functions are called; see docs/evidence.md."""

    GONE = "gone"
    STOPPED = "stopped"
    COMPUTES = "computes"
    TRANSFERS = "transfers"
    GPU_WORKS = "gpu_works"
    BEHIND_GPU = "behind_gpu"
    SPINS = "spins"
    POLLS = "polls"
    BLOCKED = "blocked"
    AWAITS_OUTSIDE = "awaits_outside"
    UNKNOWN = "unknown"

    @property
    def motion(self) -> Motion:
        """What that means for progress."""
        return _MOTIONS.get(self, Motion.UNKNOWN)


_MOTIONS = {
    Signature.GONE: Motion.FROZEN,
    Signature.STOPPED: Motion.FROZEN,
    Signature.COMPUTES: Motion.MOVING,
    Signature.TRANSFERS: Motion.MOVING,
    Signature.GPU_WORKS: Motion.MOVING,
    Signature.BEHIND_GPU: Motion.FROZEN,
    Signature.BLOCKED: Motion.FROZEN,
}


# --- 4. Dumps: probes.pyspy, probes.procs -> hang.capture ----------------------------------------------------------

ENDED_STATES = frozenset("ZXx")
"""Letters of /proc/PID/stat of a process that has ended: a zombie, or dead."""

STOPPED_STATES = frozenset("Tt")
"""Letters of a process that a signal or a tracer holds."""

BLOCKED_STATES = frozenset("D")
"""The letter of a process inside a system call that no signal ends."""

FUSE_WAITS = frozenset({"request_wait_answer"})
"""Where in the kernel a process waits for the answer of a FUSE server, in state S at first (fs/fuse/dev.c)."""


class Frame(Value, frozen=True):
    """One frame of a stack. `file` is the short path; `line` is None where it is not known."""

    function: str
    file: str
    line: int | None = None
    module: str | None = None
    locals: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{self.function} ({where})"


class Thread(Value, frozen=True):
    """One thread of a dump, frames innermost first. `name` is None where the source gives none.

    `installed_frames`: so many of the innermost frames lie in the standard library or in installed packages; None where
    the source does not tell. `pthread_id` is what pthread_self(3) gives in it, None where the source gives none.
    """

    name: str | None
    thread_id: str
    frames: tuple[Frame, ...]
    active: bool | None = None
    owns_gil: bool | None = None
    is_main: bool = False
    installed_frames: int | None = None
    pthread_id: int | None = None


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
    """

    path: str
    holder_pid: int | None = None
    holder_comm: str = ""


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
    which its main thread waits, `store` what its sockets show of the store of its job. `stuck_on` is the file or pipe
    that its main thread reads or writes, where nobody of its job has it open. `enclosed_at` is where it waits for
    others of its job, if no other node reaches that while the job has ranks there. `recorders` are PyTorch's flight
    recorders in its memory, one for each library, shortened (`hang.recorded.shortened`); `recorder_faults` say why one
    could not be read. None of both: it is a worker, or was not asked any more in this round. `waits_in_torch`: its main
    thread slept in code of torch, NCCL or CUDA, whatever line of Python called that.
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
    stuck_on: str | None = None
    store: Store | None = None
    enclosed_at: str | None = None
    recorders: tuple[RankRecords, ...] = ()
    recorder_faults: tuple[Fault, ...] = ()
    waits_in_torch: bool = False


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
    """What the ranks were started with, of the variables that `environment_table` allows: bounded, printable."""

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


# --- 5. Groups and verdict: hang.grouping, hang.activity, hang.culprit -----------------------------------------------


class Stack(Value, frozen=True):
    """A named stack that explains a group beside its MainThread: another thread, or a worker process.

    Of a worker process `pid` and the letter of `state` are known, and `own`: the innermost frame of the user's own
    code in what it does, None where it does nothing (it waits for its next task).
    """

    name: str
    frames: tuple[Frame, ...]
    activity: str = "unknown"
    pid: int | None = None
    state: str | None = None
    own: Frame | None = None


class Enqueued(Value, frozen=True):
    """One operation that a rank enqueued: its number in its group, and when it was, by the clock of its node.

    `order` rises with each operation of the process. `stays_open`: it was open in the first and in the last round of
    the look. `sizes` only of operations that ask for equal ones on all ranks. `by_main` is false where it is known that
    another thread than the main one enqueued it.
    """

    number: int
    operation: str
    order: int
    created_unix_seconds: float
    open_seconds: float = 0.0
    stays_open: bool = False
    is_p2p: bool = False
    dtypes: tuple[str, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    timeout_seconds: float | None = None
    by_main: bool = True


class GroupRecords(Value, frozen=True):
    """What one rank has enqueued in one process group: the number of its newest collective, and the last few.

    A group is known by its library and name; of a name that a process made more than once it is the newest, and
    `generation` counts those that are seen. `has_lost_open`: an operation is open that the recorder shows no more.
    `ranks` are its global ranks, [first, last] of each range, as NCCL lists them; empty where nothing does.
    """

    library: Library
    name: str
    description: str
    number: int
    generation: int = 1
    operations: tuple[Enqueued, ...] = ()
    has_lost_open: bool = False
    ranks: tuple[tuple[int, int], ...] = ()


class Recorded(Value, frozen=True):
    """What the flight recorder of one library showed of a rank: whether it still has all of its operations.

    `oldest_unix_seconds` is when the oldest that it shows was enqueued, None where it shows none.
    """

    library: Library
    is_wrapped: bool = False
    oldest_unix_seconds: float | None = None
    groups: tuple[GroupRecords, ...] = ()


class Stay(Value, frozen=True):
    """The few places between which a rank stood in a look in which nothing showed that it works.

    `within` is a short hash of the function of the program and of all around it, each of `places` one of a line of that
    function with all that stood inside of it.
    """

    within: str
    places: tuple[str, ...]


class Member(Value, frozen=True):
    """One rank in a group, with the numbers that serve as second votes.

    `state` is the letter that /proc/PID/stat showed in every round; where the rounds differ, the last one outside `D`.
    `waited_before`: in an earlier round it stood in a wait for other ranks, so it does come to meet them.
    `silent_mount`, `waits_for_mount`, `waiting`, `kernel_call`, `worker_call`, `kernel_lines`, `died`, `nccl_ras` with
    its fault, and the numbers of its GPU as in `RankDump`. `signature`
    is what was measured, `awaited` for whom it waits outside of its job; `main_cpu_ratio` of a core and
    `switches_per_second` (voluntary) are those of its main thread. `frozen_cgroup` as in `ProcessDump`, where it was so
    in every round; `peers` as there, the most of any round, workers included, and None where one was not seen;
    `server`, `file_lock` and `stuck_on` as there, where they were the same in every round; `store` as in the last
    round, but "retries" only where no round showed a connection. `user_frames` are the innermost ones of the user's
    own program in the stack that tells, without locals: where it stands, to the line. `recorded` is what its flight
    recorders showed in the first and in the last round, `receives` whether its main thread was in a call that receives,
    in the last one.
    `recorder_faults` and `enclosed_at` as in `ProcessDump`, of the last round.
    `is_held_outside`: in every round it stood in one call that no other thread of its process ends.
    `waits_in_torch` as in `ProcessDump`, in every round.
    `stay` is set where only other looks can tell whether it works. `task` is where a task of a ThreadPoolExecutor of it
    stood in the user's own program in every round, in no wait for another thread.
    """

    id: RankId
    motion: Motion = Motion.UNKNOWN
    signature: Signature = Signature.UNKNOWN
    rounds: int = 1
    waited_before: bool = False
    owns_gil: bool | None = None
    state: str | None = None
    wchan: str | None = None
    cpu_ratio: float | None = None
    io_bytes_per_second: float | None = None
    main_cpu_ratio: float | None = None
    switches_per_second: float | None = None
    awaited: Awaited | None = None
    power_watts: float | None = None
    utilization_ratio: float | None = None
    busy_power_ratio: float | None = None
    nvlink_bytes_per_second: float | None = None
    pcie_bytes_per_second: float | None = None
    gpu_use: GpuUse | None = None
    ports: PortTraffic | None = None
    silent_mount: str | None = None
    waits_for_mount: bool = False
    frozen_cgroup: str | None = None
    waiting: Waiting | None = None
    peers: int | None = None
    server: int | None = None
    file_lock: FileLock | None = None
    stuck_on: str | None = None
    store: Store | None = None
    enclosed_at: str | None = None
    user_frames: tuple[Frame, ...] = ()
    recorded: tuple[Recorded, ...] = ()
    recorder_faults: tuple[Fault, ...] = ()
    receives: bool = False
    is_held_outside: bool = False
    waits_in_torch: bool = False
    stay: Stay | None = None
    kernel_call: KernelCall | None = None
    worker_call: WorkerCall | None = None
    kernel_lines: tuple[KernelLine, ...] = ()
    died: Died | None = None
    nccl_ras: NcclRas | None = None
    nccl_ras_fault: Fault | None = None
    task: Frame | None = None


class Group(Value, frozen=True):
    """Ranks whose stacks have the same key, shown by one representative.

    `key` is a short hash of the normalised stack. `activity` is a name from activities.toml ("collective_wait", ...),
    `operation` the collective or call it is in ("all_reduce"). `fault` stands in place of frames for ranks that could
    not be dumped. `threads` are the representative's other Python threads, `workers` its worker processes.
    `waits_for` is "ranks", "gpu" (a GPU synchronisation, or compute that may stand behind one), "lock" (a lock or a
    file that somebody else must give), "thread", "nothing" or "unknown".
    `phase` is the part of the program around it ("evaluation", "checkpoint"), None where no frame tells.
    """

    key: str
    activity: str
    members: tuple[Member, ...]
    operation: str | None = None
    waits_for: str = "unknown"
    phase: str | None = None
    frames: tuple[Frame, ...] = ()
    threads: tuple[Stack, ...] = ()
    workers: tuple[Stack, ...] = ()
    fault: Fault | None = None
    gone: bool = False

    @property
    def motion(self) -> Motion:
        """Moving if any member moves; frozen only if every member is."""
        motions = {member.motion for member in self.members}
        if Motion.MOVING in motions:
            return Motion.MOVING
        return Motion.FROZEN if motions == {Motion.FROZEN} else Motion.UNKNOWN

    @property
    def size(self) -> int:
        """How many ranks it holds."""
        return len(self.members)

    @property
    def waits(self) -> bool:
        """Whether it stands in a wait that ends when other ranks come."""
        return self.waits_for == "ranks"

    @property
    def holds_gil(self) -> bool:
        """Whether at least half of its ranks hold the GIL."""
        owners = sum(member.owns_gil is True for member in self.members)
        return owners > 0 and owners * 2 >= self.size

    @property
    def runs_python(self) -> bool:
        """Whether it is busy with Python code that no rule knows: it holds the GIL, and so waits for nothing."""
        return self.waits_for == "unknown" and self.holds_gil


class Grouping(Value, frozen=True):
    """The groups of a job, largest first. This is what nodes send each other and what merges.

    `world_size` is None where nothing says it.
    """

    groups: tuple[Group, ...]
    world_size: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def members(self) -> list[Member]:
        """All ranks of all groups."""
        return [member for group in self.groups for member in group.members]

    @property
    def absent(self) -> tuple[range, ...]:
        """Ranks that should exist and gave no answer: gaps in the numbers, and what is missing of the world size.

        As ranges in rising order, since a world size is a number that anybody can write into an environment.
        """
        known = self._known()
        return gaps(known, max(known[-1] + 1, self.world_size or 0)) if known else ()

    @property
    def ranks_known(self) -> int:
        """How many ranks are known to exist: the world size, the highest rank, and all that answered or should have."""
        return max(self.world_size or 0, len(self.members) + sum(ranks.stop - ranks.start for ranks in self.absent))

    @property
    def unanswered(self) -> tuple[range, ...]:
        """Absent ranks among those that were asked. With one node in view these lie between its own."""
        if not self._is_one_node():
            return self.absent
        known = self._known()
        return gaps(known, known[-1] + 1, known[0]) if known else ()

    @property
    def elsewhere(self) -> tuple[range, ...]:
        """Absent ranks that were not asked: with one node in view those under and over its numbers."""
        if not self._is_one_node():
            return ()
        known = self._known()
        outside = (range(known[0]), range(known[-1] + 1, self.world_size or 0)) if known else ()
        return tuple(ranks for ranks in outside if ranks)

    def _known(self) -> list[int]:
        return sorted({member.id.rank for member in self.members if member.id.rank is not None})

    def _is_one_node(self) -> bool:
        return len({member.id.node for member in self.members}) == 1


def gaps(known: Iterable[int], end: int, start: int = 0) -> tuple[range, ...]:
    """The numbers from `start` to before `end` that are not among `known`, which rise."""
    found = []
    for number in (*known, end):
        before = min(number, end)
        if before > start:
            found.append(range(start, before))
        start = max(start, number + 1)
    return tuple(found)


def spans(ranges: Iterable[range]) -> tuple[tuple[int, int], ...]:
    """Ranges as they are written down: [first, last] of each; those that overlap or touch are one."""
    merged: list[list[int]] = []
    for numbers in sorted(ranges, key=lambda numbers: numbers.start):
        if merged and numbers.start <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], numbers.stop - 1)
        else:
            merged.append([numbers.start, numbers.stop - 1])
    return tuple((first, last) for first, last in merged)


class Confidence(str, Enum):
    """How sure a verdict is; docs/verdicts.md states the rules."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    NONE = "none"


class Evidence(Value, frozen=True):
    """One vote: what was seen, of whom, and whether it speaks for the verdict (None: neither for nor against)."""

    kind: str
    message: str
    ranks: tuple[RankId, ...] = ()
    supports: bool | None = None


class FirstLook(RankId, frozen=True, kw_only=True):
    """A rank to look at first where nobody can be accused: why this one, and what would settle it."""

    why: str
    settle: str


class Verdict(Value, frozen=True):
    """Who is the odd one, or why nobody can be named. `named` is empty when nobody is accused.

    `first_look` accuses nobody: it says where to begin.
    """

    kind: str
    message: str
    named: tuple[RankId, ...] = ()
    confidence: Confidence = Confidence.NONE
    evidence: tuple[Evidence, ...] = ()
    first_look: tuple[FirstLook, ...] = ()


# --- 6. Incidents: daemon -> store, report, metrics ----------------------------------------------------------------

CRASHED = "Crashed"
"""The kind of verdict on ranks that died; any user can have such incidents in numbers."""

INCIDENT_VERSION = 2  # 2: Job.absent_local_ranks are ranges

MOST_RANKS = 1 << 24
"""A job of more ranks than this is not believed, whoever says so."""


class PowerSeries(Value, frozen=True):
    """Power of one GPU before and during an incident; `quiet_line_watts` is None while the GPU has no busy level."""

    uuid: str
    index: int
    unix_seconds: tuple[float, ...]
    watts: tuple[float, ...]
    limit_watts: float | None = None
    busy_watts: float | None = None
    quiet_line_watts: float | None = None
    local_ranks: tuple[int, ...] = ()


class TimelineEntry(Value, frozen=True):
    """One line of a job's timeline: the state that it came to, and the sentence that explains it."""

    unix_seconds: float
    state: JobState
    message: str


class Incident(Value, frozen=True):
    """One suspicion of one job on this node, from the first capture to its end. `incident.json` is this value.

    `schema_version` rises where a field changes its meaning or goes; `incident_file.load` reads every version up to
    this one.
    """

    incident_id: str
    node: str
    job: Job
    opened_unix_seconds: float
    state: JobState
    verdict: Verdict
    grouping: Grouping
    captures: tuple[Capture, ...] = ()
    power: tuple[PowerSeries, ...] = ()
    timeline: tuple[TimelineEntry, ...] = ()
    closed_unix_seconds: float | None = None
    host_facts: tuple[tuple[str, str], ...] = ()
    hangwatch_version: str = ""
    schema_version: int = INCIDENT_VERSION


# --- 7. Checks: checks -> board -> metrics, cli --------------------------------------------------------------------


class CheckStatus(int, Enum):
    """Nagios' order with UNKNOWN between well and sick: it is shown as neither."""

    OK = 0
    UNKNOWN = 1
    WARNING = 2
    CRITICAL = 3


class CheckVerdict(Value, frozen=True):
    """What a check says: CamelCase reason for machines, a sentence for people (also when all is well), what to type."""

    status: CheckStatus
    reason: str
    message: str
    remedy: str = ""


class Point(Value, frozen=True):
    """One exported number of a check, as `hangwatch_<name>`: it ends in a base unit; `kind` is gauge or counter."""

    name: str
    value: float
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    kind: str = "gauge"


class CheckResult(Value, frozen=True):
    """One run of one check, as the guard around it saw it. `success` is false when the check itself failed to run."""

    check: str
    verdict: CheckVerdict
    success: bool
    duration_seconds: float
    ran_unix_seconds: float
    faults: tuple[Fault, ...] = ()
    points: tuple[Point, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
