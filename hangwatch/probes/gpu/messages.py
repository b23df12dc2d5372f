"""The messages between the sampler and the process that owns the driver. Each is a line of JSON."""

import msgspec
from msgspec import field

from hangwatch.model import Fault, GpuSweep, Value


class Begin(Value, frozen=True):
    """The only argument of the process.

    GPUs in `blocked` are not read; their fault is reported instead. GPUs in `read_last` are opened after all others.
    With `only_gpu`, no other GPU is opened: this retries a GPU that did not respond.
    """

    sample_seconds: float
    parent_pid: int
    blocked: dict[int, Fault] = field(default_factory=dict)
    read_last: tuple[int, ...] = ()
    only_gpu: int | None = None


class Hello(Value, frozen=True, tag="hello"):
    """The message that the driver process sends when the driver is open."""


class CallAnnouncement(Value, frozen=True, tag="asking"):
    """Announcement of driver calls for `purpose`. `gpu` is the index of their GPU, None if they are not about one GPU.

    If the process stops responding, its last announcement names the call that does not return.
    """

    gpu: int | None
    purpose: str = ""


class SweepMessage(Value, frozen=True, tag="swept"):
    """A sweep over all GPUs."""

    sweep: GpuSweep


class DriverFailure(Value, frozen=True, tag="failed"):
    """The message that the driver cannot be used. The driver process ends after sending it."""

    fault: Fault


class Answer(Value, frozen=True, tag="answer"):
    """The reply to the `Question` with the same number: encoded details, or a fault."""

    number: int
    details: msgspec.Raw = msgspec.Raw(b"null")
    fault: Fault | None = None


class Question(Value, frozen=True, tag="question"):
    """A request for details. `kind` is the name of their class."""

    number: int
    kind: str


class AdmitOrder(Value, frozen=True, tag="admit"):
    """The order to read a GPU normally again, after a successful retry."""

    gpu: int


Message = Hello | CallAnnouncement | SweepMessage | DriverFailure | Answer
Order = Question | AdmitOrder
