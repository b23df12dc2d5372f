"""The GPUs of the node: what the driver reads, whether it answers, and the levels by which they are quiet."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from hangwatch.config import Detector
from hangwatch.detector import power_level
from hangwatch.detector.power_level import GpuPower
from hangwatch.metrics.series import counter, gauge, single
from hangwatch.model import JobState
from hangwatch.state.board import Snapshot


def sampler(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    """Whether the GPU sampler answers, and how old its newest sample is."""
    health = snapshot.sampler
    yield single("gpu_sampler_up", "1 while the GPU sampler answers", float(health.alive and not health.stalled))
    yield counter("gpu_sampler_restarts", "GPU sampler processes that were replaced", health.restarts)
    yield counter("gpu_sampler_abandoned", "GPU sampler processes that could not even be killed", health.abandoned)
    if snapshot.sweep is not None:
        age = now - snapshot.sweep.taken_monotonic_seconds
        yield single("gpu_sample_age_seconds", "Age of the newest GPU sample", age)


def readings(snapshot: Snapshot, settings: Detector) -> Iterator[Metric]:
    """What the driver reads of each GPU, what it should have read and did not, and its levels."""
    if snapshot.sweep is None:
        return
    up = gauge("gpu_up", "1 while the driver gives readings of this GPU, 0 while it gives none", ("gpu",))
    for index in sorted({*(gpu.index for gpu in snapshot.sweep.gpus), *snapshot.sweep.unread}):
        up.add_metric([str(index)], float(index not in snapshot.sweep.unread))
    yield up
    labels = ("gpu", "uuid")
    for field, text in (
        ("power_watts", "Power drawn, as NVML averages it over one second"),
        ("power_limit_watts", "Enforced power limit"),
        ("utilization_ratio", "Share of the last sample period in which a kernel ran; 1 also in a hang"),
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
    faults = gauge("gpu_faults", "Readings that should have come and did not, by reason", ("gpu", "reason"))
    counted: dict[tuple[str, str], int] = {}
    for fault in (*snapshot.sweep.faults, *(f for gpu in snapshot.sweep.gpus for f in gpu.faults)):
        key = (fault.subject.removeprefix("gpu "), fault.reason)
        counted[key] = counted.get(key, 0) + 1
    for key, count in counted.items():
        faults.add_metric(key, count)
    yield faults
    yield from _levels(snapshot, settings)


def _levels(snapshot: Snapshot, settings: Detector) -> Iterator[Metric]:
    labels = ("gpu", "uuid")
    busy = gauge("gpu_busy_power_watts", "Busy level: what this GPU draws while its job works", labels)
    line = gauge("gpu_quiet_line_watts", "At or under this power the GPU is quiet", labels)
    index = {gpu.uuid: str(gpu.index) for gpu in (snapshot.sweep.gpus if snapshot.sweep else ())}
    for uuid, gpu in _hardest_working(snapshot).items():
        if uuid in index and gpu.busy_watts is not None:
            busy.add_metric([index[uuid], uuid], gpu.busy_watts)
            quiet_line = power_level.quiet_line_watts(gpu, settings)
            if quiet_line is not None:
                line.add_metric([index[uuid], uuid], quiet_line)
    yield busy
    yield line


def _hardest_working(snapshot: Snapshot) -> dict[str, GpuPower]:
    """The power of each GPU as the job sees it that drew most: two jobs may share one, no series may come twice."""
    found: dict[str, GpuPower] = {}
    for entry in snapshot.jobs.values():
        for uuid, gpu in entry.watch.power.gpus.items() if entry.watch.state is not JobState.ENDED else ():
            known = found.get(uuid)
            if known is None or (gpu.busy_watts or 0.0) > (known.busy_watts or 0.0):
                found[uuid] = gpu
    return found
