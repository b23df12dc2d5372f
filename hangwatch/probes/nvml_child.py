"""The process that owns the NVIDIA driver: the only importer of pynvml.

Run as `python -m hangwatch.probes.nvml_child SAMPLE_SECONDS PARENT_PID`. It writes one JSON message a line to stdout
(`hangwatch.probes.gpus`), reads questions from stdin, and ends when stdin is closed or its parent dies. It is a process
of its own since a driver call can block for ever, or crash. Units are converted here: mW to W, MHz to Hz, percent to
ratio, mJ to J.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

import msgspec
import pynvml

from hangwatch.model import Fault, GpuSample, GpuSweep
from hangwatch.probes.gpus import Answer, Failed, Hello, Message, Question, Swept

T = TypeVar("T")

STATIC_EVERY_SECONDS = 30.0
"""How often what rarely changes is read again: count, names, uuids, limits; and a driver in error is opened again."""

PIDS_EVERY_SECONDS = 10.0
"""How often the compute processes are listed: two driver calls per GPU."""

PR_SET_PDEATHSIG = 1  # prctl(2)

DRIVER_REMEDIES = {
    "DriverNotFound": "install the NVIDIA driver; in a container, also set NVIDIA_DRIVER_CAPABILITIES=utility",
    "DriverNotLoaded": "modprobe nvidia; then look at `dmesg | grep -i nvrm`",
    "LibRmVersionMismatch": "the driver was upgraded under running programs: reboot, or unload and load its modules",
    "NoPermission": "run as root, or allow this user to open /dev/nvidia*",
    "Unknown": "dmesg | grep -i -e nvrm -e xid",
}
GPU_REMEDIES = {
    "GpuIsLost": "drain the node, look for XID 79 in `dmesg`, then power-cycle it: a reset rarely brings it back",
    "ResetRequired": "drain the node, stop all that holds the GPU (hangwatch too), then `nvidia-smi --gpu-reset -i {index}`",
    "NoPermission": "run as root, or allow this user to open /dev/nvidia*",
    "Unknown": "dmesg | grep -i -e nvrm -e xid",
}

ABSENT = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_DEPRECATED)
"""Errors that mean: this GPU, or this driver, does not have it."""

GONE = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND)
"""Errors after which no further call about the same GPU is worth making."""


def reason_of(error: pynvml.NVMLError) -> str:
    """NVML's error as a CamelCase word: 15 is GpuIsLost, a code newer than pynvml is Error<code>."""
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "DriverNotFound"
    name = type(error).__name__
    return name.removeprefix("NVMLError_") if name != "NVMLError" else f"Error{error.value}"


def driver_fault(error: pynvml.NVMLError, call: str) -> Fault:
    """A fault of the whole driver."""
    reason = reason_of(error)
    return Fault(
        subject="driver",
        reason=reason,
        detail=f"{call}: {error} (NVML error {error.value})",
        remedy=DRIVER_REMEDIES.get(reason, ""),
    )


class Gpu:
    """One GPU: its handle, what rarely changes about it, and the faults met while it is read.

    Raises NVMLError, from any method, when the GPU as a whole is gone.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.faults: list[Fault] = []
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.uuid: str = pynvml.nvmlDeviceGetUUID(self.handle)
        self.name: str | None = self.ask(pynvml.nvmlDeviceGetName)
        self.power_limit_watts = scaled(self.ask(pynvml.nvmlDeviceGetEnforcedPowerLimit), 1e-3)
        self.static_faults = tuple(self.faults)
        self.pids: tuple[int, ...] = ()

    def ask(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """The answer of one NVML call; None where there is none, and a fault beside it where there should be one."""
        try:
            return call(self.handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value in GONE:
                raise
            if error.value not in ABSENT:
                self.faults.append(gpu_fault(self.index, error, call.__name__))
            return None


def gpu_fault(index: int, error: pynvml.NVMLError, call: str) -> Fault:
    """A fault of one GPU."""
    reason = reason_of(error)
    return Fault(
        subject=f"gpu {index}",
        reason=reason,
        detail=f"{call}: {error} (NVML error {error.value})",
        remedy=GPU_REMEDIES.get(reason, "").format(index=index),
    )


def scaled(number: float | None, factor: float) -> float | None:
    """A reading in another unit; None stays None."""
    return None if number is None else number * factor


class Driver:
    """The GPUs of this node behind an opened NVML. Raises NVMLError where the driver as a whole does not answer."""

    def __init__(self) -> None:
        self.gpus: list[Gpu] = []
        self.lost: list[Fault] = []
        self.version: str | None = None
        self.static_at = self.pids_at = float("-inf")
        self.healthy = True

    def sweep(self) -> GpuSweep:
        """Read all GPUs once."""
        now = time.monotonic()
        if now - self.static_at >= STATIC_EVERY_SECONDS:
            self.static_at = now
            self.open_gpus()
        list_pids = now - self.pids_at >= PIDS_EVERY_SECONDS
        if list_pids:
            self.pids_at = now
        samples: list[GpuSample] = []
        faults = list(self.lost)
        for gpu in self.gpus:
            reading = read_gpu(gpu, list_pids)
            if isinstance(reading, Fault):
                faults.append(reading)
            else:
                samples.append(reading)
        self.healthy = bool(samples) or not faults
        return GpuSweep(
            taken_monotonic_seconds=now,
            taken_unix_seconds=time.time(),
            gpus=tuple(samples),
            faults=tuple(faults),
            driver_version=self.version,
        )

    def open_gpus(self) -> None:
        """Find the GPUs and read what rarely changes. Where none answered any more, the driver is opened anew."""
        if not self.healthy:
            pynvml.nvmlShutdown()
            pynvml.nvmlInit()
        self.version = driver_version()
        pids = {gpu.uuid: gpu.pids for gpu in self.gpus}
        self.gpus, self.lost = [], []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                gpu = Gpu(index)
            except pynvml.NVMLError as error:
                self.lost.append(gpu_fault(index, error, "nvmlDeviceGetHandleByIndex"))
                continue
            gpu.pids = pids.get(gpu.uuid, ())
            self.gpus.append(gpu)


def driver_version() -> str | None:
    """The driver's version, None where it does not say."""
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def read_gpu(gpu: Gpu, list_pids: bool) -> GpuSample | Fault:
    """One reading of one GPU, or the one fault that says why there is none."""
    gpu.faults = []
    try:
        sample = _read_fields(gpu, list_pids)
    except pynvml.NVMLError as error:
        return gpu_fault(gpu.index, error, "sample")
    readings = (sample.power_watts, sample.utilization_ratio, sample.memory_used_bytes, sample.temperature_celsius)
    if gpu.faults and all(reading is None for reading in readings):
        return gpu.faults[0]
    return sample


def _read_fields(gpu: Gpu, list_pids: bool) -> GpuSample:
    ask = gpu.ask
    utilization = ask(pynvml.nvmlDeviceGetUtilizationRates)
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
    if list_pids:
        processes = ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v3)
        if processes is not None:
            gpu.pids = tuple(sorted({process.pid for process in processes}))
    return GpuSample(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        power_watts=scaled(ask(pynvml.nvmlDeviceGetPowerUsage), 1e-3),
        power_limit_watts=gpu.power_limit_watts,
        utilization_ratio=None if utilization is None else utilization.gpu / 100,
        memory_used_bytes=None if memory is None else memory.used,
        memory_total_bytes=None if memory is None else memory.total,
        sm_clock_hertz=scaled(ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM), 1e6),
        temperature_celsius=scaled(ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU), 1.0),
        energy_joules=scaled(ask(pynvml.nvmlDeviceGetTotalEnergyConsumption), 1e-3),
        pids=gpu.pids,
        faults=(*gpu.static_faults, *gpu.faults),
    )


# --- the process -------------------------------------------------------------------------------------------------


def private_stdout() -> BinaryIO:
    """The pipe to the parent; what else prints to stdout (the driver library does, at times) goes to stderr."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe


def send(parent: BinaryIO, message: Message) -> None:
    """One line to the parent; a parent that has gone ends this process."""
    try:
        parent.write(msgspec.json.encode(message) + b"\n")
        parent.flush()
    except BrokenPipeError:
        os._exit(0)


def answer(driver: Driver, question: Question) -> Answer:
    """Collect the details asked for."""
    fault = Fault(subject="driver", reason="UnknownQuestion", detail=f"no details of kind {question.kind}")
    return Answer(number=question.number, fault=fault)


def serve(driver: Driver, parent: BinaryIO, sample_seconds: float) -> None:
    """Sample on a steady beat, and answer questions between samples, until stdin is closed."""
    due = time.monotonic()
    pending = b""
    while True:
        wait = due - time.monotonic()
        if wait <= 0:
            send(parent, Swept(sweep=driver.sweep()))
            due = max(due + sample_seconds, time.monotonic())
            continue
        if not select.select([0], [], [], wait)[0]:
            continue
        received = os.read(0, 65536)
        if not received:
            return
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            send(parent, answer(driver, msgspec.json.decode(line, type=Question)))


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies, even while it is stuck in the driver."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(0)


def main() -> None:
    """Own the driver until the parent goes; every way in which the driver fails becomes a `Failed` message."""
    sample_seconds, parent_pid = float(sys.argv[1]), int(sys.argv[2])
    die_with(parent_pid)
    parent = private_stdout()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        send(parent, Failed(fault=driver_fault(error, "nvmlInit")))
        return
    send(parent, Hello())
    try:
        serve(Driver(), parent, sample_seconds)
    except pynvml.NVMLError as error:
        send(parent, Failed(fault=driver_fault(error, "sweep")))
    # nvmlShutdown is left to the kernel: it can block, and the parent waits for this process to end
    os._exit(0)


if __name__ == "__main__":
    main()
