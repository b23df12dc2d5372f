"""State of the processes of every job: missing, dead, stopped, or in an uninterruptible sleep.

If a rank ends while the others run, the others hang. A rank in an uninterruptible sleep (D) waits for a disk, a
network file system or a driver. A stopped rank (T) waits for a debugger or SIGCONT.
"""

from collections.abc import Sequence

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import JOB, Check, Metric, Metrics, critical, ok, warning, worst
from hangwatch.model import BLOCKED_STATES, ENDED_STATES, STOPPED_STATES, CheckVerdict, Fault, Job, JobName, Rank, Value
from hangwatch.probes.base import procfs
from hangwatch.probes.node.machine import Node

LAUNCHERS_LISTED = 4
GONE = "gone"
NO_PROCESS = ENDED_STATES | {GONE}
UNHEALTHY_STATES = NO_PROCESS | BLOCKED_STATES | STOPPED_STATES


class RankState(Value, frozen=True):
    """One rank. `state` is the state letter of its main thread in /proc, or "gone" if the process does not exist.

    `resident_bytes` includes the memory of its workers; it is None if not known. `wchan`, the kernel function in
    which it sleeps, is set only in D state.
    """

    rank: contract.RankName
    pid: int
    state: str
    resident_bytes: int | None
    dead_workers: int
    wchan: str | None = None


class JobState(Value, frozen=True):
    """The ranks of a job. `absent` are the local ranks that hangwatch expected but has never seen.

    `launcher` is the name of a launcher that has not started ranks yet, else empty.
    """

    job: JobName
    expected: int
    ranks: tuple[RankState, ...]
    absent: tuple[range, ...] = ()
    launcher: str = ""

    def count(self, letters: frozenset[str]) -> int:
        """Return the number of ranks in one of these states."""
        return sum(rank.state in letters for rank in self.ranks)


class Sample(contract.Sample, frozen=True):
    """All jobs at one time."""

    jobs: tuple[JobState, ...]


def observe(node: Node, _: contract.Settings) -> Sample | Fault | None:
    """Read the state and memory of every rank and worker."""
    if not node.jobs:
        return None
    return Sample(jobs=tuple(_job(node, job) for job in node.jobs))


def _job(node: Node, job: Job) -> JobState:
    ranks = tuple(_rank(node, job, rank) for rank in job.ranks)
    expected = job.local_world_size or len(job.ranks) + sum(map(len, job.absent))
    launcher = job.waiting.launcher if job.waiting else ""
    return JobState(job=job.name, expected=expected, ranks=ranks, absent=job.absent, launcher=launcher)


def _rank(node: Node, job: Job, rank: Rank) -> RankState:
    now = procfs.read_stat(f"{node.proc_root}/{rank.id.pid}")
    if now is not None and now.start_ticks != rank.id.start_ticks:
        now = None
    state = GONE if now is None else now.state
    workers = [procfs.read_stat(f"{node.proc_root}/{worker.id.pid}") for worker in rank.workers]
    stats = [] if now is None else [stat for stat in (now, *workers) if stat is not None]
    return RankState(
        rank=contract.RankName.of_rank(job, rank),
        pid=rank.id.pid,
        state="T" if state in STOPPED_STATES else state,
        resident_bytes=sum(stat.resident_bytes for stat in stats) or None,
        dead_workers=sum(stat.state in ENDED_STATES for stat in stats[1:]),
        wchan=procfs.read_counters(rank.id.pid, node.proc_root).wchan if state in BLOCKED_STATES else None,
    )


METRICS = (
    Metrics[Sample, JobState](
        Metric("ranks_expected", "ranks that the job should have on this node", lambda job: job.expected),
        Metric("ranks_alive", "ranks that are alive", lambda job: len(job.ranks) - job.count(NO_PROCESS)),
        Metric("ranks_uninterruptible", "ranks in an uninterruptible sleep (D)", lambda job: job.count(BLOCKED_STATES)),
        Metric("ranks_stopped", "ranks that are stopped (T)", lambda job: job.count(STOPPED_STATES)),
        Metric(
            "ranks_zombies",
            "ranks and workers that ended and were not reaped (Z)",
            lambda job: job.count(ENDED_STATES) + sum(rank.dead_workers for rank in job.ranks),
        ),
        subjects=lambda sample: sample.jobs,
        labels=JOB,
    ),
    Metrics[Sample, RankState](
        Metric("ranks_resident_memory_bytes", "memory of a rank and its workers", lambda rank: rank.resident_bytes),
        subjects=lambda sample: (rank for job in sample.jobs for rank in job.ranks),
        labels=contract.RANK,
    ),
)


def judge(window: Sequence[Sample], _: contract.Settings) -> CheckVerdict:
    """Judge problems that two samples in a row show. D state and missing ranks are a warning, other problems critical.

    A short D state is normal when a process reads a file. With only one sample, each problem is a warning.
    """
    is_only_sample = len(window) == 1
    before = {} if is_only_sample else _problems(window[-2])
    findings = [
        _finding(job, name, problem, is_confirmed=not is_only_sample)
        for (job, name), problem in _problems(window[-1]).items()
        if is_only_sample or before.get((job, name), ("", ""))[0] == problem[0]
    ]
    alive = sum(rank.state not in NO_PROCESS for job in window[-1].jobs for rank in job.ranks)
    memory = sum(rank.resident_bytes or 0 for job in window[-1].jobs for rank in job.ranks)
    jobs = words.count(len(window[-1].jobs), "job")
    summary = f"all {words.count(alive, 'rank')} of {jobs} alive; memory {memory / (1 << 30):.1f} GiB"
    starting = [job for job in window[-1].jobs if job.launcher]
    if starting:
        first = ", ".join(f"{job.launcher} of job {job.job}" for job in starting[:LAUNCHERS_LISTED])
        summary += f"; {words.count(len(starting), 'launcher')} without ranks yet: {first}"
    return worst(findings, ok("RanksAlive", summary))


def _problems(sample: Sample) -> dict[tuple[JobName, str], tuple[str, str]]:
    """Return (job, name of the rank) -> (problem, detail) for ranks that are missing, dead, stopped or in D state."""
    problems = {}
    for job in sample.jobs:
        for numbers in job.absent:
            name = f"local rank{'s' if len(numbers) > 1 else ''} {words.fold_ranges([numbers])}"
            problems[job.job, name] = (GONE, "")
        for rank in job.ranks:
            if rank.state in UNHEALTHY_STATES:
                detail = f" in {rank.wchan}" if rank.wchan else ""
                problems[job.job, f"local rank {rank.rank.local_rank} (pid {rank.pid})"] = (rank.state, detail)
    return problems


def _finding(job: JobName, name: str, problem: tuple[str, str], *, is_confirmed: bool) -> CheckVerdict:
    state, detail = problem
    level = critical if is_confirmed else warning
    rank = f"{name} of job {job}"
    once = "" if is_confirmed else " (seen once; check again)"
    remedy = "`hangwatch check oom`; read the log of the job; the other ranks wait until their timeout"
    if state == GONE:
        # A rank that finished normally is gone too. The diagnosis decides if the other ranks wait for it.
        return warning("RankGone", f"{rank} no longer exists{once}", remedy)
    if state in ENDED_STATES:
        return level("RankExited", f"{rank} has ended and was not reaped by its parent{once}", remedy)
    if state in STOPPED_STATES:
        return level("RankStopped", f"{rank} is stopped{once}", "look for a debugger; `kill -CONT PID` continues it")
    remedy = "`hangwatch check storage`; `cat /proc/PID/stack` as root shows the kernel function in which it waits"
    return warning("RankUninterruptible", f"{rank} is in an uninterruptible sleep{detail}{once}", remedy)


def table(sample: Sample) -> contract.Rows:
    """Return one row per rank, with its state and memory."""
    yield "job", "local rank", "pid", "state", "memory with workers (GiB)", "dead workers"
    for job in sample.jobs:
        for rank in job.ranks:
            memory = "" if rank.resident_bytes is None else f"{rank.resident_bytes / (1 << 30):.2f}"
            state = f"{rank.state} {rank.wchan}" if rank.wchan else rank.state
            yield job.job, rank.rank.local_rank, rank.pid, state, memory, rank.dead_workers


CHECK = Check(observe, METRICS, judge, table, every_seconds=15, absent="no training job runs on this node")
