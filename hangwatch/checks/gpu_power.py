"""What each GPU draws, as `nvidia-smi --query-gpu=power.draw,power.limit` shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Rows, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, GpuSample, Point
from hangwatch.probes.gpu import query
from hangwatch.probes.node.machine import Node

LIMIT_RATIO = Metric(
    name="gpu_power_ratio", help="Power drawn as a share of the enforced limit", labels=("gpu", "uuid")
)


class Settings(contract.Settings, frozen=True):
    """Power of each GPU, and limits that differ among GPUs of one model."""

    limit_tolerance_ratio: Annotated[
        float, Meta(ge=0.0, le=1.0, description="power limits of one model that differ by more than this are a finding")
    ] = 0.05


class Sample(contract.Sample, frozen=True):
    """One sweep over the GPUs."""

    gpus: tuple[GpuSample, ...] = ()


def observe(node: Node, settings: Settings) -> Sample | Fault | None:
    """The newest sample of every GPU."""
    del settings
    sweep = query.sweep(node)
    if sweep is None or isinstance(sweep, Fault):
        return sweep
    if not sweep.gpus and not sweep.faults:
        return None
    own = [fault for gpu in sweep.gpus if gpu.power_watts is None for fault in gpu.faults]
    return Sample(gpus=sweep.gpus, faults=(*sweep.faults, *own))


def points(sample: Sample) -> Iterable[Point]:
    """Power as a share of the limit; the readings themselves are exported with every scrape."""
    for gpu in sample.gpus:
        if gpu.power_watts is not None and gpu.power_limit_watts:
            yield LIMIT_RATIO.point(gpu.power_watts / gpu.power_limit_watts, gpu=str(gpu.index), uuid=gpu.uuid)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """A GPU held to a lower limit than its equals makes every rank of a job wait for it."""
    gpus = window[-1].gpus
    drawn = [gpu for gpu in gpus if gpu.power_watts is not None]
    if not drawn:
        return ok("NoPowerReadings", f"{_count(gpus)} without power readings: this model does not measure its power")
    lowest = min(drawn, key=lambda gpu: gpu.power_watts or 0.0)
    total = sum(gpu.power_watts or 0.0 for gpu in drawn)
    limits = sum(gpu.power_limit_watts or 0.0 for gpu in drawn)
    of_limit = f" of {limits:.0f} W allowed" if limits else ""
    healthy = ok(
        "PowerRead",
        f"{_count(drawn)} draw {total:.0f} W{of_limit}; the lowest is GPU {lowest.index} at {lowest.power_watts:.0f} W",
    )
    return worst(_lowered_limits(gpus, settings), healthy)


def _lowered_limits(gpus: Sequence[GpuSample], settings: Settings) -> Iterable[CheckVerdict]:
    """GPUs whose limit lies under that of most GPUs of their model."""
    for model in dict.fromkeys(gpu.name for gpu in gpus):
        same = [gpu for gpu in gpus if gpu.name == model and gpu.power_limit_watts is not None]
        if not same:
            continue
        usual = Counter(gpu.power_limit_watts or 0.0 for gpu in same).most_common(1)[0][0]
        for gpu in same:
            limit = gpu.power_limit_watts or 0.0
            if limit < usual * (1 - settings.limit_tolerance_ratio):
                yield warning(
                    "PowerLimitLowered",
                    f"GPU {gpu.index} is held to {limit:.0f} W, its equals to {usual:.0f} W: a job runs at its pace",
                    f"nvidia-smi -i {gpu.index} -pl {usual:.0f}",
                )


def _count(gpus: Sequence[GpuSample]) -> str:
    return "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"


def table(sample: Sample) -> Rows:
    """One row per GPU, in the units of nvidia-smi."""
    header = (
        "GPU",
        "name",
        "power.draw",
        "enforced.power.limit",
        "utilization",
        "SM clock",
        "temperature",
        "memory",
        "energy",
    )
    return [header, *(_row(gpu) for gpu in sample.gpus)]


def _row(gpu: GpuSample) -> tuple[str, ...]:
    return (
        str(gpu.index),
        gpu.name or "",
        _shown(gpu.power_watts, 1, "{:.2f} W"),
        _shown(gpu.power_limit_watts, 1, "{:.2f} W"),
        _shown(gpu.utilization_ratio, 100, "{:.0f} %"),
        _shown(gpu.sm_clock_hertz, 1e-6, "{:.0f} MHz"),
        _shown(gpu.temperature_celsius, 1, "{:.0f} C"),
        _shown(gpu.memory_used_bytes, 1 / 2**20, "{:.0f} MiB"),
        _shown(gpu.energy_joules, 1e-6, "{:.2f} MJ"),
    )


def _shown(number: float | None, factor: float, form: str) -> str:
    return "" if number is None else form.format(number * factor)


CHECK = Check(
    name="gpu_power",
    every_seconds=60.0,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(LIMIT_RATIO,),
    absent="this node has no NVIDIA GPU",
    table=table,
)
