"""Find a GPU that stopped working while all other GPUs of its job work on: that of an independent worker. Pure.

The ranks of a training job wait for each other, so all of them stop. Workers that generate data do not wait. One of
them may get stuck, and no other one shows it. That is a warning, never a page: its worker may also be done.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from hangwatch import words
from hangwatch.config import Detector
from hangwatch.detector import power_level
from hangwatch.detector.power_level import GpuPower

WORKED_SECONDS = 1800.0  # before, as long as the others
PAUSE_SECONDS = 3600.0  # between two warnings of one job


def follow_work(gpus: Mapping[str, GpuPower], now: float, settings: Detector) -> dict[str, GpuPower]:
    """Return the GPUs with the times since which they work, or draw little power. A break of the hold ends work."""
    return {uuid: _follow_gpu(gpu, now, settings) for uuid, gpu in gpus.items()}


def _follow_gpu(gpu: GpuPower, now: float, settings: Detector) -> GpuPower:
    if not gpu.recent:
        return forget_low_power(gpu)
    if power_level.is_low(gpu, settings):
        return gpu if gpu.low_since_seconds is not None else replace(gpu, low_since_seconds=now)
    if gpu.low_since_seconds is None and gpu.works_since_seconds is not None:
        return gpu
    is_break = gpu.low_since_seconds is None or now - gpu.low_since_seconds >= settings.hold_seconds
    began = now if gpu.works_since_seconds is None or is_break else gpu.works_since_seconds
    return replace(gpu, low_since_seconds=None, works_since_seconds=began)


def forget_low_power(gpu: GpuPower) -> GpuPower:
    """Return the GPU without the time since which it draws little power, because the whole job does not work."""
    return gpu if gpu.low_since_seconds is None else replace(gpu, low_since_seconds=None)


def describe_idle_worker(gpus: Mapping[str, GpuPower], now: float, settings: Detector) -> str | None:
    """Return a warning about the only GPU that stopped working for the stalled hold; None if there is no such GPU.

    Like all others, it must have worked for 30 minutes before. All others must work now.
    """
    low = {uuid: gpu for uuid, gpu in gpus.items() if gpu.low_since_seconds is not None}
    if len(low) != 1 or len(gpus) < 2:
        return None
    ((uuid, idle),) = low.items()
    since = idle.low_since_seconds
    assert since is not None
    worked = all(
        gpu.works_since_seconds is not None and since - gpu.works_since_seconds >= WORKED_SECONDS
        for gpu in gpus.values()
    )
    if not worked or now - since < settings.stalled_hold_seconds:
        return None
    others = words.count(len(gpus) - 1, "other GPU")
    return (
        f"{uuid} has drawn little power for {words.duration(now - since)}, and the {others} of the job work: its rank "
        "may be stuck"
    )
