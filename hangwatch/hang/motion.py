"""Pure: what does a rank do, by measurement? Names of functions decide nothing here.

The signature of a rank is made of what changed between the rounds of a capture: lines, bytes, the time and the switches
of its main thread, the power and the links of its GPU. The thresholds, and where they come from: docs/evidence.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from msgspec import structs

from hangwatch import config
from hangwatch.hang import frames as stack_frames
from hangwatch.hang.standing import Standing
from hangwatch.model import (
    BLOCKED_STATES,
    ENDED_STATES,
    STOPPED_STATES,
    Awaited,
    FileLock,
    Member,
    Motion,
    ProcessDump,
    RankDump,
    Signature,
    Stay,
    Store,
    Thread,
)

SPINNING_RATIO = 0.5  # of the time its main thread runs, or waits for a core
POLLS_PER_SECOND = 0.35  # sleep(2) 0.5; a DataLoader's time-out, and queue.get(timeout=5), 0.2
_FEWEST_POLLS = 2
GPU_AT_WORK_RATIO = 0.75  # between the floor and the busy level of its own GPU
_GPU_IN_KERNEL_RATIO = 0.5
MOST_PLACES_OF_A_STAY = 3  # a loop that asks has its condition, its pause, and maybe a count
LINK_AT_WORK_BYTES_PER_SECOND = 2e9  # a kernel that hangs polls with less: docs/evidence.md
_ROUNDS_OF_SLEEP = 3
_ASLEEP = frozenset("S") | BLOCKED_STATES | STOPPED_STATES


class Rates(NamedTuple):
    """What processes used per second between the first and the last round; None where a counter is missing.

    `cpu_ratio` is of one core, `io_bytes` those of files and sockets.
    """

    cpu_ratio: float | None
    io_bytes: float | None


class MainRates(NamedTuple):
    """What the main thread did per second between the dumps: on a core, ready to run, giving the core away itself.

    `polls`: it gave the core away in every interval, and often enough; `is_in_kernel`: there it spent most of its time.
    """

    cpu_ratio: float | None = None
    runnable_ratio: float | None = None
    switches: float | None = None
    polls: bool = False
    is_in_kernel: bool = False


class Measured(NamedTuple):
    """The signature of a rank with the numbers that made it, workers included in `cpu_ratio` and `io_bytes`."""

    signature: Signature
    cpu_ratio: float | None = None
    io_bytes_per_second: float | None = None
    main: MainRates = MainRates()
    awaited: Awaited | None = None
    stay: Stay | None = None


def measure(
    rank: RankDump,
    standings: Sequence[Standing | None],
    settings: config.Capture,
    *,
    mount_holds_job: bool = False,
) -> Measured:
    """The signature of one rank; `standings` is where it stood in each round, None for a round without a stack.

    One that cannot be dumped is stopped or blocked when the kernel says so (`T`, `D` in every round). Where a file
    system under its program gives no answer, so that nobody can dump it, it is also blocked when it slept through three
    rounds without CPU and I/O, or waits for that file system; and with `mount_holds_job` (another rank of the job waits
    for it) when it spins without I/O, as one that waits for ranks does. One round tells nothing.
    """
    own = _rates(rank.rounds)
    others = [*(_rates(worker.rounds) for worker in rank.workers), _children(rank.rounds)]
    every = [own, *others]
    total = Rates(_sum([one.cpu_ratio for one in every]), _sum([one.io_bytes for one in every]))
    main = _main(rank.rounds)
    awaited = _awaited(rank.rounds)
    stood = [_Stood.of(dump, stand) for dump, stand in zip(rank.rounds, standings, strict=True) if stand is not None]
    seen = _Seen(rank, stood, own, others, total, main, awaited, settings)
    signature = _signature(seen, mount_holds_job=mount_holds_job)
    return Measured(signature, total.cpu_ratio, total.io_bytes, main, awaited, _stay(seen, signature))


def asks_again(member: Member) -> bool:
    """Whether it polls; or only its lines changed, as those of a loop do, while it mostly slept, again and again."""
    if member.signature is not Signature.COMPUTES:
        return member.signature is Signature.POLLS
    return _over(member.switches_per_second, POLLS_PER_SECOND) and not _over(member.main_cpu_ratio, SPINNING_RATIO)


class _Stood(NamedTuple):
    """Where a process stood in one round: its program's own frames, what stands inside them, and whose the GIL was.

    `in_lock`: by the table of activities; it parts two ways to stand still, and makes nobody move.
    """

    own: tuple[_Line, ...]
    installed: tuple[_Line, ...]
    owns_gil: bool | None
    in_lock: bool = False

    @classmethod
    def of(cls, dump: ProcessDump, stand: Standing) -> _Stood:
        stood = cls.at(None if stand.telling is None else dump.threads[stand.telling])
        return stood._replace(in_lock=stand.waits_for == "lock")

    @classmethod
    def at(cls, thread: Thread | None) -> _Stood:
        if thread is None:
            return cls((), (), None)
        cut = thread.installed_frames or 0
        return cls(_lines(thread, cut, None), _lines(thread, 0, cut), thread.owns_gil)


_Line = tuple[str, str, int | None]


class _Seen(NamedTuple):
    """All that was measured of one rank."""

    rank: RankDump
    stood: Sequence[_Stood]
    own: Rates
    others: Sequence[Rates]
    total: Rates
    main: MainRates
    awaited: Awaited | None
    settings: config.Capture

    @property
    def uses_cpu(self) -> bool:
        """Whether any of its processes does."""
        return _over(self.total.cpu_ratio, self.settings.motion_cpu_ratio)

    def carries(self, rates: Rates) -> bool:
        """Whether so much flows that it is work."""
        return _over(rates.io_bytes, self.settings.motion_io_bytes_per_second)

    def is_in(self, states: frozenset[str]) -> bool:
        """Whether the kernel showed its main thread in these states in every round."""
        return all(dump.state in states for dump in self.rank.rounds)

    @property
    def gpu_works(self) -> bool:
        """Whether its GPU draws what work draws, or its links carry what only work moves."""
        links = (self.rank.nvlink_bytes_per_second, self.rank.pcie_bytes_per_second)
        at_work = _over(self.rank.busy_power_ratio, GPU_AT_WORK_RATIO) and not self.rank.works_lightly
        return at_work or any(_over(carried, LINK_AT_WORK_BYTES_PER_SECOND) for carried in links)

    @property
    def gpu_tells_nothing(self) -> bool:
        """Whether it draws what its work draws, and that is so little that a hang may draw it, too."""
        ratio = self.rank.busy_power_ratio
        return self.rank.works_lightly and (ratio is None or ratio > GPU_AT_WORK_RATIO)

    @property
    def workers_work(self) -> bool:
        """Whether its workers or children do."""
        if any(_worker_computes(worker.rounds, self.settings) for worker in self.rank.workers):
            return True
        return any(map(self.carries, self.others))

    @property
    def spins(self) -> bool:
        """Whether its main thread runs all the time; of a process without counters of threads, whether the process."""
        ratio = self.own.cpu_ratio if self.main.runnable_ratio is None else self.main.runnable_ratio
        return ratio is not None and ratio >= SPINNING_RATIO


def _signature(seen: _Seen, *, mount_holds_job: bool) -> Signature:
    """The first that fits, from what is certain to what is left."""
    rank, rounds = seen.rank, seen.rank.rounds
    if rank.gone or (rounds and rounds[-1].state in ENDED_STATES):
        return Signature.GONE
    if len(rounds) < 2:
        return Signature.UNKNOWN
    if seen.is_in(STOPPED_STATES) or frozen_cgroup(rounds) is not None:
        return Signature.STOPPED
    if seen.is_in(BLOCKED_STATES) and _writes_back(rounds, seen.settings):
        return Signature.TRANSFERS
    if not seen.stood:
        return _unseen(seen, mount_holds_job=mount_holds_job)
    if len(seen.stood) < 2:
        return Signature.UNKNOWN
    return _by_stack(seen)


def _by_stack(seen: _Seen) -> Signature:
    if _computes(seen.stood, seen.main, seen.own, seen.settings):
        return Signature.COMPUTES
    if seen.carries(seen.own):
        return Signature.TRANSFERS
    if seen.gpu_works:
        return Signature.GPU_WORKS
    if seen.is_in(BLOCKED_STATES) and not _over(seen.own.cpu_ratio, seen.settings.motion_cpu_ratio):
        return Signature.BLOCKED
    is_behind_gpu = _is_behind_gpu(seen)
    if is_behind_gpu and not seen.gpu_tells_nothing:
        return Signature.BLOCKED if _is_in_lock(seen) else Signature.BEHIND_GPU
    if any(_worker_computes(worker.rounds, seen.settings) for worker in seen.rank.workers):
        return Signature.COMPUTES
    if any(map(seen.carries, seen.others)):
        return Signature.TRANSFERS
    return Signature.UNKNOWN if is_behind_gpu else _at_one_line(seen)


def _is_in_lock(seen: _Seen) -> bool:
    """Whether it is blocked in a lock, whatever its GPU reads: a kernel may be under way that it started before."""
    return all(stood.in_lock for stood in seen.stood) and _at_one_line(seen) is Signature.BLOCKED


def _stay(seen: _Seen, signature: Signature) -> Stay | None:
    """Where a rank stands of which one look cannot tell whether it works; None where it can, or where it went about.

    Lines that alternate may be a loop that works, or one that asks again and again for what never comes.
    """
    is_moving = signature.motion is Motion.MOVING
    if signature.motion is Motion.FROZEN or len(seen.stood) < 2 or (is_moving and not _may_ask(seen, signature)):
        return None
    within = {(tuple(line[:2] for line in stood.own[:1]), stood.own[1:]) for stood in seen.stood}
    places = {(stood.own[:1], stood.installed) for stood in seen.stood}
    if len(within) > 1 or len(places) > MOST_PLACES_OF_A_STAY:
        return None
    return Stay(within=_digest(within.pop()), places=tuple(sorted(map(_digest, places))))


def _may_ask(seen: _Seen, signature: Signature) -> bool:
    """Whether nothing but its lines says that it works."""
    if signature is not Signature.COMPUTES or seen.gpu_works or seen.gpu_tells_nothing:
        return False
    return not seen.carries(seen.own) and not seen.workers_work


def _digest(part: object) -> str:
    return blake2b(repr(part).encode(), digest_size=6).hexdigest()


def _at_one_line(seen: _Seen) -> Signature:
    """Nothing changes and nothing flows: how does it wait?"""
    if seen.spins:
        return Signature.SPINS
    if seen.main.polls or _sleeps_again(seen):
        return Signature.POLLS
    if seen.uses_cpu:
        return Signature.UNKNOWN
    if seen.awaited is not None and not seen.awaited.is_lost:
        return Signature.AWAITS_OUTSIDE
    return Signature.BLOCKED


def _sleeps_again(seen: _Seen) -> bool:
    """Whether it sleeps, has woken in between and sleeps again: however long, that ends by itself.

    A round may have met it awake, between two sleeps; two must have met it asleep.
    """
    calls = [dump.call.kind for dump in seen.rank.rounds if dump.call is not None]
    return len(calls) > 1 and set(calls) == {"sleeps"} and _over(seen.main.switches, 0.0)


def _is_behind_gpu(seen: _Seen) -> bool:
    """Whether its GPU runs a kernel that does no work, while no Python of the telling thread runs."""
    at_work = seen.rank.utilization_ratio
    holds_gil = any(stood.owns_gil is True for stood in seen.stood)
    return at_work is not None and at_work >= _GPU_IN_KERNEL_RATIO and not holds_gil


def _unseen(seen: _Seen, *, mount_holds_job: bool) -> Signature:
    """A rank without any stack: only the kernel's word tells."""
    if seen.is_in(BLOCKED_STATES | STOPPED_STATES) and not _over(seen.own.cpu_ratio, seen.settings.motion_cpu_ratio):
        return Signature.TRANSFERS if seen.carries(seen.own) else Signature.BLOCKED
    rank, total = seen.rank, seen.total
    if rank.silent_mount is None or len(rank.rounds) < _ROUNDS_OF_SLEEP:
        return Signature.UNKNOWN
    if total.cpu_ratio is None or seen.carries(total):
        return Signature.UNKNOWN
    asleep = seen.is_in(_ASLEEP) and not seen.uses_cpu
    return Signature.BLOCKED if rank.waits_for_mount or asleep or mount_holds_job else Signature.UNKNOWN


def _computes(stood: Sequence[_Stood], main: MainRates, rates: Rates, settings: config.Capture) -> bool:
    """Whether lines of the program changed; or lines inside of it, while it computed.

    What a library's loop does inside one line of the program may be no more than polling: that takes no time, or the
    kernel's.
    """
    if any(before.own != after.own for before, after in pairwise(stood)):
        return True
    if all(before.installed == after.installed for before, after in pairwise(stood)):
        return False
    return _over(rates.cpu_ratio, settings.motion_cpu_ratio) and not main.polls and not main.is_in_kernel


def frozen_cgroup(rounds: Sequence[ProcessDump]) -> str | None:
    """The control group whose freezer held a process in every round."""
    found = [dump.frozen_cgroup for dump in rounds]
    return found[-1] if found and None not in found else None


def peers(rank: RankDump) -> int | None:
    """How many ways lead from a rank and its workers to other ranks, at most; None where a round did not see it."""
    rounds = [*rank.rounds, *(dump for worker in rank.workers for dump in worker.rounds)]
    found = [dump.peers for dump in rounds]
    known = [count for count in found if count is not None]
    return max(known) if known and len(known) == len(found) else None


def server(rank: RankDump) -> int | None:
    """The process that waits for clients and for which a rank waits, itself maybe: the same in every round."""
    found = {dump.server for dump in rank.rounds}
    return found.pop() if len(found) == 1 else None


def file_lock(rank: RankDump) -> FileLock | None:
    """The lock of a file for which a rank waits, by the same holder in every round."""
    found = {dump.file_lock for dump in rank.rounds}
    return found.pop() if len(found) == 1 else None


def stuck_on(rank: RankDump) -> str | None:
    """The file or pipe of nobody else in its job at which a rank stands: the same in each of several rounds."""
    found = {dump.stuck_on for dump in rank.rounds}
    return found.pop() if len(found) == 1 and len(rank.rounds) > 1 else None


def store(rank: RankDump) -> Store | None:
    """What the sockets of a rank showed of its store at last; that it retries only where no round showed a connection.

    One round without a sleep does not speak against it: then it was about to try again.
    """
    found = [dump.store for dump in rank.rounds if dump.store is not None]
    if not found or found[-1].has_connection:
        return found[-1] if found else None
    slept = any(one.socket == "retries" for one in found)
    retries = slept and not any(one.has_connection for one in found)
    return structs.replace(found[-1], socket="retries" if retries else "none")


def is_held_outside(rank: RankDump, measured: Measured) -> bool:
    """Whether its main thread stood, in every round, in one call that no other thread of its process ends.

    It waits for a child, a file or pipe of nobody else in its job, the lock of another process, somebody outside, or in
    `D`. What it only receives, or a lock between threads, another thread may give; a sleep may be one of many.
    """
    if len(rank.rounds) < 2:
        return False
    if all(dump.state in BLOCKED_STATES for dump in rank.rounds) or stuck_on(rank) is not None:
        return True
    lock = file_lock(rank)
    if measured.awaited is not None or (lock is not None and lock.holder_pid not in (None, rank.id.pid)):
        return True
    return all(dump.call is not None and dump.call.kind == "awaits_child" for dump in rank.rounds)


def _worker_computes(rounds: Sequence[ProcessDump], settings: config.Capture) -> bool:
    threads = [stack_frames.main_thread(dump.threads) or next(iter(dump.threads), None) for dump in rounds]
    stood = [_Stood.at(thread) for thread in threads if thread is not None and thread.frames]
    return _computes(stood, _main(rounds), _rates(rounds), settings)


def _lines(thread: Thread, begin: int, end: int | None) -> tuple[_Line, ...]:
    return tuple(
        (frame.function, frame.file, frame.line)
        for frame in thread.frames[begin:end]
        if not stack_frames.is_native(frame.function, frame.file)
    )


def _writes_back(rounds: Sequence[ProcessDump], settings: config.Capture) -> bool:
    """Whether what a process waits for in a write is being written: by the device of the file, else by the node."""
    first, last = rounds[0], rounds[-1]
    seconds = last.taken_monotonic_seconds - first.taken_monotonic_seconds
    if seconds <= 0:
        return False
    least = settings.motion_io_bytes_per_second
    if first.device_bytes is not None and last.device_bytes is not None:
        return (last.device_bytes - first.device_bytes) / seconds > least
    if first.dirty_bytes is not None and last.dirty_bytes is not None:
        return (first.dirty_bytes - last.dirty_bytes) / seconds > least
    return False


def _awaited(rounds: Sequence[ProcessDump]) -> Awaited | None:
    """Whom outside of the job it waits for, in every round."""
    found = [dump.awaited for dump in rounds]
    return found[-1] if found and None not in found else None


def _main(rounds: Sequence[ProcessDump]) -> MainRates:
    """Between the dumps: from after the one to before the next, since a dump makes switches of its own."""
    spans = [(one.main_after, two.main_before) for one, two in pairwise(rounds)]
    known = [(after, before) for after, before in spans if after is not None and before is not None]
    seconds = sum(two.read_monotonic_seconds - one.read_monotonic_seconds for one, two in known)
    if seconds <= 0:
        return MainRates()
    cpu = sum(max(0.0, two.cpu_seconds - one.cpu_seconds) for one, two in known)
    system = sum((two.system_seconds or 0.0) - (one.system_seconds or 0.0) for one, two in known)
    delay = sum((two.delay_seconds or 0.0) - (one.delay_seconds or 0.0) for one, two in known)
    switches = [
        two.voluntary_switches - one.voluntary_switches
        for one, two in known
        if one.voluntary_switches is not None and two.voluntary_switches is not None
    ]
    often = sum(switches) >= max(_FEWEST_POLLS, POLLS_PER_SECOND * seconds)
    return MainRates(
        cpu_ratio=cpu / seconds,
        runnable_ratio=(cpu + max(0.0, delay)) / seconds,
        switches=sum(switches) / seconds if switches else None,
        polls=often and min(switches) > 0,
        is_in_kernel=system > cpu / 2,
    )


def _rates(rounds: Sequence[ProcessDump]) -> Rates:
    seconds = _seconds(rounds)
    if seconds is None:
        return Rates(None, None)
    first, last = rounds[0], rounds[-1]
    files, sockets = (first.io_bytes, last.io_bytes), (first.socket_bytes, last.socket_bytes)
    called, fetched = _growth(*files, seconds), _growth(first.fetched_bytes, last.fetched_bytes, seconds)
    read = called if fetched is None else max(called or 0.0, fetched)  # what a call reads from storage is in both
    carried = _sum([read, _growth(*sockets, seconds)])
    return Rates(_growth(first.cpu_seconds, last.cpu_seconds, seconds), carried)


def _children(rounds: Sequence[ProcessDump]) -> Rates:
    seconds = _seconds(rounds)
    if seconds is None:
        return Rates(None, None)
    first, last = rounds[0], rounds[-1]
    return Rates(
        _growth(first.children_cpu_seconds, last.children_cpu_seconds, seconds),
        _growth(first.children_bytes, last.children_bytes, seconds),
    )


def _seconds(rounds: Sequence[ProcessDump]) -> float | None:
    if len(rounds) < 2:
        return None
    seconds = rounds[-1].taken_monotonic_seconds - rounds[0].taken_monotonic_seconds
    return seconds if seconds > 0 else None


def _growth(first: float | None, last: float | None, seconds: float) -> float | None:
    return None if first is None or last is None else max(0.0, last - first) / seconds


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _over(value: float | None, limit: float) -> bool:
    return value is not None and value > limit
