"""Size and free space of the shared memory (/dev/shm) of the node, and of jobs that have their own.

Data loaders and NCCL use it. A container has 64 MiB by default. If it is full, a loader worker dies of a bus error, or
NCCL cannot set up its transport, and the other ranks wait.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, critical, join_first, ok, warning, worst
from hangwatch.config import describe
from hangwatch.model import CheckVerdict, Fault, JobName, Value
from hangwatch.probes.base import filesystems, procfs
from hangwatch.probes.node.machine import Node

DEADLINE_SECONDS = 3.0
_SHOWN = 3
REMEDY_SIZE = (
    "docker run --shm-size=64g or --ipc=host; in Kubernetes mount an emptyDir with medium: Memory at /dev/shm; "
    "on the node `mount -o remount,size=64g /dev/shm`"
)
REMEDY_FULL = "`ls -lhS /dev/shm`: remove torch_* and nccl-* files of processes that have ended"


class Settings(contract.Settings, frozen=True):
    """Limits on size and free space."""

    minimum_size_bytes: Annotated[int, describe("warning if /dev/shm is smaller than this", 0)] = 1 << 30
    warning_available_ratio: Annotated[float, describe("warning if less space than this is left", 0.0, 1.0)] = 0.10
    critical_available_ratio: Annotated[float, describe("critical if less space than this is left", 0.0, 1.0)] = 0.01


class Shm(Value, frozen=True):
    """One /dev/shm, in the mount namespace of `job`; `job` is None for the /dev/shm of the node."""

    job: JobName | None
    size_bytes: int
    available_bytes: int

    @property
    def available_ratio(self) -> float:
        """Share of the space that is left; 0 if it has no size."""
        return self.available_bytes / self.size_bytes if self.size_bytes else 0.0

    def __str__(self) -> str:
        owner = "the node" if self.job is None else f"job {self.job}"
        free = f"{_mib(self.available_bytes)} of {_mib(self.size_bytes)}"
        return f"{owner} has {free} left in /dev/shm"


class Sample(contract.Sample, frozen=True):
    """Every /dev/shm in use."""

    shms: tuple[Shm, ...]


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Measure /dev/shm of the node, and of jobs in another mount namespace, through /proc/PID/root.

    The node's /dev/shm is that of process 1. A hangwatch in a container has a /dev/shm of its own, which is
    measured only if that of process 1 cannot be read.
    """
    measured_namespaces = {procfs.namespace(node.proc_root, view, "mnt") for view in ("1", "self")} | {None}
    of_init, of_ours = f"{node.proc_root}/1/root/dev/shm", str(node.dev_root / "shm")
    paths: dict[str, JobName | None] = {of_init: None, of_ours: None}
    for job in node.jobs:
        pid = job.ranks[0].id.pid if job.ranks else None
        if pid is not None and procfs.namespace(node.proc_root, pid, "mnt") not in measured_namespaces:
            paths[f"{node.proc_root}/{pid}/root/dev/shm"] = job.name
    answers = node.filesystems.read_space(list(paths), DEADLINE_SECONDS)
    answers.pop(of_ours if isinstance(answers[of_init], filesystems.Space) else of_init)
    shms = [
        Shm(job=paths[path], size_bytes=answer.size_bytes, available_bytes=answer.available_bytes)
        for path, answer in answers.items()
        if isinstance(answer, filesystems.Space)
    ]
    # A missing /dev/shm is not a fault: the job may have ended, or its container may have no /dev/shm.
    reported = ("NoAnswer", filesystems.NOT_STARTED)
    faults = [answer for answer in answers.values() if isinstance(answer, Fault) and answer.reason in reported][:4]
    return Sample(shms=tuple(shms), faults=tuple(faults)) if shms or faults else None


METRICS = (
    Metrics[Sample, Shm](
        Metric("shared_memory_size_bytes", "size of /dev/shm", lambda shm: shm.size_bytes),
        Metric("shared_memory_available_bytes", "bytes left in /dev/shm", lambda shm: shm.available_bytes),
        subjects=lambda sample: sample.shms,
        labels={"scope": lambda shm: "node" if shm.job is None else "job", **contract.JOB},
    ),
)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Judge the free space and the size of each /dev/shm."""
    sample = window[-1]
    findings = [finding for shm in sample.shms for finding in _judge_one(shm, settings)]
    fullest_first = sorted(sample.shms, key=lambda shm: (shm.job is not None, shm.available_ratio))
    return worst(findings, ok("SharedMemoryLeft", join_first(list(map(str, fullest_first)), _SHOWN)))


def _judge_one(shm: Shm, settings: Settings) -> Iterator[CheckVerdict]:
    if shm.available_ratio < settings.critical_available_ratio:
        yield critical("SharedMemoryFull", str(shm), REMEDY_FULL)
    elif shm.available_ratio < settings.warning_available_ratio:
        yield warning("SharedMemoryLow", str(shm), REMEDY_FULL)
    if shm.size_bytes < settings.minimum_size_bytes:
        message = f"{shm}; loaders commonly need {_mib(settings.minimum_size_bytes)}"
        yield warning("SharedMemorySmall", message, REMEDY_SIZE)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"


CHECK = Check(observe, METRICS, judge, settings=Settings, every_seconds=60, absent="this node has no /dev/shm")
