"""The signature of a rank, by measurement. Names of functions decide nothing here. Pure.

The signature follows from the changes between the rounds of a capture: lines of code, carried bytes, CPU time and
context switches of the main thread, power and links of the GPU. The thresholds and their sources: docs/verdicts.md.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import config
from hangwatch.model import (
    BLOCKED_STATES,
    ENDED_STATES,
    STOPPED_STATES,
    CodeRegion,
    EnqueuedOperation,
    Member,
    Motion,
    ProcessDump,
    RankDump,
    Signature,
    Usage,
    Value,
    Waits,
    WorkerDump,
)
from hangwatch.stacks import awaited_motion, kernel_facts, rates
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.process_activity import ProcessActivity
from hangwatch.stacks.rates import POLLS_PER_SECOND, MainRates, Rates, exceeds
from hangwatch.stacks.round_places import RoundPlace, find_region

SPINNING_RATIO = 0.5  # of the time; the main thread runs or is ready to run
GPU_AT_WORK_RATIO = 0.75  # between the floor and the busy level of its own GPU
GPU_IN_KERNEL_RATIO = 0.5
LINK_AT_WORK_BYTES_PER_SECOND = 2e9  # a hanging kernel polls with less: docs/verdicts.md
_LONGEST_GPU_POLL_SECONDS = 1.0
_ROUNDS_OF_SLEEP = 3
_ASLEEP = frozenset("S") | BLOCKED_STATES | STOPPED_STATES


class Measured(Value, frozen=True):
    """The signature of a rank, and the measurements from which it follows.

    `carries_collective` is true if the main thread waits for ranks, and bytes on connections to them show progress.
    """

    signature: Signature
    usage: Usage = Usage()
    stay: CodeRegion | None = None
    waits: Waits = Waits()
    carries_collective: bool = False


def measure(
    rank: RankDump,
    activities: Sequence[ProcessActivity | None],
    settings: config.Capture,
    *,
    operations: Sequence[EnqueuedOperation] = (),
    is_whole: bool = False,
    mount_holds_job: bool = False,
) -> Measured:
    """Return the signature of one rank and its measurements.

    `activities` has its place in each round, None without a stack. `operations` are those in its flight recorders.
    `is_whole` is true if all ranks were captured: then each counted connection leads to a rank. `mount_holds_job` is
    true if a rank of the job, or a worker, waits for a file system that does not respond.

    A single round shows only if a process has ended.
    """
    waits = kernel_facts.read_waits(rank)
    if len(rank.rounds) < 2 and all(len(worker.rounds) < 2 for worker in rank.workers):
        signature = Signature.GONE if _has_ended(rank) else Signature.UNKNOWN
        return Measured(signature=signature, waits=waits)
    process_rates = rates.measure_process(rank.rounds)
    others = [*(rates.measure_process(worker.rounds) for worker in rank.workers), rates.measure_children(rank.rounds)]
    total = rates.sum_rates([process_rates, *others])
    main = rates.measure_main_thread(rank.rounds)
    stood = [
        RoundPlace.from_dump(dump, stand)
        for dump, stand in zip(rank.rounds, activities, strict=True)
        if stand is not None
    ]
    seen = _Measurements(rank, stood, process_rates, others, total, main, waits, settings)
    spins_behind_gpu = seen.spins and _is_behind_gpu(seen) and not seen.is_gpu_power_ambiguous
    awaited = awaited_motion.find_awaited(activities, waits, operations) or ("gpu" if spins_behind_gpu else None)
    if awaited in ("ranks", "gpu") and waits.object is None:
        waits = replace(waits, awaited=None)  # a thread may wait for a peer outside, the main thread does not
    counted = awaited_motion.measure_awaited(rank, main, awaited)
    seen = seen._replace(
        waits=waits,
        main_rates=counted.process,
        worker_rates=counted.others,
        total=rates.sum_rates([counted.process, *counted.others]),
        workers=counted.workers,
        awaited=counted.awaited,
    )
    signature = _classify(seen, mount_holds_job=mount_holds_job)
    return Measured(
        signature=signature,
        usage=Usage(
            cpu_ratio=total.cpu_ratio,
            io_bytes_per_second=total.io_bytes,
            main_cpu_ratio=main.cpu_ratio,
            switches_per_second=main.switches,
        ),
        stay=_find_code_region(seen, signature),
        waits=waits,
        carries_collective=is_whole and signature is Signature.TRANSFERS and counted.awaited in ("ranks", "gpu"),
    )


def polls_repeatedly(member: Member) -> bool:
    """True if a rank polls, or if its lines changed while it mostly slept, as in a polling loop.

    False if several captures have shown that the event for which it polls does not happen.
    """
    if member.stack.sleep is not None and member.stack.sleep.is_polling:
        return False
    if member.signature is not Signature.COMPUTES:
        return member.signature is Signature.POLLS
    return exceeds(member.usage.switches_per_second, POLLS_PER_SECOND) and not exceeds(
        member.usage.main_cpu_ratio, SPINNING_RATIO
    )


class _Measurements(NamedTuple):
    """All measurements of one rank. Rates and `workers` contain only the part that counts, see `awaited_motion`."""

    rank: RankDump
    places: Sequence[RoundPlace]
    main_rates: Rates
    worker_rates: Sequence[Rates]
    total: Rates
    main: MainRates
    waits: Waits
    settings: config.Capture
    workers: Sequence[WorkerDump] = ()
    awaited: awaited_motion.Awaited | None = None

    @property
    def uses_cpu(self) -> bool:
        """True if the rank's processes together use CPU time."""
        return exceeds(self.total.cpu_ratio, self.settings.motion_cpu_ratio)

    def carries(self, used: Rates) -> bool:
        """True if `used` has enough bytes per second to count as progress."""
        return exceeds(used.io_bytes, self.settings.motion_io_bytes_per_second)

    @property
    def faults_pages(self) -> bool:
        """True if the main thread reads mapped memory: its page faults bring enough bytes, and it is in no wait."""
        is_waiting = self.awaited in ("ranks", "gpu")
        return not is_waiting and exceeds(self.main.faulted_bytes, self.settings.motion_io_bytes_per_second)

    def is_in(self, states: frozenset[str]) -> bool:
        """True if the kernel showed the main thread in one of these states in every round."""
        return all(dump.state in states for dump in self.rank.rounds)

    @property
    def gpu_works(self) -> bool:
        """True if the rank's GPU draws as much power as at work, or its links carry more than a hanging kernel does."""
        gpu = self.rank.gpu
        links = (gpu.nvlink_bytes_per_second, gpu.pcie_bytes_per_second)
        at_work = exceeds(gpu.busy_power_ratio, GPU_AT_WORK_RATIO) and not gpu.works_lightly
        return at_work or any(exceeds(carried, LINK_AT_WORK_BYTES_PER_SECOND) for carried in links)

    @property
    def is_gpu_power_ambiguous(self) -> bool:
        """True if the GPU's power proves nothing: the job draws so little at work that a hang may draw as much."""
        ratio = self.rank.gpu.busy_power_ratio
        return self.rank.gpu.works_lightly and (ratio is None or ratio > GPU_AT_WORK_RATIO)

    @property
    def workers_compute(self) -> bool:
        """True if a worker of the rank computes."""
        return any(_worker_computes(worker.rounds, self.settings) for worker in self.workers)

    @property
    def workers_carry(self) -> bool:
        """True if a worker or child carries data."""
        return any(map(self.carries, self.worker_rates))

    @property
    def spins(self) -> bool:
        """True if the main thread runs half of the time. Without its counters, those of the process decide."""
        ratio = self.main_rates.cpu_ratio if self.main.runnable_ratio is None else self.main.runnable_ratio
        return ratio is not None and ratio >= SPINNING_RATIO


def _classify(seen: _Measurements, *, mount_holds_job: bool) -> Signature:
    """Return the first signature that fits the measurements. The most certain signatures are tried first."""
    rounds = seen.rank.rounds
    if _has_ended(seen.rank):
        return Signature.GONE
    if len(rounds) < 2:
        return Signature.UNKNOWN
    # A tool that limits the CPU time of a process stops and continues it all the time.
    if (seen.is_in(STOPPED_STATES) and not seen.main_rates.cpu_ratio) or seen.waits.frozen_cgroup is not None:
        return Signature.STOPPED
    if seen.is_in(BLOCKED_STATES) and _writes_back(rounds, seen.settings):
        return Signature.TRANSFERS
    if not seen.places:
        return _classify_without_stack(seen, mount_holds_job=mount_holds_job)
    if len(seen.places) < 2:
        return Signature.UNKNOWN
    return _classify_by_stack(seen)


def _has_ended(rank: RankDump) -> bool:
    """True if the rank's process has ended."""
    return rank.gone or (bool(rank.rounds) and rank.rounds[-1].state in ENDED_STATES)


def _classify_by_stack(seen: _Measurements) -> Signature:
    if _computes(seen.places, seen.main, seen.main_rates, seen.settings):
        return Signature.COMPUTES
    if seen.carries(seen.main_rates) or seen.faults_pages:
        return Signature.TRANSFERS
    if seen.gpu_works:
        return Signature.GPU_WORKS
    if seen.is_in(BLOCKED_STATES) and not exceeds(seen.main_rates.cpu_ratio, seen.settings.motion_cpu_ratio):
        return Signature.BLOCKED
    is_behind_gpu = _is_behind_gpu(seen)
    if is_behind_gpu and not seen.is_gpu_power_ambiguous:
        standstill = _classify_standstill(seen)
        if standstill is Signature.BLOCKED and all(stood.in_lock for stood in seen.places):
            return Signature.BLOCKED  # in a lock: its GPU may run a kernel that was started before
        is_at_loader = bool(seen.rank.workers) and all(stood.at_loader for stood in seen.places)
        if not kernel_facts.is_held_outside(seen.rank, seen.waits) and not (
            standstill is Signature.BLOCKED and is_at_loader
        ):
            return Signature.BEHIND_GPU
    if seen.workers_compute:
        return Signature.COMPUTES
    if seen.workers_carry:
        return Signature.TRANSFERS
    return Signature.UNKNOWN if is_behind_gpu and seen.is_gpu_power_ambiguous else _classify_standstill(seen)


def _find_code_region(seen: _Measurements, signature: Signature) -> CodeRegion | None:
    """Return the region of code in which a rank stayed, if only several captures can show whether it works.

    None if this capture is enough, or if the rank was in too many places. Lines that alternate may be a loop that
    works, or a loop that polls for something that never happens. If carried bytes are the only sign that the rank
    works, its main thread may not be waiting for them.
    """
    if signature.motion is Motion.FROZEN or len(seen.places) < 2:
        return None
    is_unclear = not (seen.gpu_works or seen.is_gpu_power_ambiguous or seen.workers_compute or seen.workers_carry)
    is_waiting = seen.awaited is not None or seen.is_in(BLOCKED_STATES)
    may_poll = is_unclear and signature is Signature.COMPUTES and not seen.carries(seen.main_rates)
    may_carry = is_unclear and signature is Signature.TRANSFERS and not is_waiting and not seen.faults_pages
    if signature.motion is Motion.MOVING and not may_poll and not may_carry:
        return None
    region = find_region(seen.places)
    return replace(region, carries=True) if region is not None and may_carry else region


def _classify_standstill(seen: _Measurements) -> Signature:
    """Return the signature of a rank with unchanged lines of code that carries no data."""
    if seen.spins:
        return Signature.SPINS
    if seen.main.polls or _sleeps_repeatedly(seen):
        return Signature.POLLS
    awaited, server = seen.waits.awaited, seen.waits.server
    if seen.uses_cpu or (awaited is not None and awaited.end == "unknown"):
        return Signature.UNKNOWN
    waits_for_clients = server is not None and server == seen.rank.id.pid
    if waits_for_clients or (awaited is not None and awaited.may_answer):
        return Signature.AWAITS_OUTSIDE
    return Signature.BLOCKED


def _sleeps_repeatedly(seen: _Measurements) -> bool:
    """True if the rank was asleep in at least two rounds and woke between them: such sleeps end by themselves."""
    kinds = [call.kind for call in kernel_facts.list_calls(seen.rank.rounds)]
    return len(kinds) > 1 and set(kinds) == {"sleeps"} and exceeds(seen.main.switches, 0.0)


def _sleeps_in_program(seen: _Measurements) -> bool:
    """True if the rank sleeps for longer than a poll of its GPU lasts, or if its program itself called the sleep."""
    asleep = [dump for dump in seen.rank.rounds if dump.main.call is not None]
    lengths = [call.left_seconds for call in kernel_facts.list_calls(asleep) if call.kind == "sleeps"]
    known = [seconds for seconds in lengths if seconds is not None]
    if not known or len(known) < len(asleep):
        return False
    is_programs = all(dump.waits.waits_in_torch is False for dump in asleep) and not any(
        stood.library_lines for stood in seen.places
    )
    return is_programs or max(known) > _LONGEST_GPU_POLL_SECONDS


def _is_behind_gpu(seen: _Measurements) -> bool:
    """True if a kernel runs on the rank's GPU, and the deciding thread may be waiting for that kernel."""
    if kernel_facts.awaits_object(seen.waits) or _sleeps_in_program(seen):
        return False
    at_work = seen.rank.gpu.utilization_ratio
    holds_gil = any(stood.owns_gil is True for stood in seen.places)
    return at_work is not None and at_work >= GPU_IN_KERNEL_RATIO and not holds_gil


def _classify_without_stack(seen: _Measurements, *, mount_holds_job: bool) -> Signature:
    """Return the signature of a rank without a stack in any round, by the facts of the kernel.

    A rank that cannot be dumped is stopped or blocked if the kernel shows `T` or `D` in every round. py-spy cannot dump
    a process if a file system under its program does not respond. After three rounds without I/O such a rank is blocked
    if one of these is true:
    * It waits for that file system.
    * It slept in every round and used no CPU.
    * `mount_holds_job` is true. The rank may then spin, like a rank that waits for other ranks.
    """
    if seen.is_in(BLOCKED_STATES | STOPPED_STATES) and not exceeds(
        seen.main_rates.cpu_ratio, seen.settings.motion_cpu_ratio
    ):
        return Signature.TRANSFERS if seen.carries(seen.main_rates) or seen.faults_pages else Signature.BLOCKED
    rank, total = seen.rank, seen.total
    if rank.silent_mount is None or len(rank.rounds) < _ROUNDS_OF_SLEEP:
        return Signature.UNKNOWN
    if total.cpu_ratio is None or seen.carries(total):
        return Signature.UNKNOWN
    asleep = seen.is_in(_ASLEEP) and not seen.uses_cpu
    return Signature.BLOCKED if rank.waits_for_mount or asleep or mount_holds_job else Signature.UNKNOWN


def _computes(stood: Sequence[RoundPlace], main: MainRates, used: Rates, settings: config.Capture) -> bool:
    """True if lines of the program changed, or if only library lines changed while the process used CPU time.

    A library loop that the program called from one line may only poll. Such a loop uses no CPU time, or mostly system
    time.
    """
    if any(before.user_lines != after.user_lines for before, after in pairwise(stood)):
        return True
    if all(before.library_lines == after.library_lines for before, after in pairwise(stood)):
        return False
    return exceeds(used.cpu_ratio, settings.motion_cpu_ratio) and not main.polls and not main.is_in_kernel


def _worker_computes(rounds: Sequence[ProcessDump], settings: config.Capture) -> bool:
    threads = [stack_frames.main_thread(dump.threads) or next(iter(dump.threads), None) for dump in rounds]
    stood = [RoundPlace.from_thread(thread) for thread in threads if thread is not None and thread.frames]
    return _computes(stood, rates.measure_main_thread(rounds), rates.measure_process(rounds), settings)


def _writes_back(rounds: Sequence[ProcessDump], settings: config.Capture) -> bool:
    """True if the data of a blocked write reaches the disk, by the counters of the device, else of the node."""
    written = rates.measure_change(rounds, lambda dump: dump.main.device_bytes)
    if written is None and (unwritten := rates.measure_change(rounds, lambda dump: dump.main.dirty_bytes)) is not None:
        written = -unwritten
    return exceeds(written, settings.motion_io_bytes_per_second)
