"""Metrics of the GPUs: the sampler, the driver's readings, and the levels at which a GPU is busy or quiet."""

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from hangwatch.checks.framework.contract import GPU, Metric, Metrics
from hangwatch.detector import power_level
from hangwatch.detector.power_level import GpuPower
from hangwatch.metrics.view import View
from hangwatch.model import GpuSample, GpuSweep, JobState, list_by_key


class _Level(NamedTuple):
    """The power history of a GPU, and the power at or below which it is quiet; None if that is unknown."""

    gpu: GpuSample
    power: GpuPower
    threshold_watts: float | None


def _find_levels(view: View) -> Iterator[_Level]:
    """Yield the power history of each GPU that has worked; of two jobs on one GPU, that with the higher busy level."""
    watches = (entry.watch for entry in view.snapshot.jobs.values() if entry.watch.state is not JobState.ENDED)
    by_uuid = list_by_key(pair for watch in watches for pair in watch.power.gpus.items())
    for gpu in view.snapshot.sweep.gpus if view.snapshot.sweep else ():
        power = max(by_uuid.get(gpu.uuid, ()), key=lambda power: power.busy_watts or 0.0, default=None)
        if power is not None and power.busy_watts is not None:
            yield _Level(gpu, power, power_level.low_power_threshold_watts(power, view.settings))


def _find_age(view: View) -> float | None:
    sweep = view.snapshot.sweep
    return None if sweep is None else view.now - sweep.taken_monotonic_seconds


def _find_read(sweep: GpuSweep) -> dict[str, bool]:
    unread = sweep.unread
    return {str(index): index not in unread for index in sorted({*(gpu.index for gpu in sweep.gpus), *unread})}


def _count_faults(sweep: GpuSweep) -> Counter[tuple[str, str]]:
    faults = (*sweep.faults, *(fault for gpu in sweep.gpus for fault in gpu.faults))
    return Counter((fault.subject.removeprefix("gpu "), fault.reason) for fault in faults)


METRICS = (
    Metrics[View, View](
        Metric(
            "gpu_sampler_up",
            "1 while the GPU sampler responds",
            lambda view: view.snapshot.sampler.alive and not view.snapshot.sampler.stalled,
        ),
        Metric(
            "gpu_sampler_restarts_total",
            "GPU sampler processes that were replaced",
            lambda view: view.snapshot.sampler.restarts,
        ),
        Metric(
            "gpu_sampler_abandoned_total",
            "GPU sampler processes that could not be killed",
            lambda view: view.snapshot.sampler.abandoned,
        ),
        Metric("gpu_sample_age_seconds", "Age of the newest GPU sample", _find_age),
    ),
    Metrics[View, GpuSweep](
        Metric("gpu_up", "1 while the driver returns readings of this GPU", _find_read, by=("gpu",)),
        Metric(
            "gpu_faults", "Readings that failed in the newest sample, by reason", _count_faults, by=("gpu", "reason")
        ),
        subjects=lambda view: [view.snapshot.sweep],
    ),
    Metrics[View, GpuSample](
        Metric("gpu_power_watts", "Power draw, averaged by NVML over one second", lambda gpu: gpu.power_watts),
        Metric("gpu_power_limit_watts", "Enforced power limit", lambda gpu: gpu.power_limit_watts),
        Metric(
            "gpu_utilization_ratio",
            "Ratio of the last sample period in which a kernel ran; also 1 in a hang",
            lambda gpu: gpu.utilization_ratio,
        ),
        Metric("gpu_memory_used_bytes", "GPU memory in use", lambda gpu: gpu.memory_used_bytes),
        Metric("gpu_memory_total_bytes", "GPU memory", lambda gpu: gpu.memory_total_bytes),
        Metric("gpu_sm_clock_hertz", "Clock of the streaming multiprocessors", lambda gpu: gpu.sm_clock_hertz),
        Metric("gpu_temperature_celsius", "Temperature of the GPU die", lambda gpu: gpu.temperature_celsius),
        Metric("gpu_energy_joules_total", "Energy used since the driver was loaded", lambda gpu: gpu.energy_joules),
        subjects=lambda view: view.snapshot.sweep.gpus if view.snapshot.sweep else (),
        labels=GPU,
    ),
    Metrics[View, _Level](
        Metric(
            "gpu_busy_power_watts",
            "Busy level: power of this GPU while its job works",
            lambda level: level.power.busy_watts,
        ),
        Metric(
            "gpu_low_power_threshold_watts",
            "Power at or below which the GPU is quiet",
            lambda level: level.threshold_watts,
        ),
        subjects=_find_levels,
        labels={"gpu": lambda level: str(level.gpu.index), "uuid": attrgetter("gpu.uuid")},
    ),
)
