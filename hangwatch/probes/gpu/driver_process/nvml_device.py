"""A GPU, read with pynvml, and the conversion of NVML's errors to faults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pynvml

from hangwatch.model import Fault, GpuSample
from hangwatch.probes.base.gpu_source import INSTALL_DRIVER

T = TypeVar("T")

REMEDIES = {
    "DriverNotFound": INSTALL_DRIVER,
    "DriverNotLoaded": "run `modprobe nvidia`, then `dmesg | grep -i nvrm`",
    "LibRmVersionMismatch": "the driver was upgraded while programs used it: reboot, or reload its kernel modules",
    "GpuIsLost": "drain the node, look for XID 79 in `dmesg`, then power-cycle the node: a GPU reset rarely helps",
    "ResetRequired": "drain the node, stop hangwatch and all GPU programs, run `nvidia-smi --gpu-reset -i {index}`",
    "NoPermission": "run as root, or allow this user to open /dev/nvidia*",
    "Unknown": "dmesg | grep -i -e nvrm -e xid",
}

ABSENT = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_DEPRECATED)
"""Errors for a feature that this GPU or driver does not have."""

GONE = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND)
"""Errors after which further calls about the same GPU are useless."""


def reason_of(error: pynvml.NVMLError) -> str:
    """Return NVML's error as a CamelCase word: 15 is GpuIsLost. A code that pynvml does not define is Error<code>."""
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "DriverNotFound"
    name = type(error).__name__
    return name.removeprefix("NVMLError_") if name != "NVMLError" else f"Error{error.value}"


def nvml_fault(error: pynvml.NVMLError, call: str, index: int | None = None) -> Fault:
    """Return a fault about a GPU, or about the whole driver. `call` is the NVML call that failed."""
    reason = reason_of(error)
    return Fault(
        subject="driver" if index is None else f"gpu {index}",
        reason=reason,
        detail=f"{call}: {error} (NVML error {error.value})",
        remedy=REMEDIES.get(reason, "").format(index="INDEX" if index is None else index),
    )


class Gpu:
    """A GPU: its handle, its values that rarely change, and the faults of reading it.

    Every method raises NVMLError if the GPU as a whole is gone.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.faults: list[Fault] = []
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.uuid: str = pynvml.nvmlDeviceGetUUID(self.handle)
        pci = self.ask(pynvml.nvmlDeviceGetPciInfo)
        self.pci_address = pci_address(pci) if pci else None
        self.name: str | None = self.ask(pynvml.nvmlDeviceGetName)
        self.power_limit_watts = scaled(self.ask(pynvml.nvmlDeviceGetEnforcedPowerLimit), 1e-3)
        self.mig_uuids = tuple(self._read_mig_uuids())
        self.static_faults = tuple(self.faults)
        self.full: GpuSample | None = None
        self.gpm: Any = None
        """The last reading of module `gpm`."""

    def ask(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of an NVML call; None if it fails. Errors except "not supported" are added to `faults`."""
        try:
            return call(self.handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value in GONE:
                raise
            if error.value not in ABSENT:
                self.faults.append(nvml_fault(error, call.__name__, self.index))
            return None

    def is_split(self) -> bool:
        """True if MIG splits the GPU."""
        mode = self.ask(pynvml.nvmlDeviceGetMigMode)
        return mode is not None and bool(mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE)

    def _read_mig_uuids(self) -> Iterator[str]:
        if not self.is_split():
            return
        for number in range(self.ask(pynvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
            with contextlib.suppress(pynvml.NVMLError):  # fewer instances than possible
                yield pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self.handle, number))

    def ask_pair(self, call: Callable[..., T], other: Gpu, *arguments: Any) -> T | None:
        """Return the result of an NVML call about this GPU and another GPU; None if it fails.

        It also fails if one of the two GPUs is gone, which the readings of that GPU report.
        """
        try:
            return self.ask(call, other.handle, *arguments)
        except pynvml.NVMLError:
            return None


def pci_address(pci: Any) -> str:
    """Return NVML's PCI address as /sys/bus/pci writes it: "0000:1b:00.0"."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def scaled(number: float | None, factor: float) -> float | None:
    """Convert a reading to another unit; None stays None."""
    return None if number is None else number * factor
