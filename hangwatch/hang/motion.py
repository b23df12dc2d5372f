"""Pure: did a rank make progress between the rounds of a capture?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hangwatch import config
from hangwatch.hang import activity
from hangwatch.hang import frames as stack_frames
from hangwatch.hang.standing import Standing
from hangwatch.model import BLOCKED_STATES, ENDED_STATES, STOPPED_STATES, Frame, Motion, ProcessDump, RankDump

_GPU_AT_WORK_RATIO = 0.5
_ROUNDS_OF_SLEEP = 3
_ASLEEP = frozenset("S") | BLOCKED_STATES | STOPPED_STATES

Rate = tuple[float | None, float | None]
"""CPU seconds per second, bytes per second; None where a counter is missing."""


def measure(
    rank: RankDump,
    standings: Sequence[Standing | None],
    table: activity.Table,
    settings: config.Capture,
    *,
    mount_holds_job: bool = False,
) -> tuple[Motion, float | None, float | None]:
    """Motion of one rank, its CPU use as a ratio of one core, and its I/O in bytes per second, workers included.

    `standings` is where it stood in each round, None for a round without a stack. A rank moves if its stack changed
    between rounds, or if it stands in no wait (for ranks, for the GPU: there a core spins without progress) and CPU or
    I/O of it or of its workers grew over the thresholds. A rank that cannot be dumped is frozen when the kernel says so
    (`D` or `T` in every round, no CPU used). Where a file system under its program gives no answer, so that nobody can
    dump it, it is also frozen when it slept through three rounds without CPU and I/O, or waits for that file system;
    and with `mount_holds_job` (another rank of the job waits for it) when it spins without I/O, as one that waits for
    ranks does. One round tells nothing; nor does a core that is busy at one line of an
    evaluation or a step while the GPU is not.
    """
    own = _rate(rank.rounds)
    workers = [_rate(worker.rounds) for worker in rank.workers]
    cpu, io = _total(0, own, workers), _total(1, own, workers)
    if rank.gone or (rank.rounds and rank.rounds[-1].state in ENDED_STATES):
        return Motion.FROZEN, cpu, io
    if len(rank.rounds) < 2:
        return Motion.UNKNOWN, cpu, io
    stood = [(dump, stand) for dump, stand in zip(rank.rounds, standings, strict=True) if stand is not None]
    if not stood:
        held = all(dump.state in STOPPED_STATES | BLOCKED_STATES for dump in rank.rounds)
        idle = not _over(own[0], settings.motion_cpu_ratio)
        still = (held and idle) or _stands_by_mount(rank, cpu, io, settings, mount_holds_job=mount_holds_job)
        return (Motion.FROZEN if still else Motion.UNKNOWN), cpu, io
    if len(stood) < 2:
        return Motion.UNKNOWN, cpu, io
    stacks = [() if stand.telling is None else dump.threads[stand.telling].frames for dump, stand in stood]
    if any(_changed(before, after, table) for before, after in pairwise(stacks)):
        return Motion.MOVING, cpu, io
    busy = _over(cpu, settings.motion_cpu_ratio) or _over(io, settings.motion_io_bytes_per_second)
    if not busy:
        return Motion.FROZEN, cpu, io
    _, last = stood[-1]
    if last.waits_for not in {"ranks", "gpu"}:
        return Motion.MOVING, cpu, io
    return (Motion.UNKNOWN if _may_compute(rank, last, cpu, settings) else Motion.FROZEN), cpu, io


def _stands_by_mount(
    rank: RankDump, cpu: float | None, io: float | None, settings: config.Capture, *, mount_holds_job: bool
) -> bool:
    """Whether a rank under whose program a file system is silent stands still by the kernel's counters."""
    if rank.silent_mount is None or len(rank.rounds) < _ROUNDS_OF_SLEEP:
        return False
    if cpu is None or _over(io, settings.motion_io_bytes_per_second):
        return False
    asleep = all(dump.state in _ASLEEP for dump in rank.rounds) and not _over(cpu, settings.motion_cpu_ratio)
    return rank.waits_for_mount or asleep or mount_holds_job


def _may_compute(rank: RankDump, stand: Standing, cpu: float | None, settings: config.Capture) -> bool:
    """Whether a rank at one line of its evaluation or step may be computing there, in a long call into C.

    Behind the GPU's queue a core spins as well, but then the GPU shows work. One that hardly does is not waited for.
    """
    if not activity.known(stand.doing.activity).may_compute or rank.utilization_ratio is None:
        return False
    return _over(cpu, settings.motion_cpu_ratio) and rank.utilization_ratio < _GPU_AT_WORK_RATIO


def _changed(before: Sequence[Frame], after: Sequence[Frame], table: activity.Table) -> bool:
    """Whether two stacks of one thread differ. What a wait for ranks does inside (polling) does not count."""
    first, second = table.match(before), table.match(after)
    if first.doing.waits and first.doing == second.doing:
        return _lines(before[first.depth + 1 :]) != _lines(after[second.depth + 1 :])
    return _lines(before) != _lines(after)


def _lines(frames: Sequence[Frame]) -> tuple[tuple[str, str, int | None], ...]:
    return tuple(
        (frame.function, frame.file, frame.line)
        for frame in frames
        if not stack_frames.is_native(frame.function, frame.file)
    )


def _rate(rounds: Sequence[ProcessDump]) -> Rate:
    if len(rounds) < 2:
        return None, None
    first, last = rounds[0], rounds[-1]
    seconds = last.taken_monotonic_seconds - first.taken_monotonic_seconds
    if seconds <= 0:
        return None, None
    return _growth(first.cpu_seconds, last.cpu_seconds, seconds), _growth(first.io_bytes, last.io_bytes, seconds)


def _growth(first: float | None, last: float | None, seconds: float) -> float | None:
    return None if first is None or last is None else max(0.0, last - first) / seconds


def _total(index: int, own: Rate, workers: Sequence[Rate]) -> float | None:
    known = [rate[index] for rate in (own, *workers) if rate[index] is not None]
    return sum(value for value in known if value is not None) if known else None


def _over(value: float | None, limit: float) -> bool:
    return value is not None and value > limit
