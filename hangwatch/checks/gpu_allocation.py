"""GPUs on which nobody computes: those that are given to somebody, and those whose memory nobody seems to hold.

Slurm or the kubelet has given a GPU to a job, and no process has a context on it: an interactive session that nobody
uses, or a job whose processes have died. It is said whose it is; it may be in order, so it is no more than a warning.
Memory that stays taken on a GPU without any process is what a process left that died in the driver: the next job finds
less memory than it expects. Both count only where each look over a time saw it, since jobs take a while to begin and to
end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated

from msgspec import Meta

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Rows, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Point, Value
from hangwatch.probes.gpu import gpu_holders, query
from hangwatch.probes.gpu.details import OccupancyDetails
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import proc_pid

GPU = ("gpu", "uuid")
IDLE = Metric(name="gpu_held_without_process", help="1 while it is given to somebody, and nobody computes", labels=GPU)
LEFT = Metric(name="gpu_memory_without_process_bytes", help="memory taken while it has no process", labels=GPU)
EVERY_SECONDS = 60.0
LONGEST_SECONDS = 7200.0
GIBIBYTE = 1 << 30
LEFT_REMEDY = (
    "`fuser -v /dev/nvidia*` shows who has the GPUs open: end what a job has left behind; if nobody has, drain the "
    "node, stop hangwatch, `nvidia-smi --gpu-reset -i {index}`"
)
NAMESPACE_REMEDY = "run it in the pid namespace of the node: `hostPID: true`, `docker run --pid=host`"


class Settings(contract.Settings, frozen=True):
    """After how long a GPU without a process is a finding."""

    held_seconds: Annotated[
        float, Meta(ge=EVERY_SECONDS, le=LONGEST_SECONDS, description="given to somebody, and no process for so long")
    ] = 1800.0
    left_seconds: Annotated[
        float, Meta(ge=EVERY_SECONDS, le=LONGEST_SECONDS, description="memory taken and no process for so long")
    ] = 600.0
    left_bytes: Annotated[int, Meta(ge=1, description="less memory than this is nothing")] = GIBIBYTE


class GpuUse(Value, frozen=True):
    """One GPU: whether a process has a context on it (None where the driver does not tell), and to whom it is given."""

    index: int
    uuid: str
    is_used: bool | None
    memory_used_bytes: int | None = None
    holders: tuple[gpu_holders.Holder, ...] = ()


class Sample(contract.Sample, frozen=True):
    """All GPUs at one moment."""

    gpus: tuple[GpuUse, ...]
    boot_seconds: float


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Ask the driver who computes; where nobody does, ask to whom the GPU is given."""
    details = query.details(node, OccupancyDetails)
    if not isinstance(details, OccupancyDetails):
        return details
    if not (details.gpus or details.faults):
        return None
    if not proc_pid.sees_all_pids(node.proc_root):
        why = "the driver lists processes of the node, and this is a pid namespace of its own: who computes is not seen"
        return Fault(subject="pid namespace", reason="OtherPidNamespace", detail=why, remedy=NAMESPACE_REMEDY)
    asked = gpu_holders.Holders()
    if any(gpu.pids == () for gpu in details.gpus):
        asked = gpu_holders.read(node.proc_root, [gpu.uuid for gpu in details.gpus])
    gpus = tuple(
        GpuUse(
            index=gpu.index,
            uuid=gpu.uuid,
            is_used=None if gpu.pids is None else bool(gpu.pids),
            memory_used_bytes=gpu.memory_used_bytes,
            holders=tuple(holder for holder in asked.holders if gpu.uuid in holder.gpu_uuids),
        )
        for gpu in details.gpus
    )
    return Sample(gpus=gpus, boot_seconds=node.clock.monotonic(), faults=(*details.faults, *asked.faults))


def points(sample: Sample) -> Iterable[Point]:
    """What of this moment may be a finding, if it lasts."""
    for gpu in sample.gpus:
        if gpu.is_used is None:
            continue
        own = {"gpu": str(gpu.index), "uuid": gpu.uuid}
        yield IDLE.point(not gpu.is_used and bool(gpu.holders), **own)
        if gpu.memory_used_bytes is not None:
            yield LEFT.point(0 if gpu.is_used else gpu.memory_used_bytes, **own)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """What every look has seen for long enough: memory that is left, then GPUs that are given and not used."""
    gpus = window[-1].gpus
    told = [gpu for gpu in gpus if gpu.is_used is not None]
    used = sum(bool(gpu.is_used) for gpu in told)
    unused = [f"{_numbers([gpu])} is given to {_who(gpu.holders, window[-1])}" for gpu in told if _is_held(gpu)]
    summary = f"{used} of {words.count(len(told), 'GPU')} have a process"
    if unused:
        summary += f"; {contract.listed(unused)}: none on it now"
    if len(told) < len(gpus):
        summary += f"; of {words.count(len(gpus) - len(told), 'other')} the driver lists no processes (MIG, vGPU)"
    return worst([*_left(window, settings), *_held(window, settings)], ok("GpusAccountedFor", summary))


def _left(window: Sequence[Sample], settings: Settings) -> Iterator[CheckVerdict]:
    for gpu in window[-1].gpus:
        seconds = _seconds(window, gpu, lambda now: (now.memory_used_bytes or 0) >= settings.left_bytes)
        if seconds is not None and seconds >= settings.left_seconds:
            taken = (gpu.memory_used_bytes or 0) / GIBIBYTE
            whose = f"; it is given to {_who(gpu.holders, window[-1])}" if gpu.holders else ""
            empty = f"no process in any look of the last {words.duration(seconds)}"
            message = f"{_numbers([gpu])}: {taken:.1f} GiB are taken, and {empty}{whose}"
            yield warning("GpuMemoryLeft", message, LEFT_REMEDY.format(index=gpu.index))


def _held(window: Sequence[Sample], settings: Settings) -> Iterator[CheckVerdict]:
    """One finding for all GPUs of the same holders."""
    together: dict[tuple[str, ...], list[tuple[GpuUse, float]]] = {}
    for gpu in filter(_is_held, window[-1].gpus):
        names = _names(gpu)
        seconds = _seconds(window, gpu, partial(_is_held_by, names))
        if seconds is not None and seconds >= settings.held_seconds:
            together.setdefault(names, []).append((gpu, seconds))
    for found in together.values():
        gpus, seconds = [gpu for gpu, _ in found], min(seconds for _, seconds in found)
        who = _who(gpus[0].holders, window[-1])
        message = f"{_numbers(gpus)}: no process in any look of the last {words.duration(seconds)}; given to {who}"
        yield warning("GpuHeldIdle", message, _remedy(gpus[0].holders))


def _seconds(window: Sequence[Sample], gpu: GpuUse, holds: Callable[[GpuUse], bool]) -> float | None:
    """For how long each look has seen this GPU without a process and so; None where the last one has not."""
    began = None
    for sample in reversed(window):
        now = next((one for one in sample.gpus if one.uuid == gpu.uuid), None)
        if now is None or now.is_used is not False or not holds(now):
            break
        began = sample.boot_seconds
    return None if began is None else window[-1].boot_seconds - began


def _is_held(gpu: GpuUse) -> bool:
    return gpu.is_used is False and bool(gpu.holders)


def _is_held_by(names: tuple[str, ...], gpu: GpuUse) -> bool:
    return _names(gpu) == names


def _names(gpu: GpuUse) -> tuple[str, ...]:
    return tuple(dict.fromkeys(holder.name for holder in gpu.holders))


def _who(holders: Sequence[gpu_holders.Holder], sample: Sample) -> str:
    """`Slurm job 4711 of uid 1004 for 3 h 02 min`."""
    said = []
    for holder in holders:
        user = "" if holder.uid is None else f" of uid {holder.uid}"
        container = f" (container {holder.container})" if holder.container else ""
        age_seconds = max(0.0, sample.boot_seconds - holder.began_boot_seconds)
        said.append(f"{holder.name}{user}{container} for {words.duration(age_seconds)}")
    return contract.listed(said)


def _numbers(gpus: Sequence[GpuUse]) -> str:
    return f"GPU{'' if len(gpus) == 1 else 's'} {words.fold(gpu.index for gpu in gpus)}"


def _remedy(holders: Sequence[gpu_holders.Holder]) -> str:
    """How to find out who it is, and give the GPUs back."""
    kind, _, number = holders[0].name.rpartition(" ")
    if kind == "pod":
        columns = "NS:.metadata.namespace,NAME:.metadata.name,UID:.metadata.uid"
        return f"`kubectl get pods -A -o custom-columns={columns} | grep {number}`; ask its owner"
    return f"`scontrol show job {number}`, `sstat -a {number}`; ask its owner, then `scancel {number}`"


def table(sample: Sample) -> Rows:
    """One row per GPU."""
    return [("GPU", "has a process", "memory taken (GiB)", "given to"), *(_row(gpu, sample) for gpu in sample.gpus)]


def _row(gpu: GpuUse, sample: Sample) -> tuple[str, ...]:
    used = "" if gpu.is_used is None else "yes" if gpu.is_used else "no"
    taken = "" if gpu.memory_used_bytes is None else f"{gpu.memory_used_bytes / GIBIBYTE:.1f}"
    return (str(gpu.index), used, taken, _who(gpu.holders, sample) if gpu.holders else "")


CHECK = Check(
    name="gpu_allocation",
    every_seconds=EVERY_SECONDS,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(IDLE, LEFT),
    table=table,
    window=int(LONGEST_SECONDS / EVERY_SECONDS) + 2,
    absent="this node has no NVIDIA GPU",
)
