"""What the sampler and the process that owns the driver say to each other: one JSON message a line, both ways."""

from __future__ import annotations

import msgspec
from msgspec import field

from hangwatch.model import Fault, GpuSweep, Value


class Begin(Value, frozen=True):
    """What the process is started with, as its one argument. GPUs of `left_out` are not asked, and told as that fault.

    Those of `last` are opened after all others. With `only`, no other GPU is opened: to find out whether one that did
    not answer does again.
    """

    sample_seconds: float
    parent_pid: int
    left_out: dict[int, Fault] = field(default_factory=dict)
    last: tuple[int, ...] = ()
    only: int | None = None


class Hello(Value, frozen=True, tag="hello"):
    """The driver is open."""


class Asking(Value, frozen=True, tag="asking"):
    """From now on the driver is asked about this GPU (None: about none of them), for this purpose.

    What was said last before the process fell silent names the call that does not return.
    """

    gpu: int | None
    purpose: str = ""


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


class Question(Value, frozen=True, tag="question"):
    """A request for details of one kind, the name of their struct."""

    number: int
    kind: str


class Admit(Value, frozen=True, tag="admit"):
    """A GPU that was left out answers again: ask it as all others."""

    gpu: int


Message = Hello | Asking | Swept | Failed | Answer
Order = Question | Admit
