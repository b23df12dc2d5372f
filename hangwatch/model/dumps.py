"""Dumps, the raw content of a capture. `capture` makes them with `probes`; `stacks.grouping` reads them."""

from hangwatch.model.flight_records import RankRecords
from hangwatch.model.gpus import GpuReadings
from hangwatch.model.jobs import Died, Waiting
from hangwatch.model.value import Fault, Value
from hangwatch.model.waits import KernelCall, SystemCall, Waits, WorkerCall


class Frame(Value, frozen=True, cache_hash=True):  # ranks share frames, so a frame is hashed many times
    """One frame of a stack. `file` is the short path; `line` is None if it is not known."""

    function: str
    file: str
    line: int | None = None
    module: str | None = None
    locals: tuple[tuple[str, str], ...] = ()

    @property
    def place(self) -> tuple[str, str]:
        """Function and file, without the line."""
        return self.function, self.file

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{self.function} ({where})"


class Thread(Value, frozen=True):
    """One thread of a dump, frames innermost first. `name` is None if the source has no names.

    `installed_frames` is the number of innermost frames in the standard library or in installed packages; None if
    the source does not show it. `pthread_id` is the thread's pthread_self(3), None if the source does not show it.
    `trains`: by the flight recorder, no other thread of its process has enqueued a collective.
    """

    name: str | None
    thread_id: str
    frames: tuple[Frame, ...]
    active: bool | None = None
    owns_gil: bool | None = None
    is_main: bool = False
    installed_frames: int | None = None
    pthread_id: int | None = None
    trains: bool = False


class Stack(Value, frozen=True):
    """A named stack that explains a group in addition to its MainThread: another thread, or a worker process.

    A worker process has a `pid` and the letter of its `state`. `user_frame` is the innermost frame of the user's code
    in this stack. It is None if the thread or process is idle and waits for its next task, and for threads not awaited.
    `is_awaited`: by the kernel, the call of the main thread waits for this worker process.
    """

    name: str
    frames: tuple[Frame, ...]
    activity: str = "unknown"
    pid: int | None = None
    state: str | None = None
    user_frame: Frame | None = None
    is_awaited: bool = False


class ThreadCounters(Value, frozen=True):
    """Kernel counters of one thread. A field is None if it could not be read.

    `cpu_seconds` is user and system time, `system_seconds` system time only. `delay_seconds` is the time in which the
    thread was ready to run and waited for a core. A context switch is voluntary if the thread began to sleep or wait,
    else involuntary. `io_bytes` is the larger of two counters: bytes of read and write calls, which count when a call
    returns, and bytes from and to storage, which count at once. Receive and send calls do not count. `faulted_bytes`
    are the bytes of mapped memory that its page faults made present, at least.
    """

    read_monotonic_seconds: float
    cpu_seconds: float
    system_seconds: float | None = None
    delay_seconds: float | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None
    io_bytes: int | None = None
    faulted_bytes: int | None = None


class AwaitedThread(Value, frozen=True):
    """The thread that a main thread waits for: its number on the host, and its name in the program."""

    id: int
    name: str


class MainThread(Value, frozen=True):
    """The main thread of a process in one round, or the thread that it waits for. A field is None if it was not read.

    * `awaited_thread`: the thread that the main thread waits for, or one of several at one place. If it is set, all
      other fields are facts about that thread.
    * `wchan`: the kernel function in which it sleeps. `call`: its system call.
    * `before`, `after`: its counters before and after the dump. A dump itself causes context switches.
    * `device_bytes` and `dirty_bytes` are read only if it is in state `D` in a call that writes: the bytes that the
      device of the file has written, and the bytes that the whole node must still write.
    * `thread_in_file`: it waits for a thread, and a thread is in a call on a file, pipe or child.
    """

    wchan: str | None = None
    call: SystemCall | None = None
    before: ThreadCounters | None = None
    after: ThreadCounters | None = None
    awaited_thread: AwaitedThread | None = None
    device_bytes: int | None = None
    dirty_bytes: int | None = None
    thread_in_file: bool = False


class Traffic(Value, frozen=True):
    """Bytes on the connections of a process since the first round. A field is None if it was not read.

    * `socket_bytes`: on its TCP connections. `rank_bytes`: on its connections to other ranks. `object_bytes`: on the
      connection that the main thread's call uses.
    * `children_bytes`, `children_cpu_seconds`: bytes and CPU time of the processes outside the job that it waits for:
      of a child, or of the process at the other end of a pipe or Unix socket, with descendants.
    """

    socket_bytes: int | None = None
    rank_bytes: int | None = None
    object_bytes: int | None = None
    children_bytes: int | None = None
    children_cpu_seconds: float | None = None


class ProcessDump(Value, frozen=True):
    """One process in one round: its stacks, or the fault that replaces them, and its state in the kernel.

    A field is None if its object was not seen, or could not be read.

    * `state`: the letter of /proc/PID/stat, None if the process was gone. If the main thread waits for a thread in
      state `D`, it is `D`. `state_after`: the same after the dump. It shows a process that the dump left stopped.
    * `io_bytes`: rchar + wchar of /proc/PID/io. `fetched_bytes`: read_bytes of the same file, the bytes from storage,
      including pages of mapped files.
    * `called`: the file system that its system call uses, as the device (major:minor). It is read only if py-spy hangs.
    * `recorders` are PyTorch's flight recorders in its memory, one for each library, shortened by
      `collectives.rank_records.drop_unneeded`. `recorder_faults` are the reasons why a recorder could not be read. Both
      are empty for a worker, and if the recorders were not read in this round.
    """

    taken_monotonic_seconds: float
    threads: tuple[Thread, ...] = ()
    fault: Fault | None = None
    state: str | None = None
    state_after: str | None = None
    called: str | None = None
    kernel_stack: tuple[str, ...] = ()
    cpu_seconds: float | None = None
    io_bytes: int | None = None
    fetched_bytes: int | None = None
    duration_seconds: float | None = None
    main: MainThread = MainThread()
    traffic: Traffic = Traffic()
    waits: Waits = Waits()
    recorders: tuple[RankRecords, ...] = ()
    recorder_faults: tuple[Fault, ...] = ()


class KernelLine(Value, frozen=True):
    """A kernel log line about a rank, a file system that the rank has mounted, or a device of its node.

    `name` is the row of kernel_lines.toml that matched, `subject` the process or device in the line, `where` the
    library in which a crash happened. A process may choose the text of `subject` and `where`. `text` is the line,
    bounded and printable. `is_recent`: it was logged in the hour before the capture.
    """

    name: str
    text: str
    unix_seconds: float
    subject: str = ""
    where: str = ""
    is_recent: bool = False


class OutputEnd(Value, frozen=True):
    """The end of a regular file to which a rank writes: its raw bytes, and the identity and size of the file.

    `file` is equal for ranks that write to the same file. `path` is printable; the job controls its text.
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
    """Details of a process from /proc. A field is None or empty if it could not be read. The job controls the texts.

    `cpus` are the cores on which it may run ("0-7,16"). Each list has at most 32 entries, bounded and printable.
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
    """Identity of a rank, for people and across nodes. A field is None if the source does not show it.

    `title` is the name that the program gave to its process (setproctitle). It has letters, digits and `_:.-`.
    """

    node: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    title: str | None = None

    @property
    def is_numbered(self) -> bool:
        """True if the rank has a number within the job or its node."""
        return self.rank is not None or self.local_rank is not None

    def sort_key(self) -> tuple[int, str, int, int]:
        """Return a key that sorts by global rank, then node, local rank and pid. Unknown numbers come last."""
        last = 1 << 62
        return (
            last if self.rank is None else self.rank,
            self.node or "",
            last if self.local_rank is None else self.local_rank,
            last if self.pid is None else self.pid,
        )


class WorkerDump(Value, frozen=True):
    """Dumps of one worker process of a rank, one per round. `waits_for_mount` is as in `RankDump`."""

    pid: int
    comm: str
    rounds: tuple[ProcessDump, ...]
    waits_for_mount: bool = False


class RankDump(Value, frozen=True):
    """All data that a capture has of one rank: one `ProcessDump` per round, its workers, and readings of its GPU.

    `gone`: this node has no process of the rank. It is not set for a rank of another node, nor for a process that could
    not be dumped. `waiting` is set for a launcher without ranks. `silent_mount` is the file system under its program
    that does not respond, so that py-spy hangs. `waits_for_mount`: the kernel showed the process in a call on that file
    system in every round.

    `kernel_call`, `last_lines` and `details` are read only for ranks that the first verdict names or checks first. So
    is `worker_call`, if the rank waits for a worker. `kernel_lines` are the lines since the job began. `died` is as
    in `EndedProcess`, `most_peers` as in `Rank`.
    """

    id: RankId
    rounds: tuple[ProcessDump, ...] = ()
    workers: tuple[WorkerDump, ...] = ()
    gone: bool = False
    gpu: GpuReadings = GpuReadings()
    silent_mount: str | None = None
    waits_for_mount: bool = False
    waiting: Waiting | None = None
    kernel_call: KernelCall | None = None
    worker_call: WorkerCall | None = None
    kernel_lines: tuple[KernelLine, ...] = ()
    last_lines: tuple[LastLines, ...] = ()
    details: ProcessDetails | None = None
    died: Died | None = None
    most_peers: int = 0


class Setting(Value, frozen=True):
    """A value of an environment variable (None: not set), and the first 64 of the `count` ranks with this value."""

    value: str | None
    ranks: tuple[RankId, ...]
    count: int


class Difference(Value, frozen=True):
    """An environment variable that differs between ranks: its values, the rarest first, and the effect (`why`)."""

    name: str
    why: str
    settings: tuple[Setting, ...]

    @property
    def minority(self) -> tuple[RankId, ...]:
        """The ranks with a value other than the most common one."""
        return tuple(rank for setting in self.settings[:-1] for rank in setting.ranks)


class Environment(Value, frozen=True):
    """Start environment of the ranks, limited to the variables in `tables/environment_names`; bounded and printable.

    `common` has the variables with the same value in all ranks, `differences` the others.
    """

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
