"""Metrics of the GPUs: the sampler, the driver's readings, and the levels at which a GPU is busy or quiet."""

from collections import Counter

from hangwatch.config import Detector
from hangwatch.detector import power_level
from hangwatch.detector.power_level import GpuPower
from hangwatch.metrics.series import Series
from hangwatch.model import GpuSweep, JobState
from hangwatch.model.keyed_lists import list_by_key
from hangwatch.state.board import Snapshot

_READINGS = (
    "power_watts",
    "power_limit_watts",
    "utilization_ratio",
    "memory_used_bytes",
    "memory_total_bytes",
    "sm_clock_hertz",
    "temperature_celsius",
    "energy_joules",
)


def add_gpus(series: Series, snapshot: Snapshot, now: float, settings: Detector) -> None:
    """Add the state of the sampler, the driver's readings of each GPU, the readings that failed, and the levels."""
    health, sweep = snapshot.sampler, snapshot.sweep
    series.add("gpu_sampler_up", (), float(health.alive and not health.stalled))
    series.add("gpu_sampler_restarts", (), health.restarts)
    series.add("gpu_sampler_abandoned", (), health.abandoned)
    if sweep is None:
        return
    series.add("gpu_sample_age_seconds", (), now - sweep.taken_monotonic_seconds)
    for index in sorted({*(gpu.index for gpu in sweep.gpus), *sweep.unread}):
        series.add("gpu_up", (str(index),), float(index not in sweep.unread))
    for gpu in sweep.gpus:
        for field in _READINGS:
            if (value := getattr(gpu, field)) is not None:
                series.add(f"gpu_{field}", (str(gpu.index), gpu.uuid), value)
    all_faults = (*sweep.faults, *(fault for gpu in sweep.gpus for fault in gpu.faults))
    counts = Counter((fault.subject.removeprefix("gpu "), fault.reason) for fault in all_faults)
    for key, count in counts.items():
        series.add("gpu_faults", key, count)
    _add_levels(series, snapshot, sweep, settings)


def _add_levels(series: Series, snapshot: Snapshot, sweep: GpuSweep, settings: Detector) -> None:
    index = {gpu.uuid: str(gpu.index) for gpu in sweep.gpus}
    for uuid, gpu in _hardest_working(snapshot).items():
        if uuid in index and gpu.busy_watts is not None:
            series.add("gpu_busy_power_watts", (index[uuid], uuid), gpu.busy_watts)
            threshold_watts = power_level.low_power_threshold_watts(gpu, settings)
            if threshold_watts is not None:
                series.add("gpu_low_power_threshold_watts", (index[uuid], uuid), threshold_watts)


def _hardest_working(snapshot: Snapshot) -> dict[str, GpuPower]:
    """Return the power history of each GPU by uuid; of two jobs on one GPU, that with the higher busy level."""
    watches = (entry.watch for entry in snapshot.jobs.values() if entry.watch.state is not JobState.ENDED)
    by_uuid = list_by_key(pair for watch in watches for pair in watch.power.gpus.items())
    return {uuid: max(powers, key=lambda gpu: gpu.busy_watts or 0.0) for uuid, powers in by_uuid.items()}
