"""Find kernel log lines about the ranks of a job: by pid, GPU or mounted file system, or about their node.

The kernel logs pids of the initial pid namespace. So lines are matched by pid only if the daemon is in that namespace.
Lines from before the job began are ignored.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from hangwatch import words
from hangwatch.model import BLOCKED_STATES, Job, KernelLine, ProcessId, list_by_key
from hangwatch.probes.base import filesystems, procfs
from hangwatch.probes.node import pci
from hangwatch.probes.node.kmsg import LoggedLine
from hangwatch.tables import kernel_lines, xids

LINES_OF_A_RANK = 8
SLACK_SECONDS = 60.0
"""Tolerance in time: the clock of the log drifts against that of processes. No pid is reused within this time."""

RECENT_SECONDS = 3600.0
_TEXT_CHARACTERS = 300


def find_begin(job: Job) -> float:
    """Return the time since boot, in seconds, from which lines can be about a job; infinity without processes."""
    ids = [*job.processes, *(process.id for process in job.ended)]
    return min(map(_began, ids), default=math.inf) - SLACK_SECONDS


def find_lines(
    job: Job, logged: Sequence[LoggedLine], *, now: float, unix_now: float, proc_root: Path
) -> dict[int, tuple[KernelLine, ...]]:
    """Return the newest log lines about each rank or its workers, by pid of the rank, oldest first.

    Ranks that have ended count, too. `now` is CLOCK_MONOTONIC and `unix_now` the same moment as Unix time, in seconds.
    """
    began = find_begin(job)
    recent = [line for line in logged if line.boot_seconds >= began]
    if not recent:
        return {}
    ranks = _RankFinder(job, now, unix_now, proc_root)
    lines_by_pid = list_by_key((pid, line) for line in recent for pid in ranks.find(line))
    return {
        pid: tuple(
            KernelLine(
                name=line.name,
                text=words.elided(line.text, _TEXT_CHARACTERS),
                unix_seconds=unix_now - (now - line.boot_seconds),
                subject=words.printable(line.subject),
                where=words.printable(line.where),
                is_recent=now - line.boot_seconds <= RECENT_SECONDS,
            )
            for line in sorted(lines, key=lambda line: line.boot_seconds)[-LINES_OF_A_RANK:]
        )
        for pid, lines in lines_by_pid.items()
    }


class _RankFinder:
    """The ranks of a job that lines of the kernel log are about. Facts are read when the first line needs them."""

    def __init__(self, job: Job, now: float, unix_now: float, proc_root: Path) -> None:
        self._job, self._now, self._unix_now, self._root = job, now, unix_now, proc_root

    def find(self, line: LoggedLine) -> Iterator[int]:
        """Yield the pids of the ranks: the rank of a process that lived then, or of a thread that is still blocked.

        A line about a GPU is about the ranks that hold it. A line about a file system is about the ranks that have
        mounted it, and one about a device of this node is about all ranks.
        """
        names, number = kernel_lines.load()[line.name].names, int(line.subject) if line.subject.isdecimal() else 0
        match names:
            case "process":
                rank, began, ended = self._processes.get(number, (0, 0.0, 0.0))
                if rank and began - SLACK_SECONDS <= line.boot_seconds <= ended + SLACK_SECONDS:
                    yield rank
            case "task":
                ranks = self._job.ranks if procfs.sees_all_pids(self._root) else ()
                yield from (rank.id.pid for rank in ranks if _is_blocked(rank.id.pid, number, self._root))
            case "gpu":
                uuid = self._uuids.get(xids.shorten_address(line.subject))
                yield from (rank.id.pid for rank in self._job.ranks if uuid in rank.gpu_uuids)
                yield from (process.id.pid for process in self._job.ended if uuid in process.gpu_uuids)
            case "switch":
                return
            case _:
                yield from (pid for pid, mounts in self._mounts if _is_about(line, names, mounts))

    @cached_property
    def _processes(self) -> dict[int, tuple[int, float, float]]:
        """The pid of the rank of each process by its pid, and its begin and end on CLOCK_MONOTONIC."""
        found: dict[int, tuple[int, float, float]] = {}
        if not procfs.sees_all_pids(self._root):
            return found
        job, now = self._job, self._now
        by_place = {(rank.rank, rank.local_rank): rank.id.pid for rank in job.ranks}
        by_place |= {(one.rank, one.local_rank): one.id.pid for one in job.ended if not one.is_worker}
        for one in job.ended:
            pid = by_place.get((one.rank, one.local_rank), one.id.pid) if one.is_worker else one.id.pid
            found[one.id.pid] = (pid, _began(one.id), now - (self._unix_now - one.gone_unix_seconds))
        for rank in job.ranks:
            for process in (rank.id, *(worker.id for worker in rank.workers)):
                found[process.pid] = (rank.id.pid, _began(process), now)
        return found

    @cached_property
    def _uuids(self) -> dict[str, str]:
        return pci.nvidia_uuids(self._root)

    @cached_property
    def _mounts(self) -> list[tuple[int, tuple[filesystems.Mount, ...]]]:
        """The mounts of each rank, by its pid. They are read once in each mount namespace."""
        by_namespace: dict[str | None, tuple[filesystems.Mount, ...]] = {}
        mounts = []
        for pid in (rank.id.pid for rank in self._job.ranks):
            namespace = procfs.namespace(self._root, pid, "mnt")
            if namespace not in by_namespace:
                read = filesystems.mounts(self._root, pid)
                by_namespace[namespace] = read if isinstance(read, tuple) else ()
            mounts.append((pid, by_namespace[namespace]))
        return mounts


def _began(process: ProcessId) -> float:
    return process.start_ticks / procfs.TICKS_PER_SECOND


def _is_blocked(pid: int, thread: int, proc_root: Path) -> bool:
    """True if `thread` belongs to the process and is now in an uninterruptible sleep, see proc_pid_stat(5)."""
    try:
        stat = (proc_root / str(pid) / "task" / str(thread) / "stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2][1:2].decode() in BLOCKED_STATES


def _is_about(line: LoggedLine, names: kernel_lines.Names, mounts: Sequence[filesystems.Mount]) -> bool:
    match names:
        case "nfs":
            return any(one.type.startswith("nfs") and one.source.rpartition(":")[0] == line.subject for one in mounts)
        case "lustre":
            return any(one.type == "lustre" and one.source.endswith(f":/{line.subject}") for one in mounts)
        case "ceph":
            return any(one.type == "ceph" for one in mounts)
    return True
