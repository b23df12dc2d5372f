"""What the sampler and the process that owns the driver say to each other: one JSON message a line, both ways."""

from __future__ import annotations

import msgspec

from hangwatch.model import Fault, GpuSweep, Value


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
    """A request for details of one kind, the name of a struct in `hangwatch.probes.nvml.details`."""

    number: int
    kind: str


Message = Hello | Swept | Failed | Answer
