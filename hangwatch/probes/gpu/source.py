"""What a source of GPU readings is."""

from __future__ import annotations

from typing import Protocol, TypeVar

from hangwatch.model import Fault, GpuSweep, SamplerStatus, Value

NO_DRIVER = ("DriverNotFound", "DriverNotLoaded")
"""Reasons of faults that say: there is no driver on this node, or it is not loaded."""

DetailsT = TypeVar("DetailsT", bound=Value)


class GpuSource(Protocol):
    """Where GPU readings come from: the NVIDIA driver, or the demo's simulated GPUs."""

    def start(self) -> None:
        """Begin to sample; returns at once."""

    def stop(self) -> None:
        """Stop sampling and free what was taken."""

    def latest(self) -> GpuSweep | None:
        """The last sweep, however old (see its time), None before the first one."""

    def status(self) -> SamplerStatus:
        """How the sampling itself fares."""

    def query(self, kind: type[DetailsT], deadline_seconds: float) -> DetailsT | Fault:
        """Details that are too slow to sample: `kind` is their struct in `hangwatch.probes.gpu.details`."""
