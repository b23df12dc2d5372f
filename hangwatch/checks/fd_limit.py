"""Open files of the node, of every rank and of every loader worker, compared with their limits (`ulimit -aH`).

Data loaders that pass tensors by file descriptor, checkpoints with many shards and NCCL sockets use many files. A rank
that reaches its limit gets EMFILE in one thread, and the other ranks wait. A job can raise its soft limit only up to
its hard limit, so the check judges both.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, critical, ok, warning, worst
from hangwatch.config import describe
from hangwatch.model import CheckVerdict, Fault, Value, list_by_key
from hangwatch.probes.base import procfs, pseudo_files
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import proc_pid

LABELS = (*contract.JOB, "role")

REMEDY_JOB = (
    "raise the limit where the job starts: LimitNOFILE=1048576 in slurmd's or containerd's unit, `ulimit -n`, "
    "`docker run --ulimit nofile=1048576:1048576`"
)
REMEDY_NODE = "raise fs.file-max by sysctl; `lsof | awk '{print $1}' | sort | uniq -c` counts open files by program"
WORKERS_PER_RANK = 256
WARNING_RATIO = 0.8  # of a limit in use
CRITICAL_RATIO = 0.95


class Settings(contract.Settings, frozen=True):
    """Limits on open files."""

    minimum_hard_limit: Annotated[
        int, describe("warning if the hard limit of a job or a launcher is lower than this", 0, 1 << 30)
    ] = 65536
    launchers: Annotated[tuple[str, ...], describe("processes (comm) that pass their hard limit to jobs")] = (
        "slurmd",
        "containerd",
        "dockerd",
        "crio",
    )


class Holder(Value, frozen=True):
    """A process with its number of open files and its limits. `role` is rank, worker, launcher or shell.

    A launcher and a shell have no `rank` and no `open` (number of open files): only their limits matter, because jobs
    inherit them.
    """

    rank: contract.RankName | None
    role: str
    pid: int
    soft: float
    hard: float
    open: int | None = None
    comm: str = ""

    def __str__(self) -> str:
        name = f"a worker of {self.rank}" if self.role == "worker" else self.rank or self.comm
        return f"{name} (pid {self.pid})"


class Sample(contract.Sample, frozen=True):
    """The number of open files of the node, and the processes with their limits."""

    node_open: int
    node_max: int
    holders: tuple[Holder, ...] = ()


def observe(node: Node, settings: Settings) -> Sample | Fault | None:
    """Read fs.file-nr, the open files and limits of ranks and workers, and the limits of launchers that are alive."""
    text = pseudo_files.read(node.proc_root / "sys" / "fs" / "file-nr", "fs.file-nr")
    if not isinstance(text, str):
        return text
    numbers = text.split()
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        return Fault(subject="fs.file-nr", reason="UnreadableFileNr", detail=f"three numbers expected: {text[:80]!r}")
    answers = [*_ranks(node), *_launchers(node, settings.launchers)]
    return Sample(
        node_open=int(numbers[0]),
        node_max=int(numbers[2]),
        holders=tuple(answer for answer in answers if isinstance(answer, Holder)),
        faults=tuple(answer for answer in answers if isinstance(answer, Fault)),
    )


def _ranks(node: Node) -> Iterator[Holder | Fault | None]:
    for job in node.jobs:
        for rank in job.ranks:
            name = contract.RankName.of_rank(job, rank)
            yield _holder(node.proc_root, rank.id.pid, name, "rank")
            for worker in rank.workers[:WORKERS_PER_RANK]:
                yield _holder(node.proc_root, worker.id.pid, name, "worker")


def _holder(proc_root: Path, pid: int, rank: contract.RankName, role: str) -> Holder | Fault | None:
    limit = proc_pid.file_limit(proc_root, pid)
    if not isinstance(limit, proc_pid.FileLimit):
        return limit
    count = proc_pid.open_files(proc_root, pid)
    if not isinstance(count, int):
        return count
    return Holder(rank=rank, role=role, pid=pid, soft=limit.soft, hard=limit.hard, open=count)


def _launchers(node: Node, comms: tuple[str, ...]) -> Iterator[Holder]:
    """Yield the processes that start jobs, and the shell of the caller if no job runs. Jobs inherit their limits."""
    names = [(*launcher, "launcher") for launcher in procfs.find_by_name(comms, node.proc_root)] if comms else []
    if node.shell_pid is not None and not node.jobs:
        names.append((node.shell_pid, "this shell", "shell"))
    for pid, comm, role in names:
        limit = proc_pid.file_limit(node.proc_root, pid)
        if isinstance(limit, proc_pid.FileLimit):
            yield Holder(rank=None, role=role, pid=pid, comm=comm, soft=limit.soft, hard=limit.hard)


METRICS = (
    Metrics[Sample, Sample](
        Metric("fd_open_files", "files open on the node (fs.file-nr)", lambda sample: sample.node_open),
        Metric("fd_max_files", "maximum of open files on the node (fs.file-max)", lambda sample: sample.node_max),
        Metric(
            "fd_process_open_files",
            "highest number of open files of one process with this role in the job",
            lambda sample: _measure_roles(sample, lambda holders: max(holder.open or 0 for holder in holders)),
            by=LABELS,
        ),
        Metric(
            "fd_process_soft_limit",
            "the job's lowest soft limit on open files",
            lambda sample: _measure_roles(sample, lambda holders: min(holder.soft for holder in holders)),
            by=LABELS,
        ),
        Metric(
            "fd_process_hard_limit",
            "the job's lowest hard limit on open files",
            lambda sample: _measure_roles(sample, lambda holders: min(holder.hard for holder in holders)),
            by=LABELS,
        ),
    ),
)


def _measure_roles(sample: Sample, measure: Callable[[Sequence[Holder]], float]) -> dict[tuple[str, str, str], float]:
    """Return a number for each job and role.

    The verdict names the process. There are no series per rank: they would double the metrics of a node with eight
    ranks.
    """
    of_ranks = (
        ((holder.rank.job.job_id, holder.rank.job.job_key, holder.role), holder)
        for holder in sample.holders
        if holder.rank is not None
    )
    return {labels: measure(holders) for labels, holders in list_by_key(of_ranks).items()}


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Judge the open files of the node and of every process, then the hard limits."""
    sample = window[-1]
    findings = [*_node(sample), *_use(sample), *_low(sample, settings)]
    ranks = words.count(sum(holder.role == "rank" for holder in sample.holders), "rank")
    most = max((holder.open / holder.soft for holder in sample.holders if holder.open is not None), default=None)
    used = f"{ranks} use at most {most:.0%} of their limit" if most is not None else "no training job is running"
    used += "".join(
        f"; `ulimit -n` of this shell: {holder.soft:.0f}, at most {holder.hard:.0f}"
        for holder in sample.holders
        if holder.role == "shell"
    )
    return worst(findings, ok("FilesLeft", f"{sample.node_open} of {sample.node_max} files open on the node; {used}"))


def _node(sample: Sample) -> Iterator[CheckVerdict]:
    used_ratio = sample.node_open / sample.node_max if sample.node_max else 0.0
    message = f"the node has {sample.node_open} of {sample.node_max} files open"
    if used_ratio >= CRITICAL_RATIO:
        yield critical("NodeFilesExhausted", message, REMEDY_NODE)
    elif used_ratio >= WARNING_RATIO:
        yield warning("NodeFilesHigh", message, REMEDY_NODE)


def _use(sample: Sample) -> Iterator[CheckVerdict]:
    for holder in sample.holders:
        used_ratio = (holder.open or 0) / holder.soft if holder.soft else 1.0
        message = f"{holder} has {holder.open} of {holder.soft:.0f} files open"
        if used_ratio >= CRITICAL_RATIO:
            yield critical("FilesExhausted", message, REMEDY_JOB)
        elif used_ratio >= WARNING_RATIO:
            yield warning("FilesHigh", message, REMEDY_JOB)


def _low(sample: Sample, settings: Settings) -> Iterator[CheckVerdict]:
    low = [holder for holder in sample.holders if holder.hard < settings.minimum_hard_limit]
    if low:
        least = min(low, key=lambda holder: holder.hard)
        more = f", and {len(low) - 1} more processes" if len(low) > 1 else ""
        message = f"the hard limit of {least} is {least.hard:.0f} files (minimum {settings.minimum_hard_limit}){more}"
        yield warning("HardLimitLow", message, REMEDY_JOB)


CHECK = Check(observe, METRICS, judge, settings=Settings, absent="this node has no fs.file-nr")
