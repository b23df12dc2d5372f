"""Available memory of the node, and the time that tasks wait for memory (PSI, pressure stall information).

A node that runs out of memory gets slow before the kernel kills a process. Ranks and loader workers wait for pages, and
the whole job waits for its slowest rank.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, critical, ok, warning, worst
from hangwatch.config import describe
from hangwatch.model import CheckVerdict, Fault
from hangwatch.probes.node import memory_pressure
from hangwatch.probes.node.machine import Node

REMEDY = "`ps aux --sort=-rss | head`, `hangwatch check ranks --verbose`; use fewer loader workers or less prefetch"
WARNING_STALLED_RATIO = 0.10  # of 60 s, in which all tasks waited for memory
CRITICAL_STALLED_RATIO = 0.40


class Settings(contract.Settings, frozen=True):
    """Limits of available memory and memory stalls."""

    warning_available_ratio: Annotated[float, describe("warning if less than this is available", 0.0, 1.0)] = 0.05
    critical_available_ratio: Annotated[float, describe("critical if less than this is available", 0.0, 1.0)] = 0.02


class Sample(contract.Sample, frozen=True):
    """The memory of the node at one time."""

    memory: memory_pressure.Memory


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read /proc/meminfo and /proc/pressure/memory."""
    memory = memory_pressure.read(node.proc_root)
    return Sample(memory=memory) if isinstance(memory, memory_pressure.Memory) else memory


METRICS = (
    Metrics[Sample, memory_pressure.Memory](
        Metric(
            "memory_available_bytes",
            "memory that is available without swapping (MemAvailable)",
            lambda memory: memory.available_bytes,
        ),
        Metric("memory_total_bytes", "memory of the node (MemTotal)", lambda memory: memory.total_bytes),
        Metric(
            "memory_stalled_seconds_total",
            "time in which some or all tasks waited for memory (PSI)",
            lambda memory: {kind: stall.total_seconds for kind, stall in memory.stalls.items()},
            by=("kind",),
        ),
        Metric(
            "memory_pressure_ratio",
            "share of the last 60 s in which some or all tasks waited for memory",
            lambda memory: {kind: stall.ratio_60s for kind, stall in memory.stalls.items()},
            by=("kind",),
        ),
        subjects=lambda sample: [sample.memory],
    ),
)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Judge the available memory, then the part of the last minute in which all tasks waited for memory."""
    memory = window[-1].memory
    healthy = f"{_gib(memory.available_bytes)} of {_gib(memory.total_bytes)} available, {_stalls(memory)}"
    return worst(_findings(memory, settings), ok("MemoryLeft", healthy))


def _findings(memory: memory_pressure.Memory, settings: Settings) -> Iterator[CheckVerdict]:
    available_ratio = memory.available_bytes / memory.total_bytes if memory.total_bytes else 0.0
    message = f"{_gib(memory.available_bytes)} of {_gib(memory.total_bytes)} available ({available_ratio:.1%})"
    if available_ratio < settings.critical_available_ratio:
        yield critical("MemoryExhausted", message, REMEDY)
    elif available_ratio < settings.warning_available_ratio:
        yield warning("MemoryLow", message, REMEDY)
    stalled_ratio = memory.full.ratio_60s if memory.full else 0.0
    if stalled_ratio > WARNING_STALLED_RATIO:
        level = critical if stalled_ratio > CRITICAL_STALLED_RATIO else warning
        yield level("MemoryStalls", _stalls(memory), REMEDY)


def _stalls(memory: memory_pressure.Memory) -> str:
    if memory.full is None:
        return "this kernel does not measure stalls (no PSI)"
    return f"all tasks waited for memory for {memory.full.ratio_60s:.0%} of the last 60 s"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"


CHECK = Check(observe, METRICS, judge, settings=Settings, every_seconds=30, absent="this node has no /proc/meminfo")
