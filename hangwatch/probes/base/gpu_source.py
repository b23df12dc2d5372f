"""The interface of a source of GPU readings."""

from typing import Protocol, TypeVar, get_args

from hangwatch.model import Fault, GpuSweep, SamplerStatus, Value

NO_DRIVER = ("DriverNotFound", "DriverNotLoaded")
"""Reasons of faults for a node that has no driver, or has not loaded it."""

INSTALL_DRIVER = "install the NVIDIA driver; in a container, also set NVIDIA_DRIVER_CAPABILITIES=utility"

NO_DETAILS = "NotSimulated"
"""Reason of faults for a source that has readings of its GPUs and no further details."""

DetailsT = TypeVar("DetailsT", bound=Value)


def kind_name(kind: type[Value]) -> str:
    """Return the name of a kind of details: that of its class, or of the class of the values in `Details[...]`."""
    return next(iter(get_args(kind)), kind).__name__


class GpuSource(Protocol):
    """A source of GPU readings: the NVIDIA driver, or the demo's simulated GPUs."""

    def start(self) -> None:
        """Start sampling. Return at once."""

    def stop(self) -> None:
        """Stop sampling and release all resources."""

    def latest(self) -> GpuSweep | None:
        """Return the last sweep, however old; None before the first one."""

    def status(self) -> SamplerStatus:
        """Return the state of the sampling itself."""

    def query(self, kind: type[DetailsT], deadline_seconds: float) -> DetailsT | Fault:
        """Return details that are too slow to be sampled; a fault if they do not arrive by the deadline.

        `kind` is their class in `hangwatch.probes.gpu.details`.
        """
