"""Groups, and what flight recorders add to them: hang.grouping, hang.recorded -> hang.culprit, fleet.merge."""

from __future__ import annotations

from collections.abc import Iterable

from hangwatch.model.dumps import KernelLine, NcclRas, RankId
from hangwatch.model.flight_records import Library
from hangwatch.model.gpus import GpuReadings
from hangwatch.model.jobs import Died, Waiting
from hangwatch.model.stacks import Frame, Stack
from hangwatch.model.states import Motion, Signature
from hangwatch.model.value import Fault, Value
from hangwatch.model.waits import KernelCall, Waits, WorkerCall


class Enqueued(Value, frozen=True):
    """One operation that a rank enqueued: its number in its group, and when it was, by the clock of its node.

    `order` rises with each operation of the process. `stays_open`: it was open in the first and in the last round of
    the look in which its recorder was read. `sizes` only of operations that ask for equal ones on all ranks. `by_main`
    is false where it is known that another thread than the main one enqueued it.
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


class StackFacts(Value, frozen=True):
    """Place of a rank in its program, over the rounds of a capture.

    All fields keep their defaults if no round has a stack. `waited_before`: in an earlier round the rank was in a wait
    for other ranks, so it does come to meet them. `owns_gil` is that of its main thread. `user_frames` are the
    innermost frames of the user's own program in the stack that tells, with lines and without locals. `task` is the
    frame of the user's own program in which a task of a ThreadPoolExecutor was in every round, in no wait for another
    thread. `stay` is set if only other captures can tell whether the rank works.
    """

    waited_before: bool = False
    owns_gil: bool | None = None
    user_frames: tuple[Frame, ...] = ()
    task: Frame | None = None
    stay: Stay | None = None


class KernelFacts(Value, frozen=True):
    """State of a rank's process by the kernel, and the system call in which its main thread is.

    `state` is the letter that /proc/PID/stat showed in every round; if the rounds differ, the last one that is not `D`.
    `wchan` is that of the round whose stack is shown. `receives`: in the last round the main thread was in a call that
    receives. `is_held_outside`: in every round it was in one call that no other thread of its process ends.
    `silent_mount`, `waits_for_mount`, `call`, `worker_call` and `lines` are as in `RankDump` (`kernel_call`,
    `kernel_lines`).
    """

    state: str | None = None
    wchan: str | None = None
    receives: bool = False
    is_held_outside: bool = False
    silent_mount: str | None = None
    waits_for_mount: bool = False
    call: KernelCall | None = None
    worker_call: WorkerCall | None = None
    lines: tuple[KernelLine, ...] = ()


class Usage(Value, frozen=True):
    """CPU time and I/O of a rank between the rounds of a capture; None after a single round.

    `cpu_ratio` (of one core) and `io_bytes_per_second` include its workers. `main_cpu_ratio` and `switches_per_second`
    (voluntary context switches) are those of its main thread.
    """

    cpu_ratio: float | None = None
    io_bytes_per_second: float | None = None
    main_cpu_ratio: float | None = None
    switches_per_second: float | None = None


class RecorderFacts(Value, frozen=True):
    """Collectives of a rank, by the flight recorders in its process and by NCCL's RAS.

    `libraries` has one entry for each library whose recorder could be read; it holds the first and the last round in
    which that was so. `faults` say why a recorder was not read in two rounds. `nccl_ras` is None if NCCL was not asked
    or gave no answer; `nccl_ras_fault` says why, where that is known.
    """

    libraries: tuple[Recorded, ...] = ()
    faults: tuple[Fault, ...] = ()
    nccl_ras: NcclRas | None = None
    nccl_ras_fault: Fault | None = None


class Member(Value, frozen=True):
    """One rank in a group, with all that a capture of `rounds` rounds showed of it.

    A part whose source gave nothing has only defaults. `signature` is the behaviour that was measured; `motion` follows
    from it, or from the progress of its flight recorders. `waits` holds the facts of all rounds: `peers` counts its
    workers too and is the most of any round, `store` is that of the last round, but "retries" only if no round showed a
    connection; `enclosed_at` is that of the last round, and every other field is set only if it was the same in all.
    There `asks_rank` may be that of a worker for which the rank waits, and `awaits_store` is "thread" only if the rank
    waits for a thread. `waiting` and `died` are as in `RankDump`.
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
        owners = sum(member.stack.owns_gil is True for member in self.members)
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
