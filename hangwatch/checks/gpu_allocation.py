"""GPUs without a process: allocated GPUs that no process uses, and GPU memory that no process holds.

Slurm or the kubelet may have allocated a GPU on which no process has a context: an unused interactive session, or a job
with dead processes. That may be intended, so it is only a warning; it names the owner. Memory may remain in use after a
process died in the driver: the next job has less memory than it expects. Both are findings only if every sample over a
configured time shows them, because jobs take a while to start and to end.
"""

from collections.abc import Callable, Iterator, Sequence

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, Rows, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, GpuName
from hangwatch.probes.base import procfs
from hangwatch.probes.gpu import gpu_holders, query
from hangwatch.probes.gpu.details import Details, GpuOccupancy
from hangwatch.probes.node.machine import Node

WINDOW = 122  # the samples of two hours
HELD_SECONDS = 1800.0  # of an allocated GPU without a process
LEFT_SECONDS = 600.0  # of memory in use without a process
GIBIBYTE = 1 << 30
LEFT_BYTES = GIBIBYTE
LEFT_REMEDY = (
    "`fuser -v /dev/nvidia*` lists the processes that have GPUs open: end those of old jobs. If there are none: drain "
    "the node, stop hangwatch, `nvidia-smi --gpu-reset -i {index}`"
)
NAMESPACE_REMEDY = "run hangwatch in the pid namespace of the node: `hostPID: true`, `docker run --pid=host`"


class GpuUse(GpuName, frozen=True):
    """One GPU and its allocations.

    `is_used` is true if a process has a context on the GPU. It is None if the driver does not report that.
    """

    is_used: bool | None
    memory_used_bytes: int | None = None
    holders: tuple[gpu_holders.Holder, ...] = ()


class Sample(contract.Sample, frozen=True):
    """All GPUs at one time. `boot_seconds` is the uptime of the node."""

    gpus: tuple[GpuUse, ...]
    boot_seconds: float


def observe(node: Node, _: contract.Settings) -> Sample | Fault | None:
    """Read from the driver if each GPU has a process. If one has none, read the allocations too."""
    details = query.details(node, Details[GpuOccupancy])
    if not isinstance(details, Details):
        return details
    if not procfs.sees_all_pids(node.proc_root):
        detail = "hangwatch is not in the pid namespace of the node, so it cannot identify the processes of GPUs"
        return Fault(subject="pid namespace", reason="OtherPidNamespace", detail=detail, remedy=NAMESPACE_REMEDY)
    allocated = gpu_holders.Holders()
    if any(gpu.pids == () for gpu in details.gpus):
        allocated = gpu_holders.read(node.proc_root, [gpu.uuid for gpu in details.gpus])
    gpus = tuple(
        GpuUse.copy_from(
            gpu,
            is_used=None if gpu.pids is None else bool(gpu.pids),
            holders=tuple(holder for holder in allocated.holders if gpu.uuid in holder.gpu_uuids),
        )
        for gpu in details.gpus
    )
    return Sample(gpus=gpus, boot_seconds=node.clock.monotonic(), faults=(*details.faults, *allocated.faults))


METRICS = (
    Metrics[Sample, GpuUse](
        Metric(
            "gpu_held_without_process",
            "1 while the GPU is allocated and has no process",
            lambda gpu: not gpu.is_used and bool(gpu.holders),
        ),
        Metric(
            "gpu_memory_without_process_bytes",
            "memory in use while the GPU has no process",
            lambda gpu: 0 if gpu.is_used and gpu.memory_used_bytes is not None else gpu.memory_used_bytes,
        ),
        subjects=lambda sample: (gpu for gpu in sample.gpus if gpu.is_used is not None),
        labels=contract.GPU,
    ),
)


def judge(window: Sequence[Sample], _: contract.Settings) -> CheckVerdict:
    """Find GPUs without a process: first those with memory in use, then those with an allocation."""
    gpus = window[-1].gpus
    reporting = [gpu for gpu in gpus if gpu.is_used is not None]
    used = sum(bool(gpu.is_used) for gpu in reporting)
    unused = [f"{_numbers([gpu])}, allocated to {_owners(gpu, window[-1])}" for gpu in reporting if _is_held(gpu)]
    summary = f"{used} of {words.count(len(reporting), 'GPU')} have a process"
    if unused:
        summary += f"; no process on {contract.join_first(unused)}"
    if len(reporting) < len(gpus):
        others = words.count(len(gpus) - len(reporting), "GPU")
        summary += f"; processes of {others} unknown (MIG or vGPU)"
    return worst([*_left(window), *_held(window)], ok("GpusAccountedFor", summary))


def _left(window: Sequence[Sample]) -> Iterator[CheckVerdict]:
    for gpu in window[-1].gpus:
        seconds = _idle_seconds(window, gpu, lambda now: (now.memory_used_bytes or 0) >= LEFT_BYTES)
        if seconds is not None and seconds >= LEFT_SECONDS:
            memory_gib = (gpu.memory_used_bytes or 0) / GIBIBYTE
            owner = f"; allocated to {_owners(gpu, window[-1])}" if gpu.holders else ""
            memory = f"{_numbers([gpu])}: {memory_gib:.1f} GiB in use without a process"
            message = f"{memory} for {words.duration(seconds)}{owner}"
            yield warning("GpuMemoryLeft", message, LEFT_REMEDY.format(index=gpu.index))


def _held(window: Sequence[Sample]) -> Iterator[CheckVerdict]:
    """Find allocated GPUs without a process. Yield one finding for all GPUs of the same owners."""
    by_owner: dict[tuple[str, ...], list[tuple[GpuUse, float]]] = {}
    for gpu in filter(_is_held, window[-1].gpus):
        names = _names(gpu)
        seconds = _idle_seconds(window, gpu, lambda now, names=names: _names(now) == names)  # type: ignore[misc]
        if seconds is not None and seconds >= HELD_SECONDS:
            by_owner.setdefault(names, []).append((gpu, seconds))
    for idle in by_owner.values():
        gpus, seconds = [gpu for gpu, _ in idle], min(seconds for _, seconds in idle)
        owners = _owners(gpus[0], window[-1])
        message = f"{_numbers(gpus)}: no process for {words.duration(seconds)}; allocated to {owners}"
        yield warning("GpuHeldIdle", message, _remedy(gpus[0].holders))


def _idle_seconds(window: Sequence[Sample], gpu: GpuUse, condition: Callable[[GpuUse], bool]) -> float | None:
    """Return the seconds for which this GPU has had no process, with `condition` true, in all samples since then.

    None if the last sample shows a process on this GPU, or `condition` is false in it.
    """
    began = None
    for sample in reversed(window):
        then = next((other for other in sample.gpus if other.uuid == gpu.uuid), None)
        if then is None or then.is_used is not False or not condition(then):
            break
        began = sample.boot_seconds
    return None if began is None else window[-1].boot_seconds - began


def _is_held(gpu: GpuUse) -> bool:
    return gpu.is_used is False and bool(gpu.holders)


def _names(gpu: GpuUse) -> tuple[str, ...]:
    return tuple(dict.fromkeys(holder.name for holder in gpu.holders))


def _owners(gpu: GpuUse, sample: Sample) -> str:
    """Return the owners of a GPU as text: `Slurm job 4711 of uid 1004 for 3 h 02 min`."""
    owners = []
    for holder in gpu.holders:
        user = "" if holder.uid is None else f" of uid {holder.uid}"
        container = f" (container {holder.container})" if holder.container else ""
        age_seconds = max(0.0, sample.boot_seconds - holder.began_boot_seconds)
        owners.append(f"{holder.name}{user}{container} for {words.duration(age_seconds)}")
    return contract.join_first(owners)


def _numbers(gpus: Sequence[GpuUse]) -> str:
    return f"GPU{'' if len(gpus) == 1 else 's'} {words.fold(gpu.index for gpu in gpus)}"


def _remedy(holders: Sequence[gpu_holders.Holder]) -> str:
    """Return the commands that find the owner of an allocation; for Slurm, also the command that ends the job."""
    kind, _, number = holders[0].name.rpartition(" ")
    if kind == "pod":
        columns = "NS:.metadata.namespace,NAME:.metadata.name,UID:.metadata.uid"
        return f"`kubectl get pods -A -o custom-columns={columns} | grep {number}`; ask its owner"
    return f"`scontrol show job {number}`, `sstat -a {number}`; ask its owner, then `scancel {number}`"


def table(sample: Sample) -> Rows:
    """Return one row per GPU."""
    yield "GPU", "has a process", "memory in use (GiB)", "allocated to"
    for gpu in sample.gpus:
        memory = "" if gpu.memory_used_bytes is None else f"{gpu.memory_used_bytes / GIBIBYTE:.1f}"
        yield gpu.index, gpu.is_used, memory, _owners(gpu, sample)


CHECK = Check(
    observe, METRICS, judge, table, window=WINDOW, parts=contract.gpu_parts, absent="this node has no NVIDIA GPU"
)
