"""The messages between the sampler and the process that owns the driver: one line of JSON each, both ways."""

from __future__ import annotations

import msgspec
from msgspec import field

from hangwatch.model import Fault, GpuSweep, Value


class Begin(Value, frozen=True):
    """The only argument of the process. GPUs of `blocked` are not read; their fault is reported instead.

    GPUs of `read_last` are opened after all others. With `only_gpu`, no other GPU is opened: this tests a GPU
    that did not respond.
    """

    sample_seconds: float
    parent_pid: int
    blocked: dict[int, Fault] = field(default_factory=dict)
    read_last: tuple[int, ...] = ()
    only_gpu: int | None = None


class Hello(Value, frozen=True, tag="hello"):
    """The driver is open."""


class Asking(Value, frozen=True, tag="asking"):
    """The next driver calls are about this GPU (None: about no single GPU), for this purpose.

    If the process falls silent, the last such message names the call that does not return.
    """

    gpu: int | None
    purpose: str = ""


class Swept(Value, frozen=True, tag="swept"):
    """A sweep over all GPUs."""

    sweep: GpuSweep


class Failed(Value, frozen=True, tag="failed"):
    """The driver cannot be used; the process ends after this message."""

    fault: Fault


class Answer(Value, frozen=True, tag="answer"):
    """The reply to the `Question` with the same number: encoded details, or a fault instead."""

    number: int
    details: msgspec.Raw = msgspec.Raw(b"null")
    fault: Fault | None = None


class Question(Value, frozen=True, tag="question"):
    """A request for details; `kind` is the name of their struct."""

    number: int
    kind: str


class Admit(Value, frozen=True, tag="admit"):
    """A GPU that was not read answers again: read it normally."""

    gpu: int


Message = Hello | Asking | Swept | Failed | Answer
Order = Question | Admit
