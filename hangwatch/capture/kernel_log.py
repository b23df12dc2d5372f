"""Find kernel log lines about the ranks of a job: by pid, GPU or mounted file system, or about their node.

The kernel logs pids of the initial pid namespace. So lines are matched by pid only if the daemon is in that namespace.
Lines from before the job began are ignored.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hangwatch import words
from hangwatch.model import BLOCKED_STATES, Job, KernelLine, ProcessId
from hangwatch.probes.node import filesystems, pci
from hangwatch.probes.node.kmsg import LoggedLine
from hangwatch.probes.process import proc_pid, procfs
from hangwatch.tables import kernel_lines, xids

LINES_OF_A_RANK = 8
SLACK_SECONDS = 60.0
"""Tolerance in time: the clock of the log drifts against that of processes. No pid is reused within this time."""

RECENT_SECONDS = 3600.0
_TEXT_CHARACTERS = 300


def find_lines(
    job: Job, logged: Sequence[LoggedLine], *, now: float, unix_now: float, proc_root: Path
) -> dict[int, tuple[KernelLine, ...]]:
    """Return the newest log lines about each rank or its workers, by pid of the rank, oldest first.

    Ranks that have ended count, too. `now` is CLOCK_MONOTONIC and `unix_now` the same moment as Unix time, in
    seconds.
    """
    ids = [*job.processes, *(process.id for process in job.ended)]
    if not ids or not logged:
        return {}
    began = min(process.start_ticks for process in ids) / procfs.TICKS_PER_SECOND - SLACK_SECONDS
    recent = [line for line in logged if line.boot_seconds >= began]
    lines_by_pid: dict[int, list[LoggedLine]] = {}
    lines = (
        *_by_pid(job, recent, now, unix_now, proc_root),
        *_by_gpu(job, recent, proc_root),
        *_by_mount(job, recent, proc_root),
    )
    for pid, line in lines:
        lines_by_pid.setdefault(pid, []).append(line)
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


def _by_pid(
    job: Job, logged: Sequence[LoggedLine], now: float, unix_now: float, proc_root: Path
) -> Iterator[tuple[int, LoggedLine]]:
    """Yield (pid of the rank, log line) for lines about a process of the job while it lived.

    A line about a thread that is still blocked is yielded, too.
    """
    if not proc_pid.sees_all_pids(proc_root):
        return
    processes = _processes(job, now, unix_now)
    rows = kernel_lines.load()
    for line in logged:
        names, number = rows[line.name].names, int(line.subject) if line.subject.isdecimal() else 0
        if names == "process":
            rank, process, until = processes.get(number, (None, None, 0.0))
            if rank is not None and process is not None:
                began = process.start_ticks / procfs.TICKS_PER_SECOND
                if began - SLACK_SECONDS <= line.boot_seconds <= until + SLACK_SECONDS:
                    yield rank, line
        elif names == "task":
            yield from ((rank.id.pid, line) for rank in job.ranks if _is_blocked(rank.id.pid, number, proc_root))


def _processes(job: Job, now: float, unix_now: float) -> dict[int, tuple[int, ProcessId, float]]:
    """Return by pid of each process: the pid of its rank, its identity, and its end.

    The end is a CLOCK_MONOTONIC time in seconds: `now` for a process that lives.
    """
    by_place = {(rank.rank, rank.local_rank): rank.id.pid for rank in job.ranks}
    by_place |= {(one.rank, one.local_rank): one.id.pid for one in job.ended if not one.is_worker}
    found = {}
    for one in job.ended:
        pid = by_place.get((one.rank, one.local_rank), one.id.pid) if one.is_worker else one.id.pid
        found[one.id.pid] = (pid, one.id, now - (unix_now - one.gone_unix_seconds))
    for rank in job.ranks:
        for process in (rank.id, *(worker.id for worker in rank.workers)):
            found[process.pid] = (rank.id.pid, process, now)
    return found


def _is_blocked(pid: int, thread: int, proc_root: Path) -> bool:
    """True if `thread` belongs to the process and is now in an uninterruptible sleep, see proc_pid_stat(5)."""
    try:
        stat = (proc_root / str(pid) / "task" / str(thread) / "stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2][1:2].decode() in BLOCKED_STATES


def _by_gpu(job: Job, logged: Sequence[LoggedLine], proc_root: Path) -> Iterator[tuple[int, LoggedLine]]:
    """Yield (pid of the rank, line) for each line about a GPU of the rank. A rank that has ended counts, too."""
    rows = kernel_lines.load()
    lines = [line for line in logged if rows[line.name].names == "gpu"]
    uuids = pci.nvidia_uuids(proc_root) if lines else {}
    gpus = [*((rank.id.pid, rank.gpu_uuids) for rank in job.ranks), *((one.id.pid, one.gpu_uuids) for one in job.ended)]
    for line in lines:
        uuid = uuids.get(xids.shorten_address(line.subject))
        yield from ((pid, line) for pid, uuids_of_rank in gpus if uuid in uuids_of_rank)


def _by_mount(job: Job, logged: Sequence[LoggedLine], proc_root: Path) -> Iterator[tuple[int, LoggedLine]]:
    """Yield (pid of the rank, line) for each line about a file system that the rank has mounted.

    A line about a device of this node is yielded for all ranks.
    """
    rows = kernel_lines.load()
    lines = [line for line in logged if rows[line.name].names not in {"process", "task", "gpu", "switch"}]
    if not lines:
        return
    mounts: dict[str | None, tuple[filesystems.Mount, ...]] = {}
    for rank in job.ranks:
        namespace = proc_pid.namespace(proc_root, rank.id.pid, "mnt")
        if namespace not in mounts:
            read = filesystems.mounts(proc_root, rank.id.pid)
            mounts[namespace] = read if isinstance(read, tuple) else ()
        for line in lines:
            if _is_about(line, rows[line.name].names, mounts[namespace]):
                yield rank.id.pid, line


def _is_about(line: LoggedLine, names: kernel_lines.Names, mounts: Sequence[filesystems.Mount]) -> bool:
    match names:
        case "nfs":
            return any(one.type.startswith("nfs") and one.source.rpartition(":")[0] == line.subject for one in mounts)
        case "lustre":
            return any(one.type == "lustre" and one.source.endswith(f":/{line.subject}") for one in mounts)
        case "ceph":
            return any(one.type == "ceph" for one in mounts)
    return True
