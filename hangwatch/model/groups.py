"""Groups of ranks. `stacks.grouping` and `collectives` make these values, `verdict` and `fleet.merge` read them."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain, pairwise

from msgspec import structs

from hangwatch.model.dumps import Frame, KernelLine, RankId, Stack
from hangwatch.model.flight_records import Library, Progression
from hangwatch.model.gpus import GpuReadings
from hangwatch.model.jobs import Died, Waiting
from hangwatch.model.states import Motion, Signature
from hangwatch.model.value import Fault, Value
from hangwatch.model.waits import STOPPED_STATES, KernelCall, Rests, Sleep, Waits, WorkerCall


class EnqueuedOperation(Value, frozen=True):
    """One operation that a rank enqueued: its number in its group, and its time by the clock of the rank's node.

    Sends and recvs have numbers of their own, equal for those of a batch. `order` rises with each operation of the
    process. `stays_open`: the operation was open in the first and in the last round that read the recorder. `sizes` is
    set only for operations that require equal sizes on all ranks. `by_main` is false if the recorder shows that the
    main thread did not enqueue it. `is_started`: its kernel runs on the GPU.
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
    is_started: bool = False


class GroupRecords(Value, frozen=True):
    """Operations that one rank enqueued in one process group.

    `number` is the number of the newest collective. `operations` are the last few operations. Library and name identify
    a group. If a process made several groups with one name, this is the newest group, and `generation` is the number of
    groups with this name. `has_lost_open`: an operation is open that the recorder no longer shows. `ranks` are the
    global ranks of the group as NCCL lists them, as in `GroupMembers`. It is empty if no source lists them. In
    the first round, all collectives up to `completed` had completed; -1 if unknown. `thread` is the name of the thread
    that enqueued the newest operation; "" if that is the main thread, has ended or is unknown.
    """

    library: Library
    name: str
    description: str
    number: int
    generation: int = 1
    operations: tuple[EnqueuedOperation, ...] = ()
    has_lost_open: bool = False
    ranks: tuple[Progression, ...] = ()
    completed: int = -1
    thread: str = ""


class RecorderState(Value, frozen=True):
    """The flight recorder of one library in a rank. `is_wrapped`: it has overwritten its oldest operations.

    `oldest_unix_seconds` is the time at which the oldest recorded operation was enqueued; None without operations.
    `idle` has the name and the last completed collective of each group without a record, by torch's own count.
    """

    library: Library
    is_wrapped: bool = False
    oldest_unix_seconds: float | None = None
    groups: tuple[GroupRecords, ...] = ()
    idle: tuple[tuple[str, int], ...] = ()


class CodeRegion(Value, frozen=True):
    """The region of code that a rank did not leave in any round of a capture.

    Only several captures can show whether the rank progresses. `within` is a short hash of a function of the program
    and of all its callers. Each of `places` is a hash of a line of that function, with all frames that it called.
    `carries`: the process moved bytes during the capture, but its main thread may not be waiting for them.
    """

    within: str
    places: tuple[str, ...]
    carries: bool = False


class StackFacts(Value, frozen=True):
    """Place of a rank in its program, over the rounds of a capture.

    All fields keep their defaults if no round has a stack.
    * `waited_before`: in an earlier round the rank waited for other ranks, so it does reach the collective.
    * `owns_gil`: the main thread holds the GIL; None if unknown.
    * `user_frames`: the innermost frames of the user's program in the deciding thread, with lines and without locals.
    * `caller`: the frame of a framework that called the collective, with its line; None if the user's program did.
    * `task`: the frame of the user's program that a task of a ThreadPoolExecutor was in during every round.
    * `stay`: set if only several captures can show whether the rank works.
    * `sleep`: set if the main thread was asleep at one place in every round in which it did not run.
    * `is_alone`: the main thread is the only Python thread, except those that serve a library.
    """

    waited_before: bool = False
    owns_gil: bool | None = None
    user_frames: tuple[Frame, ...] = ()
    caller: Frame | None = None
    task: Frame | None = None
    stay: CodeRegion | None = None
    sleep: Sleep | None = None
    is_alone: bool = False


class KernelFacts(Value, frozen=True):
    """State of a rank's process in the kernel, and the system call of its main thread.

    * `state`: the letter of /proc/PID/stat in all rounds. If it changed: the last letter other than `D`.
    * `wchan`: the kernel function in which it slept, in the round of the shown stack.
    * `receives`: in the last round the main thread was in a call that receives.
    * `rests`: "sleep" if the main thread slept or waited for a signal in every round. "thread" if it waited for a
      thread of its process in every round, and no thread was in a call on a file, pipe or child.
    * `is_held_outside`: in every round the main thread was in a call that no other thread of its process can end.
    * `silent_mount`, `waits_for_mount` and `worker_call`: the fields of `RankDump` with the same name. `call` is its
      `kernel_call`, `lines` are its `kernel_lines`.
    """

    state: str | None = None
    wchan: str | None = None
    receives: bool = False
    rests: Rests | None = None
    is_held_outside: bool = False
    silent_mount: str | None = None
    waits_for_mount: bool = False
    call: KernelCall | None = None
    worker_call: WorkerCall | None = None
    lines: tuple[KernelLine, ...] = ()

    @property
    def calls(self) -> tuple[KernelCall, ...]:
        """The known system calls of the rank and of its worker."""
        of_worker = None if self.worker_call is None else self.worker_call.call
        return tuple(call for call in (self.call, of_worker) if call is not None)

    @property
    def tells_object(self) -> bool:
        """True if the object of the rank's own call is known."""
        return self.call is not None and self.call.has_object


class Usage(Value, frozen=True):
    """CPU time and I/O of a rank between the rounds of a capture. All fields are None after a single round.

    `cpu_ratio` (of one core) and `io_bytes_per_second` include its workers. `main_cpu_ratio` and
    `switches_per_second` (voluntary context switches) are those of its main thread.
    """

    cpu_ratio: float | None = None
    io_bytes_per_second: float | None = None
    main_cpu_ratio: float | None = None
    switches_per_second: float | None = None


class CollectiveProgress(Value, frozen=True):
    """Progress of a rank by the collectives of its main thread and of autograd, see `stacks.completed_collectives`.

    * `completed`: the number of operations completed between the first and the last round; None after one round.
    * `stays_open`: an operation was open in the first and in the last round.
    * `is_standing`: the oldest open operation stayed the same, and no other was enqueued.
    * `idle_seconds`: the age of the oldest open operation; if none is open, of the newest operation.
    * `usual_gap_seconds`: that of `GroupStatus`, the shortest of all groups; 0 if unknown.
    * `seconds`: the time from the first round to the last.
    """

    completed: int | None = None
    stays_open: bool = False
    is_standing: bool = False
    idle_seconds: float = 0.0
    usual_gap_seconds: float = 0.0
    seconds: float = 0.0


class RecorderFacts(Value, frozen=True):
    """Collectives of a rank, by the flight recorders in its process.

    `libraries` has one entry for each library with a readable recorder. An entry combines the first and the last round
    that read the recorder. `faults` are the reasons why a recorder was not read in two rounds. `progress` is
    None if no recorder shows it.
    """

    libraries: tuple[RecorderState, ...] = ()
    faults: tuple[Fault, ...] = ()
    progress: CollectiveProgress | None = None

    @property
    def open_operations(self) -> Iterator[EnqueuedOperation]:
        """The operations that stay open: in the first and in the last round of the flight recorders."""
        for recorder in self.libraries:
            for records in recorder.groups:
                yield from (operation for operation in records.operations if operation.stays_open)


class Member(Value, frozen=True):
    """One rank in a group, with all facts from a capture of `rounds` rounds.

    A field keeps its default if its source gave no data. `signature` is the measured behaviour. `motion` follows from
    the signature, or from the collectives in the flight recorders of all ranks. `waiting`, `died` and `most_peers` are
    as in `RankDump`.

    `waits` combines all rounds, see `stacks.kernel_facts.read_waits`. Its `awaits_store` is "thread" only if the rank
    waits for a thread.
    """

    id: RankId
    motion: Motion = Motion.UNKNOWN
    signature: Signature = Signature.UNKNOWN
    rounds: int = 1
    stack: StackFacts = StackFacts()
    kernel: KernelFacts = KernelFacts()
    usage: Usage = Usage()
    waits: Waits = Waits()
    gpu: GpuReadings = GpuReadings()
    recorder: RecorderFacts = RecorderFacts()
    waiting: Waiting | None = None
    died: Died | None = None
    most_peers: int = 0

    @property
    def is_measured(self) -> bool:
        """True if hangwatch read the state of the process. False for a process that is known only from text."""
        return self.kernel.state is not None

    @property
    def is_stopped(self) -> bool:
        """True if a signal, a tracer or the freezer of a control group keeps the process from running."""
        return self.kernel.state in STOPPED_STATES or self.waits.frozen_cgroup is not None


class Group(Value, frozen=True):
    """Ranks with the same stack key, shown by one representative.

    `key` is a short hash of the normalised stack. `activity` is a name from activities.toml ("collective_wait",
    ...). `operation` is the collective or call ("all_reduce"). `fault` is set instead of frames for ranks that
    could not be dumped. `threads` are the representative's other Python threads, `workers` its worker processes.
    `awaited` are the threads that its main thread waits for, one for each place. `frames` may be those of one of them.

    `waits_for` is "ranks", "gpu", "lock", "thread", "nothing" or "unknown". "gpu" is a GPU synchronisation, or
    compute that may be queued behind one. "lock" is a lock or a file that another thread or process must release or
    provide. `phase` is the enclosing part of the program ("evaluation", "checkpoint"), None if no frame shows it.
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
    awaited: tuple[Stack, ...] = ()
    fault: Fault | None = None
    gone: bool = False

    @property
    def motion(self) -> Motion:
        """Progress of the group: moving if any member moves, frozen if every member is frozen, else unknown."""
        motions = {member.motion for member in self.members}
        if Motion.MOVING in motions:
            return Motion.MOVING
        return Motion.FROZEN if motions == {Motion.FROZEN} else Motion.UNKNOWN

    @property
    def awaited_differ(self) -> bool:
        """True if its MainThread waits for threads at different places: each of them may be the one that matters."""
        return len(self.awaited) > 1

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.members)

    @property
    def waits(self) -> bool:
        """True if the group waits for other ranks."""
        return self.waits_for == "ranks"

    @property
    def holds_gil(self) -> bool:
        """True if at least half of the group's ranks hold the GIL."""
        owners = sum(member.stack.owns_gil is True for member in self.members)
        return owners > 0 and owners * 2 >= self.size

    @property
    def runs_python(self) -> bool:
        """True if the group runs Python code that no rule matches. Its ranks hold the GIL, so they wait for nothing."""
        return self.waits_for == "unknown" and self.holds_gil


class Grouping(Value, frozen=True, dict=True, gc=True):
    """The groups of a job, largest first. Nodes exchange this value. `world_size` is None if no source shows it."""

    groups: tuple[Group, ...]
    world_size: int | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def members(self) -> list[Member]:
        """All ranks of all groups, listed once: a verdict asks for them 16 times."""
        return list(chain.from_iterable(group.members for group in self.groups))

    def change_members(self, change: Callable[[Group, Member], Member]) -> "Grouping":
        """Return the groups with `change(group, member)` in place of each member."""
        groups = (
            structs.replace(group, members=tuple(change(group, member) for member in group.members))
            for group in self.groups
        )
        return structs.replace(self, groups=tuple(groups))

    @property
    def is_from_text(self) -> bool:
        """True if all ranks are known only from text without nodes: absent ranks may just be missing from the input."""
        return bool(self.groups) and not any(member.is_measured or member.id.node for member in self.members)

    @property
    def absent(self) -> tuple[range, ...]:
        """Ranks that should exist and did not respond: gaps in the numbers, and ranks missing from the world size.

        The result is ranges in rising order, because a user can set any world size: a list of all numbers could be too
        long.
        """
        known = self._known
        end = max((*known, (self.world_size or 0) - 1)) + 1 if known else 0
        return gaps(sorted(known), end) if len(known) < end else ()

    @property
    def expected_rank_count(self) -> int:
        """Number of ranks that should exist: the world size, or members plus absent ranks if that is larger."""
        return max(self.world_size or 0, len(self.members) + sum(ranks.stop - ranks.start for ranks in self.absent))

    @property
    def unanswered(self) -> tuple[range, ...]:
        """Absent ranks that were queried. On one node, these are between its lowest and its highest rank."""
        if not self._is_one_node():
            return self.absent
        known = sorted(self._known)
        return gaps(known, known[-1] + 1, known[0]) if known else ()

    @property
    def absent_not_queried(self) -> tuple[range, ...]:
        """Absent ranks that were not queried. In a grouping of one node: below its lowest or above its highest rank."""
        if not self._is_one_node():
            return ()
        known = self._known
        outside = (range(min(known)), range(max(known) + 1, self.world_size or 0)) if known else ()
        return tuple(ranks for ranks in outside if ranks)

    @cached_property
    def _known(self) -> set[int]:
        return {member.id.rank for member in self.members if member.id.rank is not None}

    def _is_one_node(self) -> bool:
        return bool(self.members) and all(member.id.node == self.members[0].id.node for member in self.members)


def gaps(sorted_numbers: Iterable[int], end: int, start: int = 0) -> tuple[range, ...]:
    """Return, as ranges, the numbers from `start` up to `end` - 1 that are not in `sorted_numbers`."""
    within = (start - 1, *(number for number in sorted_numbers if start <= number < end), max(start, end))
    return tuple(range(before + 1, after) for before, after in pairwise(within) if after - before > 1)


def spans(ranges: Iterable[range]) -> tuple[tuple[int, int], ...]:
    """Return [first, last] of each range. Ranges that overlap or touch are merged."""
    merged: list[list[int]] = []
    for numbers in sorted(ranges, key=lambda numbers: numbers.start):
        if merged and numbers.start <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], numbers.stop - 1)
        else:
            merged.append([numbers.start, numbers.stop - 1])
    return tuple((first, last) for first, last in merged)
