"""What a source of GPU readings is, and the messages between the sampler and the process that owns the driver."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from hangwatch.model import Fault, GpuSweep, SamplerStatus, Value

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
        """Details that are too slow to sample: `kind` is their struct in `hangwatch.details`."""


class Hello(Value, frozen=True, tag="hello"):
    """The driver is open."""


class Swept(Value, frozen=True, tag="swept"):
    """One sweep over all GPUs."""

    sweep: GpuSweep


class Failed(Value, frozen=True, tag="failed"):
    """The driver cannot be used; the process ends after this message."""

    fault: Fault


class Answer(Value, frozen=True, tag="answer"):
    """Reply to the `Question` with the same number: encoded details, or the fault in their place."""

    number: int
    details: msgspec.Raw = msgspec.Raw(b"null")
    fault: Fault | None = None


class Question(Value, frozen=True):
    """A request for details of one kind, the name of a struct in `hangwatch.details`."""

    number: int
    kind: str


Message = Hello | Swept | Failed | Answer
