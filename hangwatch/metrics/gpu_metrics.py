"""Metrics of the GPUs: the sampler, the driver's readings, and the levels at which a GPU is busy or quiet."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from hangwatch.config import Detector
from hangwatch.detector import power_level
from hangwatch.detector.power_level import GpuPower
from hangwatch.metrics.series import counter, gauge, single_gauge
from hangwatch.model import JobState
from hangwatch.model.keyed_lists import list_by_key
from hangwatch.state.board import Snapshot


def sampler(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    """Yield the state of the GPU sampler and the age of its newest sample."""
    health = snapshot.sampler
    yield single_gauge("gpu_sampler_up", "1 while the GPU sampler responds", float(health.alive and not health.stalled))
    yield counter("gpu_sampler_restarts", "GPU sampler processes that were replaced", health.restarts)
    yield counter("gpu_sampler_abandoned", "GPU sampler processes that could not be killed", health.abandoned)
    if snapshot.sweep is not None:
        age = now - snapshot.sweep.taken_monotonic_seconds
        yield single_gauge("gpu_sample_age_seconds", "Age of the newest GPU sample", age)


def readings(snapshot: Snapshot, settings: Detector) -> Iterator[Metric]:
    """Yield the driver's readings of each GPU, the readings that failed, and the power levels."""
    if snapshot.sweep is None:
        return
    up = gauge("gpu_up", "1 while the driver returns readings of this GPU", ("gpu",))
    for index in sorted({*(gpu.index for gpu in snapshot.sweep.gpus), *snapshot.sweep.unread}):
        up.add_metric([str(index)], float(index not in snapshot.sweep.unread))
    yield up
    labels = ("gpu", "uuid")
    for field, text in (
        ("power_watts", "Power draw, averaged by NVML over one second"),
        ("power_limit_watts", "Enforced power limit"),
        ("utilization_ratio", "Ratio of the last sample period in which a kernel ran; also 1 in a hang"),
        ("memory_used_bytes", "GPU memory in use"),
        ("memory_total_bytes", "GPU memory"),
        ("sm_clock_hertz", "Clock of the streaming multiprocessors"),
        ("temperature_celsius", "Temperature of the GPU die"),
    ):
        family = gauge(f"gpu_{field}", text, labels)
        for gpu in snapshot.sweep.gpus:
            value = getattr(gpu, field)
            if value is not None:
                family.add_metric([str(gpu.index), gpu.uuid], float(value))
        yield family
    energy = CounterMetricFamily(
        "hangwatch_gpu_energy_joules", "Energy used since the driver was loaded", labels=labels
    )
    for gpu in snapshot.sweep.gpus:
        if gpu.energy_joules is not None:
            energy.add_metric([str(gpu.index), gpu.uuid], gpu.energy_joules)
    yield energy
    faults = gauge("gpu_faults", "Readings that failed in the newest sample, by reason", ("gpu", "reason"))
    all_faults = (*snapshot.sweep.faults, *(fault for gpu in snapshot.sweep.gpus for fault in gpu.faults))
    counts = Counter((fault.subject.removeprefix("gpu "), fault.reason) for fault in all_faults)
    for key, count in counts.items():
        faults.add_metric(key, count)
    yield faults
    yield from _levels(snapshot, settings)


def _levels(snapshot: Snapshot, settings: Detector) -> Iterator[Metric]:
    labels = ("gpu", "uuid")
    busy = gauge("gpu_busy_power_watts", "Busy level: power of this GPU while its job works", labels)
    line = gauge("gpu_low_power_threshold_watts", "Power at or below which the GPU is quiet", labels)
    index = {gpu.uuid: str(gpu.index) for gpu in (snapshot.sweep.gpus if snapshot.sweep else ())}
    for uuid, gpu in _hardest_working(snapshot).items():
        if uuid in index and gpu.busy_watts is not None:
            busy.add_metric([index[uuid], uuid], gpu.busy_watts)
            threshold_watts = power_level.low_power_threshold_watts(gpu, settings)
            if threshold_watts is not None:
                line.add_metric([index[uuid], uuid], threshold_watts)
    yield busy
    yield line


def _hardest_working(snapshot: Snapshot) -> dict[str, GpuPower]:
    """Return the power history of each GPU by uuid; of two jobs on one GPU, that with the higher busy level."""
    watches = (entry.watch for entry in snapshot.jobs.values() if entry.watch.state is not JobState.ENDED)
    by_uuid = list_by_key(pair for watch in watches for pair in watch.power.gpus.items())
    return {uuid: max(powers, key=lambda gpu: gpu.busy_watts or 0.0) for uuid, powers in by_uuid.items()}
