"""Power and power limit of each GPU, as `nvidia-smi --query-gpu=power.draw,power.limit` shows them."""

from collections import Counter
from collections.abc import Iterable, Sequence

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import GPU, Check, Metric, Metrics, Rows, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, GpuSample
from hangwatch.probes.gpu import query
from hangwatch.probes.node.machine import Node

LIMIT_TOLERANCE_RATIO = 0.05  # between the power limits of GPUs of one model


class Sample(contract.Sample, frozen=True):
    """The newest power sample of every GPU."""

    gpus: tuple[GpuSample, ...] = ()


def observe(node: Node, _: contract.Settings) -> Sample | Fault | None:
    """Return the newest power sample of every GPU."""
    sweep = query.sweep(node)
    if sweep is None or isinstance(sweep, Fault):
        return sweep
    if not sweep.gpus and not sweep.faults:
        return None
    power_faults = [fault for gpu in sweep.gpus if gpu.power_watts is None for fault in gpu.faults]
    return Sample(gpus=sweep.gpus, faults=(*sweep.faults, *power_faults))


METRICS = (
    Metrics[Sample, GpuSample](
        Metric(
            "gpu_power_ratio",
            "Power drawn as a share of the enforced limit",
            lambda gpu: (
                None
                if gpu.power_watts is None or not gpu.power_limit_watts
                else gpu.power_watts / gpu.power_limit_watts
            ),
        ),
        subjects=lambda sample: sample.gpus,
        labels=GPU,
    ),
)


def judge(window: Sequence[Sample], _: contract.Settings) -> CheckVerdict:
    """Find GPUs with a lower power limit than the others: all ranks of a job wait for the slowest GPU."""
    gpus = window[-1].gpus
    measured = [gpu for gpu in gpus if gpu.power_watts is not None]
    if not measured:
        count = words.count(len(gpus), "GPU")
        return ok("NoPowerReadings", f"{count} without power readings: this model does not measure its power")
    lowest = min(measured, key=lambda gpu: gpu.power_watts or 0.0)
    total = sum(gpu.power_watts or 0.0 for gpu in measured)
    limits = [gpu.power_limit_watts or 0.0 for gpu in measured]
    draw = f"{total:.0f} W of {sum(limits):.0f} W allowed" if all(limits) else f"{total:.0f} W"
    summary = f"{words.count(len(measured), 'GPU')} {'draws' if len(measured) == 1 else 'draw'} {draw}"
    healthy = ok("PowerRead", f"{summary}; the lowest is GPU {lowest.index} at {lowest.power_watts:.0f} W")
    return worst(_lowered_limits(gpus), healthy)


def _lowered_limits(gpus: Sequence[GpuSample]) -> Iterable[CheckVerdict]:
    """Find GPUs with a power limit below the most common limit of their model."""
    for model in dict.fromkeys(gpu.name for gpu in gpus):
        limits = [
            (gpu, gpu.power_limit_watts) for gpu in gpus if gpu.name == model and gpu.power_limit_watts is not None
        ]
        counts = Counter(limit for _, limit in limits).most_common(1)
        for gpu, limit in limits:
            usual = counts[0][0]
            if limit < usual * (1 - LIMIT_TOLERANCE_RATIO):
                yield warning(
                    "PowerLimitLowered",
                    f"GPU {gpu.index} has a power limit of {limit:.0f} W, other GPUs of this model {usual:.0f} W: "
                    "its job is slower",
                    f"nvidia-smi -i {gpu.index} -pl {usual:.0f}",
                )


def table(sample: Sample) -> Rows:
    """Return one row per GPU, in the units of nvidia-smi."""
    names = ("name", "power.draw", "enforced.power.limit", "utilization", "SM clock", "temperature", "memory", "energy")
    yield "GPU", *names
    for gpu in sample.gpus:
        numbers = (
            (gpu.power_watts, 1, "{:.2f} W"),
            (gpu.power_limit_watts, 1, "{:.2f} W"),
            (gpu.utilization_ratio, 100, "{:.0f} %"),
            (gpu.sm_clock_hertz, 1e-6, "{:.0f} MHz"),
            (gpu.temperature_celsius, 1, "{:.0f} C"),
            (gpu.memory_used_bytes, 1 / 2**20, "{:.0f} MiB"),
            (gpu.energy_joules, 1e-6, "{:.2f} MJ"),
        )
        cells = (None if number is None else form.format(number * factor) for number, factor, form in numbers)
        yield gpu.index, gpu.name, *cells


CHECK = Check(observe, METRICS, judge, table, parts=contract.gpu_parts, absent="this node has no NVIDIA GPU")
