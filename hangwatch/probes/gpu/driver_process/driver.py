"""Sample all GPUs of this node through an open driver, and read XIDs from the events of NVML.

Units are converted: mW to W, MHz to Hz, percent to ratio, mJ to J.
"""

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pynvml
from msgspec.structs import replace

from hangwatch.model import Fault, GpuSample, GpuSweep
from hangwatch.probes.gpu.details import XidEvent
from hangwatch.probes.gpu.driver_process.nvml_device import Gpu, nvml_fault, scaled
from hangwatch.probes.gpu.messages import Begin

STATIC_EVERY_SECONDS = 30.0
"""Period of reading values that rarely change: count, names, uuids, limits. A driver in error is reopened then, too."""

SAMPLE = "sample"
"""The purpose of driver calls for a sample."""

FULL_EVERY_SECONDS = 10.0
"""Period of full samples: more than power, utilisation, clock. The call for the energy takes 4.5 ms on an H200."""

EVENTS_KEPT = 256
MAX_PER_DRAIN = 64


class Driver:
    """The GPUs of this node, read through an open NVML. Raises NVMLError if the driver as a whole fails.

    `begin` lists the GPUs that are not read, and the GPUs that are opened last. `announce` is called with the index and
    the purpose before the driver is called about a GPU, and afterwards with None.
    """

    def __init__(self, begin: Begin, announce: Callable[[int | None, str], object]) -> None:
        self.announce = announce
        self.left_out = dict(begin.blocked)
        self._last, self._only = begin.read_last, begin.only_gpu
        self.gpus: list[Gpu] = []
        self.lost: list[Fault] = []
        self.version: str | None = None
        self.static_at = self.full_at = float("-inf")
        self.healthy = True
        self.xids = XidListener()

    def sweep(self) -> GpuSweep:
        """Return a sample of each GPU, or its fault."""
        now = time.monotonic()
        if now - self.static_at >= STATIC_EVERY_SECONDS:
            self.open_gpus()
        is_full = now - self.full_at >= FULL_EVERY_SECONDS
        if is_full:
            self.full_at = now
        samples: list[GpuSample] = []
        faults = list(self.lost)
        for gpu in self.gpus:
            self.announce(gpu.index, SAMPLE)
            reading = read_gpu(gpu, is_full)
            if isinstance(reading, Fault):
                faults.append(reading)
            else:
                samples.append(reading)
        self.announce(None, "")
        self.healthy = bool(samples) or len(faults) == len(self.left_out)
        self.xids.drain()
        return GpuSweep(
            taken_monotonic_seconds=now,
            taken_unix_seconds=time.time(),
            gpus=tuple(samples),
            faults=tuple(faults),
            driver_version=self.version,
        )

    def open_gpus(self) -> None:
        """Find the GPUs, and read the values that rarely change. Reopen the driver if the last sweep read no GPU."""
        self.static_at = time.monotonic()
        if not self.healthy:
            self.xids.forget()
            pynvml.nvmlShutdown()
            pynvml.nvmlInit()
        self.version = driver_version()
        before = {gpu.uuid: gpu for gpu in self.gpus}
        self.gpus, self.lost = [], []
        for index in sorted(range(pynvml.nvmlDeviceGetCount()), key=lambda index: (index in self._last, index)):
            if index in self.left_out:
                self.lost.append(self.left_out[index])
            if index in self.left_out or self._only not in (None, index):
                continue
            self.announce(index, "open")
            try:
                gpu = Gpu(index)
            except pynvml.NVMLError as error:
                self.lost.append(nvml_fault(error, "nvmlDeviceGetHandleByIndex", index))
                continue
            if (last := before.get(gpu.uuid)) and last.full:
                gpu.full = GpuSample.copy_from(gpu, last.full, faults=last.full.faults)
            self.gpus.append(gpu)
        self.gpus.sort(key=lambda gpu: gpu.index)
        self.xids.listen(self.gpus, self.announce)
        self.announce(None, "")

    def admit(self, index: int) -> None:
        """Read a GPU again from the next sweep on."""
        if self.left_out.pop(index, None) is not None:
            self.static_at = float("-inf")


def driver_version() -> str | None:
    """Return the driver's version; None if unknown."""
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def read_gpu(gpu: Gpu, is_full: bool) -> GpuSample | Fault:
    """Return a sample of a GPU, or a fault if nothing could be read."""
    gpu.faults = []
    try:
        if is_full or gpu.full is None:
            gpu.full = _read_full(gpu)
            gpu.faults = []
        utilization = gpu.ask(pynvml.nvmlDeviceGetUtilizationRates)
        sample = replace(
            gpu.full,
            power_watts=scaled(gpu.ask(pynvml.nvmlDeviceGetPowerUsage), 1e-3),
            utilization_ratio=None if utilization is None else utilization.gpu / 100,
            sm_clock_hertz=scaled(gpu.ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM), 1e6),
            faults=(*gpu.static_faults, *gpu.full.faults, *gpu.faults),
        )
    except pynvml.NVMLError as error:
        return nvml_fault(error, "sample", gpu.index)
    readings = (sample.power_watts, sample.utilization_ratio, sample.sm_clock_hertz)
    if gpu.faults and all(reading is None for reading in readings):
        return gpu.faults[0]
    return sample


def _read_full(gpu: Gpu) -> GpuSample:
    """Return the values of a GPU that are not read with each sample, and the faults of reading them."""
    memory = gpu.ask(pynvml.nvmlDeviceGetMemoryInfo)
    processes = gpu.ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v3)
    last_pids = gpu.full.pids if gpu.full is not None else ()
    return GpuSample.copy_from(
        gpu,
        memory_used_bytes=None if memory is None else memory.used,
        memory_total_bytes=None if memory is None else memory.total,
        temperature_celsius=scaled(gpu.ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU), 1.0),
        energy_joules=scaled(gpu.ask(pynvml.nvmlDeviceGetTotalEnergyConsumption), 1e-3),
        pids=last_pids if processes is None else tuple(sorted({process.pid for process in processes})),
        faults=tuple(gpu.faults),
    )


class XidListener:
    """A listener for the XIDs of all GPUs. It ignores driver errors: the kernel log is the first source.

    Call `listen` after the GPUs were reopened, and `drain` with each sample. `drain` does not wait for events.
    """

    def __init__(self) -> None:
        self.events: deque[XidEvent] = deque(maxlen=EVENTS_KEPT)
        self._set: Any = None
        self._gpus: dict[int | None, Gpu] = {}

    def listen(self, gpus: Sequence[Gpu], announce: Callable[[int | None, str], object]) -> None:
        """Register once for the XIDs of these GPUs. `announce` is called before the driver call about each GPU."""
        handles = {_address(gpu.handle): gpu for gpu in gpus}
        if self._set is not None and handles.keys() == self._gpus.keys():
            return
        self.forget()
        self._gpus = dict(handles)
        try:
            self._set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return
        for gpu in gpus:
            announce(gpu.index, "register for XIDs")
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlDeviceRegisterEvents(gpu.handle, pynvml.nvmlEventTypeXidCriticalError, self._set)

    def forget(self) -> None:
        """Free the driver's event set. Call this before the driver is closed."""
        if self._set is not None:
            listening, self._set = self._set, None
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(listening)

    def drain(self) -> None:
        """Add the XIDs since the last call to `events`."""
        for _ in range(MAX_PER_DRAIN if self._set is not None else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError:  # no more events (Timeout), or a lost GPU, which its own readings report
                return
            gpu = self._gpus.get(_address(event.device))
            self.events.append(
                XidEvent(
                    code=event.eventData,
                    seen_monotonic_seconds=time.monotonic(),
                    index=None if gpu is None else gpu.index,
                    pci_address=None if gpu is None else gpu.pci_address,
                )
            )


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
