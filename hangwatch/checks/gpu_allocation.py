"""GPU memory that no process holds.

Memory may remain in use after a process died in the driver: the next job has less memory than it expects. It is a
finding only if every sample of ten minutes shows it, because jobs take a while to start and to end.
"""

from collections.abc import Iterator, Sequence

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, GpuName
from hangwatch.probes.base import procfs
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import Details, GpuOccupancy
from hangwatch.probes.node.machine import Node

WINDOW = 12  # the samples of twelve minutes
LEFT_SECONDS = 600.0  # of memory in use without a process
GIBIBYTE = 1 << 30
LEFT_BYTES = GIBIBYTE
LEFT_REMEDY = (
    "`fuser -v /dev/nvidia*` lists the processes that have GPUs open: end those of old jobs. If there are none: drain "
    "the node, stop hangwatch, `nvidia-smi --gpu-reset -i {index}`"
)
NAMESPACE_REMEDY = "run hangwatch in the pid namespace of the node: `hostPID: true`, `docker run --pid=host`"


class GpuUse(GpuName, frozen=True):
    """One GPU. `is_used` is true if a process has a context on it; None if the driver does not report that."""

    is_used: bool | None
    memory_used_bytes: int | None = None


class Sample(contract.Sample, frozen=True):
    """All GPUs at one time. `boot_seconds` is the uptime of the node."""

    gpus: tuple[GpuUse, ...]
    boot_seconds: float


def observe(node: Node, _: contract.Settings) -> Sample | Fault | None:
    """Read from the driver if each GPU has a process, and its memory in use."""
    details = query.details(node, Details[GpuOccupancy])
    if not isinstance(details, Details):
        return details
    if not procfs.sees_all_pids(node.proc_root):
        detail = "hangwatch is not in the pid namespace of the node, so it cannot identify the processes of GPUs"
        return Fault(subject="pid namespace", reason="OtherPidNamespace", detail=detail, remedy=NAMESPACE_REMEDY)
    gpus = tuple(GpuUse.copy_from(gpu, is_used=None if gpu.pids is None else bool(gpu.pids)) for gpu in details.gpus)
    return Sample(gpus=gpus, boot_seconds=node.clock.monotonic(), faults=details.faults)


METRICS = (
    Metrics[Sample, GpuUse](
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
    """Find GPUs with memory in use and no process."""
    gpus = window[-1].gpus
    reporting = [gpu for gpu in gpus if gpu.is_used is not None]
    used = sum(bool(gpu.is_used) for gpu in reporting)
    summary = f"{used} of {words.count(len(reporting), 'GPU')} have a process"
    if len(reporting) < len(gpus):
        others = words.count(len(gpus) - len(reporting), "GPU")
        summary += f"; processes of {others} unknown (MIG or vGPU)"
    return worst(_left(window), ok("GpusAccountedFor", summary))


def _left(window: Sequence[Sample]) -> Iterator[CheckVerdict]:
    for gpu in window[-1].gpus:
        seconds = _left_seconds(window, gpu)
        if seconds is not None and seconds >= LEFT_SECONDS:
            memory_gib = (gpu.memory_used_bytes or 0) / GIBIBYTE
            message = f"GPU {gpu.index}: {memory_gib:.1f} GiB in use without a process for {words.duration(seconds)}"
            yield warning("GpuMemoryLeft", message, LEFT_REMEDY.format(index=gpu.index))


def _left_seconds(window: Sequence[Sample], gpu: GpuUse) -> float | None:
    """Return the seconds for which all samples show memory in use and no process on this GPU; None if the last not."""
    began = None
    for sample in reversed(window):
        then = next((other for other in sample.gpus if other.uuid == gpu.uuid), None)
        if then is None or then.is_used is not False or (then.memory_used_bytes or 0) < LEFT_BYTES:
            break
        began = sample.boot_seconds
    return None if began is None else window[-1].boot_seconds - began


CHECK = Check(observe, METRICS, judge, window=WINDOW, parts=contract.gpu_parts, absent="this node has no NVIDIA GPU")
