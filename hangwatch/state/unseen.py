"""The ranks with a source that hangwatch cannot read, and why: one list for `status`, metrics and `slow`. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from hangwatch import words
from hangwatch.model import Fault, GpuSample, Job, JobName, Rank, Value, list_by_key
from hangwatch.state.board import JobEntry, Snapshot

RECORDER = "flight recorder"
Source: TypeAlias = Literal["flight recorder", "GPU power", "stack"]
_NO_READING = Fault(subject="gpu", reason="NoReading", detail="the driver has not reported the power of its GPUs")


class Unseen(Value, frozen=True):
    """The ranks of a job on this node with a source that hangwatch cannot read, for one reason.

    `ranks` is their number. `reason` is the CamelCase word of the fault, `detail` its text, of the first of these
    ranks. "RecorderUnread" means that hangwatch does not know this version of PyTorch.
    """

    job: JobName
    source: Source
    reason: str
    detail: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def list_unseen(snapshot: Snapshot) -> tuple[Unseen, ...]:
    """Return the sources that are missing, by job, source and reason."""
    shared = find_shared_gpus(snapshot)
    return tuple(unseen for entry in snapshot.living for unseen in _of_job(entry, snapshot, shared))


def _of_job(entry: JobEntry, snapshot: Snapshot, shared: Mapping[str, Sequence[Job]]) -> Iterator[Unseen]:
    sources: dict[Source, Iterable[Fault]] = {
        "flight recorder": entry.counter_faults,
        "GPU power": (
            fault
            for rank in entry.job.ranks
            if (fault := _power_fault(rank, snapshot) or _sharing(entry.job, rank, shared)) is not None
        ),
        "stack": _stack_faults(entry),
    }
    for source, faults in sources.items():
        for reason, alike in sorted(list_by_key((fault.reason, fault) for fault in faults).items()):
            yield Unseen(
                job=entry.job.name,
                source=source,
                reason=reason,
                detail=words.printable("; ".join(filter(None, (alike[0].detail, alike[0].remedy)))),
                ranks=len(alike),
            )


def _power_fault(rank: Rank, snapshot: Snapshot) -> Fault | None:
    """Return the reason why the power of a GPU of the rank is not known; None if it is, or before the first sample."""
    if not rank.gpu_uuids or (snapshot.sweep is None and snapshot.sampler.fault is None):
        return None
    gpus = snapshot.sweep.gpus if snapshot.sweep is not None and snapshot.sampler.alive else ()
    read = {gpu.uuid for gpu in gpus if gpu.power_watts is not None}
    return None if read.issuperset(rank.gpu_uuids) else snapshot.sampler.fault or _NO_READING


def _sharing(job: Job, rank: Rank, shared: Mapping[str, Sequence[Job]]) -> Fault | None:
    """Return a fault if ranks of other jobs are on a GPU of the rank."""
    others = {other.name: None for uuid in rank.gpu_uuids for other in shared.get(uuid, ()) if other.key != job.key}
    if not others:
        return None
    return Fault(subject="gpu", reason="PowerShared", detail=f"power is shared with job {', '.join(map(str, others))}")


def _stack_faults(entry: JobEntry) -> Iterator[Fault]:
    incident = entry.open_incident
    for group in () if incident is None else incident.grouping.groups:
        if group.fault is not None and not group.gone:
            yield from [group.fault] * group.size


def find_shared_gpus(snapshot: Snapshot) -> dict[str, tuple[Job, ...]]:
    """Return the living jobs on each GPU that several of them share, by the uuid of the GPU.

    An environment can claim any GPU. So a job counts only if the driver lists its processes on the GPU, or if the GPU
    is divided into MIG instances.
    """
    gpus = snapshot.sweep.gpus if snapshot.sweep is not None else ()
    users = {gpu.uuid: tuple(entry.job for entry in snapshot.living if _uses(entry.job, gpu)) for gpu in gpus}
    return {uuid: jobs for uuid, jobs in users.items() if len(jobs) > 1}


def _uses(job: Job, gpu: GpuSample) -> bool:
    return gpu.uuid in job.gpu_uuids and (bool(gpu.mig_uuids) or not job.pids.isdisjoint(gpu.pids))
