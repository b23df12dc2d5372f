"""Read GPM counters: the use of a GPU of Hopper or later between two readings.

See "GPM Functions" in the NVML API reference. A reading copies counters that always run. Each GPU has two sample
buffers, which are allocated once and used alternately.
"""

import math
import time
from typing import Any, NamedTuple

import pynvml

from hangwatch.model import GpuUse
from hangwatch.probes.gpu.driver_process.nvml_device import Gpu

LONGEST_SECONDS = 60.0
"""Longest time between two readings. An older reading belongs to an earlier capture."""
_METRICS = (
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
)


class Reading(NamedTuple):
    """A sample of NVML and its time. `spare` is the buffer of the previous sample, for the next one."""

    sample: Any
    taken_monotonic_seconds: float
    spare: Any


def use(gpu: Gpu) -> GpuUse | None:
    """Return the use of a GPU since the previous call.

    None at the first call, if the previous call was more than a minute ago, and without GPM.
    """
    support = gpu.ask(pynvml.nvmlGpmQueryDeviceSupport)
    if support is None or not support.isSupportedDevice:
        return None
    before, now = gpu.gpm, time.monotonic()
    sample = _sample(gpu, before)
    if sample is None:
        return None
    gpu.gpm = Reading(sample, now, before.sample if before is not None else None)
    if before is None or now - before.taken_monotonic_seconds > LONGEST_SECONDS:
        return None
    return _between(gpu, before.sample, sample)


def _sample(gpu: Gpu, before: Reading | None) -> Any:
    memory = before.spare if before is not None else None
    if memory is None:
        memory = gpu.ask(lambda _: pynvml.nvmlGpmSampleAlloc())
    return memory if memory is not None and gpu.ask(pynvml.nvmlGpmSampleGet, memory) is not None else None


def _between(gpu: Gpu, first: Any, last: Any) -> GpuUse | None:
    question = pynvml.c_nvmlGpmMetricsGet_t()
    question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    question.numMetrics = len(_METRICS)
    question.sample1, question.sample2 = first, last
    for position, metric in enumerate(_METRICS):
        question.metrics[position].metricId = metric
    if gpu.ask(lambda _: pynvml.nvmlGpmMetricsGet(question)) is None:
        return None
    answers = [question.metrics[position] for position in range(len(_METRICS))]
    ratios = [answer.value / 100 for answer in answers if answer.nvmlReturn == pynvml.NVML_SUCCESS]
    if len(ratios) < len(_METRICS) or not all(math.isfinite(ratio) and 0 <= ratio <= 1 for ratio in ratios):
        return None
    return GpuUse(*ratios)
