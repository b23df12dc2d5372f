"""Jobs in virtual time of which each rank runs a program: its flight recorder and its activity follow from it.

A rank has a main thread, which may start another one. Each thread works, enqueues operations, and waits. A collective
completes when all members of its group have enqueued it, a send or recv when its other half is enqueued. So the
sequence numbers are those of a real job, also while its ranks pause or a thread saves in the background. `HEALTHY` are
jobs that go on by themselves, `DEADLOCKS` are jobs that never do.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, TypeAlias

from msgspec import structs

from hangwatch.collectives.rank_records import drop_unneeded
from hangwatch.model.flight_records import (
    FlightRecord,
    GroupMembers,
    GroupStatus,
    Library,
    ProgressCounter,
    RankRecords,
    find_progressions,
)
from tests.scenarios import power
from tests.scenarios.progress import FLOCK, TRAINS_ALONE
from tests.scenarios.simulation import MAIN_PTHREAD_ID, UNIX_START, Doing, Node

CAPACITY = 2000
WORLD = "default_pg"
_MAIN = power.WAITS.stacks[0][-3:]
_DISTRIBUTED = "torch/distributed/distributed_c10d.py"
_EXECUTOR = ("run (concurrent/futures/thread.py)", "_worker (concurrent/futures/thread.py)", "run (threading.py)")
WRITES_IN_THREAD = Doing(
    (("_write_item (torch/distributed/checkpoint/filesystem.py)", "save (saver.py)", *_EXECUTOR),), watts=0.0
)
AWAITS_FUTURE = replace(
    power.WAITS, stacks=(("result (concurrent/futures/_base.py)", "save_checkpoint (pretrain.py)", *_MAIN[1:]),),
    watts=85.0, utilization_ratio=0.0, cpu_ratio=0.0,
)  # fmt: skip


class Works(NamedTuple):
    """The thread does `doing` for some seconds. Of a thread other than the main thread, only the stack counts."""

    doing: Doing
    seconds: float


class Enqueues(NamedTuple):
    """The thread enqueues an operation in a group, and waits for its end, or goes on at once.

    The operation completes `seconds` after all members have enqueued it.
    """

    operation: str
    group: str = WORLD
    waits: bool = True
    seconds: float = 0.0


class WaitsForAll(NamedTuple):
    """The thread waits for the end of all operations that its rank has enqueued, or of those with this name."""

    doing: Doing
    name: str = ""


class Starts(NamedTuple):
    """The main thread starts another thread."""

    steps: tuple[Works | Enqueues, ...]


class WaitsForThreads(NamedTuple):
    """The main thread waits for the end of the other threads of its rank, in `doing`."""

    doing: Doing


Step: TypeAlias = Works | Enqueues | WaitsForAll | Starts | WaitsForThreads
Program: TypeAlias = Iterator[Step]


@dataclass
class _Thread:
    rank: int
    program: Program
    is_main: bool = True
    doing: Doing = TRAINS_ALONE
    until: float = 0.0
    enqueued: list[int] = field(default_factory=list)  # the operations for which it waits, by their place
    awaits_threads: bool = False


class Job:
    """The ranks of a job, each with its program. `groups` are the ranks of each group but the default group."""

    def __init__(self, library: Library, programs: Sequence[Program], groups: Mapping[str, Sequence[int]]) -> None:
        self.library = library
        self.groups = {WORLD: range(len(programs)), **groups}
        self._threads = [_Thread(rank, program) for rank, program in enumerate(programs)]
        self._records: list[list[FlightRecord]] = [[] for _ in programs]
        self._numbers: dict[tuple[int, str, str], int] = defaultdict(int)
        self._halves: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
        self._ending: list[tuple[float, list[tuple[int, int]]]] = []
        self._totals = [0 for _ in programs]
        self._seconds: list[list[Doing]] = []

    def node(self) -> Node:
        """Return a node with this job."""
        jobs = (("job", range(len(self._records))),)
        return Node(self.doing, jobs=jobs, counter=self.count, recorders=self.read_recorders)

    def doing(self, rank: int, t: float) -> Doing:
        """Return the activity of a rank at second `t`."""
        for second in range(len(self._seconds), int(t) + 1):
            while any(self._go_on(thread, second) for thread in tuple(self._threads)):
                pass
            self._seconds.append([self._show(each) for each in range(len(self._records))])
        return self._seconds[int(t)][rank]

    def _show(self, rank: int) -> Doing:
        main, *others = (thread for thread in self._threads if thread.rank == rank)
        return _with_threads(main.doing, tuple(thread.doing.stacks[0] for thread in others))

    def count(self, rank: int, _t: float, _total: int) -> ProgressCounter:
        """Return the number of operations that the main thread of a rank has enqueued."""
        return ProgressCounter(total=self._totals[rank])

    def _go_on(self, thread: _Thread, now: float) -> bool:
        """Do the next step of a thread. Return False if it is not at its end yet."""
        self._end_operations(now)
        records = self._records[thread.rank]
        is_waiting = thread.awaits_threads and sum(other.rank == thread.rank for other in self._threads) > 1
        if thread.until > now or is_waiting or any(records[place].is_open for place in thread.enqueued):
            return False
        thread.enqueued, thread.awaits_threads = [], False
        match next(thread.program, None):
            case None:
                self._threads = [each for each in self._threads if each is not thread]
            case Works(doing, seconds):
                thread.doing, thread.until = doing, now + seconds
            case Enqueues() as step:
                place = self._enqueue(thread, step, now)
                if step.waits:
                    thread.doing, thread.enqueued = _waits_in(step.operation.partition(" ")[0], thread.is_main), [place]
            case WaitsForAll(doing, name):
                begin = f"{self.library}:{name}"
                mine = (at for at, each in enumerate(records) if each.is_open and each.operation.startswith(begin))
                thread.doing, thread.enqueued = doing, list(mine)
            case Starts(steps):
                self._threads.append(_Thread(thread.rank, iter(steps), is_main=False))
            case WaitsForThreads(doing):
                thread.doing, thread.awaits_threads = doing, True
        return True

    def _enqueue(self, thread: _Thread, step: Enqueues, now: float) -> int:
        """Add a record to the flight recorder of a rank. The operation completes if no rank is missing any more."""
        operation, group, rank = step.operation, step.group, thread.rank
        records, members = self._records[rank], self.groups[group]
        name, _, ends = operation.partition(" ")
        is_p2p = bool(ends)
        kind = "p2p" if is_p2p else ""
        self._numbers[rank, group, kind] += 1
        number = self._numbers[rank, group, kind]
        place, group_id = len(records), list(self.groups).index(group)
        records.append(
            FlightRecord(
                id=place,
                reset_epoch=0,
                group_id=group_id,
                group_name=str(group_id),
                group_description=group,
                collective_seq=self._numbers[rank, group, ""],
                p2p_seq=self._numbers[rank, group, "p2p"],
                op_id=place,
                is_p2p=is_p2p,
                operation=f"{self.library}:{operation}",
                state="open",
                is_started=False,
                is_retired=False,
                created_unix_ns=int((UNIX_START + now) * 1e9) + place,
                timeout_ms=600_000,
                thread_id=MAIN_PTHREAD_ID + (not thread.is_main),
                thread="main" if thread.is_main else "other",
            )
        )
        self._totals[rank] += thread.is_main
        key: tuple[object, ...] = (group, number)
        if is_p2p:
            sender, receiver = ends.split("->") if name == "send" else reversed(ends.split("<-"))
            self._numbers[rank, group, operation] += 1
            key = (group, sender, receiver, self._numbers[rank, group, operation])
        halves = self._halves[key]
        halves.append((rank, place))
        names = {self._records[other][at].operation for other, at in halves}
        if len(halves) == (2 if is_p2p else len(members)) and (is_p2p or len(names) == 1):
            self._ending.append((now + step.seconds, self._halves.pop(key)))
        return place

    def _end_operations(self, now: float) -> None:
        """Complete the operations that end by `now`, on all their ranks."""
        ending, self._ending = self._ending, [each for each in self._ending if each[0] > now]
        for rank, place in chain.from_iterable(halves for at, halves in ending if at <= now):
            self._records[rank][place] = structs.replace(self._records[rank][place], state="completed")

    def read_recorders(self, rank: int, t: float) -> tuple[RankRecords, ...]:
        """Return the flight recorder of a rank at second `t`, the newest that was played."""
        records = self._records[rank]
        newest: dict[int, int] = {}
        completed: dict[int, int] = {}
        for record in records[-CAPACITY:]:
            newest[record.group_id] = record.op_id
            if not record.is_open:
                completed[record.group_id] = record.op_id
        lists_members = self.library == "nccl"
        read = RankRecords(
            library=self.library,
            records=tuple(records[-CAPACITY:]),
            groups=tuple(
                GroupStatus(
                    group_id=group, last_enqueued=last, last_started=last, last_completed=completed.get(group, -1)
                )
                for group, last in newest.items()
            ),
            members=tuple(
                GroupMembers(name=str(place), description=group, ranks=find_progressions(members))
                for place, (group, members) in enumerate(self.groups.items())
                if lists_members and rank in members
            ),
            next_id=len(records),
            oldest_id=max(0, len(records) - CAPACITY),
            is_wrapped=len(records) > CAPACITY,
            capacity=CAPACITY,
            layout="2.13",
            read_unix_seconds=UNIX_START + t,
        )
        return (drop_unneeded(read),)


@functools.cache
def _with_threads(doing: Doing, threads: tuple[tuple[str, ...], ...]) -> Doing:
    return replace(doing, threads=threads)


@functools.cache
def _waits_in(operation: str, is_main: bool = True) -> Doing:
    """Return the activity of a thread that waits in an operation."""
    program = _MAIN if is_main else ("save (saver.py)", *_EXECUTOR)
    stack = (f"{operation} ({_DISTRIBUTED})", "wrapper (torch/distributed/c10d_logger.py)", *program)
    return replace(power.WAITS, stacks=(stack,), cpu_ratio=0.0)


# --- programs -------------------------------------------------------------------------------------------------------

TRAINED_STEPS = 900
GENERATES = replace(power.ITEM_IN_MAIN, watts=500.0)
GENERATES_LIGHTLY = replace(GENERATES, watts=200.0)
_MAKE_PLAN = (Enqueues("gather", "save"), Enqueues("scatter", "save"))


def _train(at: Mapping[int, Sequence[Step]], *steps: Step) -> Program:
    """Yield steps of a second. Before those with a number in `at`, its steps come first."""
    for number in itertools.count():
        yield from at.get(number, ())
        yield Works(TRAINS_ALONE, 1)
        yield from steps or (Enqueues("all_reduce"),)


def evaluates_on_rank_0(library: Library, ranks: int, pause: Works) -> Job:
    """Return a job of which rank 0 does something else, while the others wait for it at a barrier."""
    barrier = Enqueues("barrier")
    programs = (_train({TRAINED_STEPS: (barrier,) if rank else (pause, barrier)}) for rank in range(ranks))
    return Job(library, list(programs), {})


def saves_in_threads(library: Library, ranks: int, pause: Works, *, late: int = -1, saved_before: bool = True) -> Job:
    """Return a job that saves in threads with a group of their own. Rank 0 waits for its thread, the others train.

    The thread of rank `late` writes first, so the other threads wait for it.
    """
    save = (*_MAKE_PLAN, Works(WRITES_IN_THREAD, 1), Enqueues("barrier", "save"))

    def run(rank: int) -> Program:
        writes = (Works(WRITES_IN_THREAD, pause.seconds),) if rank == late % ranks else ()
        awaits = replace(pause.doing, stacks=AWAITS_FUTURE.stacks) if late == 0 else AWAITS_FUTURE
        paused = Starts((*writes, *save)), *(() if rank else (WaitsForThreads(awaits),))
        return _train({TRAINED_STEPS // 2: (Starts(save),) if saved_before else (), TRAINED_STEPS: paused})

    return Job(library, list(map(run, range(ranks))), {"save": range(ranks)})


def pipeline(_library: Library, ranks: int, pause: Works, *, late: int = 0, has_posted: bool = False) -> Job:
    """Return a pipeline of which stage `late` does something else; with `has_posted`, after it has posted a receive.

    It uses NCCL, because gloo records no send or receive.
    """

    def run(rank: int) -> Program:
        gradient = (Enqueues(f"recv {rank}<-{rank + 1}", waits=not has_posted),) if rank < ranks - 1 else ()
        posts = (WaitsForAll(_waits_in("recv"), "recv"), *gradient)
        for number in itertools.count():
            if rank:
                yield Enqueues(f"recv {rank}<-{rank - 1}")
            yield from posts if has_posted and number >= ranks - 1 - rank else ()
            is_paused = number == TRAINED_STEPS and rank == late % ranks
            yield pause if is_paused else Works(TRAINS_ALONE, 1)
            if gradient:
                yield Enqueues(f"send {rank}->{rank + 1}", waits=False)
            yield from gradient if not has_posted and number >= ranks - rank else ()
            if rank:
                yield Enqueues(f"send {rank}->{rank - 1}", waits=False)

    return Job("nccl", list(map(run, range(ranks))), {})


def generates_for_training(library: Library, ranks: int, pause: Works) -> Job:
    """Return a job of which the upper half of the ranks has posted a broadcast of weights, and generates meanwhile."""
    awaits = Enqueues("gather", "rollouts"), Works(TRAINS_ALONE, 1), Enqueues("broadcast", "weights")

    def run(rank: int) -> Program:
        generates = (Enqueues("broadcast", "weights", waits=False), pause, Enqueues("gather", "rollouts"))
        now = awaits if rank < ranks // 2 else (*generates, WaitsForAll(_waits_in("broadcast")))
        before = (step._replace(seconds=2) if step is pause else step for step in now)
        return _train({TRAINED_STEPS // 2: tuple(before), TRAINED_STEPS: now})

    return Job(library, list(map(run, range(ranks))), dict.fromkeys(("rollouts", "weights"), range(ranks)))


def shards_and_replicas(library: Library, ranks: int, pause: Works, *, is_slow: bool = False) -> Job:
    """Return a job with three groups of each rank, which odd ranks use in another order. Rank 0 does something else.

    With `is_slow`, no rank does, but the network is slow for as long.
    """
    pairs = {f"shard {first}": (first, first + 1) for first in range(0, ranks, 2)}
    groups = pairs | {f"replica {first}": range(first, ranks, 2) for first in range(2)} | {"all": range(ranks)}

    def run(rank: int) -> Program:
        used = f"shard {rank - rank % 2}", f"replica {rank % 2}", "all"
        both = [Enqueues("all_reduce", group, waits=False) for group in used]
        ordered = tuple(reversed(both) if rank % 2 else both)
        awaits = WaitsForAll(replace(_waits_in("all_reduce"), socket_bytes_per_second=1e7))
        slow: tuple[Step, ...] = (*(step._replace(seconds=pause.seconds) for step in ordered), awaits)
        now = slow if is_slow else () if rank else (pause,)
        return _train({TRAINED_STEPS: now}, *ordered, WaitsForAll(power.ITEM_IN_MAIN))

    return Job(library, list(map(run, range(ranks))), groups)


def deadlock(library: Library, ranks: int, _pause: Works, *, odd: Enqueues) -> Job:
    """Return a job of which the last rank enqueues another operation than the others, for good."""
    programs = (_train({TRAINED_STEPS: (odd,) if rank == ranks - 1 else ()}) for rank in range(ranks))
    return Job(library, list(programs), {"unused": range(ranks)})


def stays_away(library: Library, ranks: int, odd: int) -> Job:
    """Return a job of which rank `odd` enqueues nothing any more after its training."""
    away = Works(TRAINS_ALONE, math.inf)
    programs = (_train({TRAINED_STEPS: (away,) if rank == odd else ()}) for rank in range(ranks))
    return Job(library, list(programs), {})


Make: TypeAlias = Callable[[Library, int, Works], Job]
HEALTHY: dict[str, Make] = {
    "evaluation on rank 0": evaluates_on_rank_0,
    "the thread of the last rank saves late": saves_in_threads,
    "it saves late for the first time": functools.partial(saves_in_threads, saved_before=False),
    "the thread of rank 0 saves late": functools.partial(saves_in_threads, late=0),
    "the first stage of a pipeline is late": pipeline,
    "the last stage of a pipeline is late": functools.partial(pipeline, late=-1),
    "the first stage is late and has posted a receive": functools.partial(pipeline, has_posted=True),
    "generation with a posted broadcast": generates_for_training,
    "three groups of each rank": shards_and_replicas,
    "three groups on a slow network": functools.partial(shards_and_replicas, is_slow=True),
}
DEADLOCKS: dict[str, Make] = {
    "cycle": functools.partial(deadlock, odd=Enqueues("all_reduce", "unused")),
    "mismatch": functools.partial(deadlock, odd=Enqueues("broadcast")),
}
PAUSES = {
    "checkpoint": power.SAVES,
    "fsync": power.IN_FSYNC,
    "evaluation": power.EVALUATES,
    "file lock": FLOCK,
    "request": power.AWAITS_SERVER,
    "generation": GENERATES,
    "generation at low power": GENERATES_LIGHTLY,
}
