"""The process that owns the NVIDIA driver; nothing outside of it imports pynvml.

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
from typing import BinaryIO

import msgspec
import pynvml

from hangwatch.details import XidDetails
from hangwatch.model import Fault, GpuSample, GpuSweep, Value
from hangwatch.probes.gpus import Answer, Failed, Hello, Message, Question, Swept
from hangwatch.probes.nvml_events import XidListener
from hangwatch.probes.nvml_gpu import Gpu, driver_fault, gpu_fault, scaled

STATIC_EVERY_SECONDS = 30.0
"""How often what rarely changes is read again: count, names, uuids, limits; and a driver in error is opened again."""

PIDS_EVERY_SECONDS = 10.0
"""How often the compute processes are listed: two driver calls per GPU."""

PR_SET_PDEATHSIG = 1  # prctl(2)


class Driver:
    """The GPUs of this node behind an opened NVML. Raises NVMLError where the driver as a whole does not answer."""

    def __init__(self) -> None:
        self.gpus: list[Gpu] = []
        self.lost: list[Fault] = []
        self.version: str | None = None
        self.static_at = self.pids_at = float("-inf")
        self.healthy = True
        self.xids = XidListener()

    def sweep(self) -> GpuSweep:
        """Read all GPUs once."""
        now = time.monotonic()
        if now - self.static_at >= STATIC_EVERY_SECONDS:
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
        self.xids.drain()
        return GpuSweep(
            taken_monotonic_seconds=now,
            taken_unix_seconds=time.time(),
            gpus=tuple(samples),
            faults=tuple(faults),
            driver_version=self.version,
        )

    def open_gpus(self) -> None:
        """Find the GPUs and read what rarely changes. Where none answered any more, the driver is opened anew."""
        self.static_at = time.monotonic()
        if not self.healthy:
            self.xids.forget()
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
        self.xids.listen(self.gpus)


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


def answer(question: Question, driver: Driver, between: Callable[[], object]) -> Answer:
    """Collect the details asked for; `between` is called now and then, so that sampling goes on."""
    details = _details(question.kind, driver, between)
    if isinstance(details, Fault):
        return Answer(number=question.number, fault=details)
    return Answer(number=question.number, details=msgspec.Raw(msgspec.json.encode(details)))


def _details(kind: str, driver: Driver, between: Callable[[], object]) -> Value:
    from hangwatch.probes import nvml_details  # only a daemon that runs the GPU checks pays for it

    if kind == GpuSweep.__name__:
        return driver.sweep()
    if kind == XidDetails.__name__:
        driver.xids.drain()
        return XidDetails(events=tuple(driver.xids.events))
    if kind in nvml_details.KINDS:
        return nvml_details.collect(kind, driver.gpus, driver.lost, between)
    return Fault(subject="driver", reason="UnknownQuestion", detail=f"there are no details {kind}")


class Beat:
    """Samples are due every `every_seconds`; after a delay the beat goes on from then."""

    def __init__(self, driver: Driver, parent: BinaryIO, every_seconds: float) -> None:
        self.driver, self.parent, self.every_seconds = driver, parent, every_seconds
        self.due = time.monotonic()

    def sample_if_due(self) -> float:
        """Send a sweep if it is time; the seconds until the next one."""
        wait = self.due - time.monotonic()
        if wait > 0:
            return wait
        send(self.parent, Swept(sweep=self.driver.sweep()))
        self.due = max(self.due + self.every_seconds, time.monotonic())
        return max(0.0, self.due - time.monotonic())


def serve(driver: Driver, parent: BinaryIO, sample_seconds: float) -> None:
    """Sample on a steady beat, and answer questions between samples, until stdin is closed."""
    beat = Beat(driver, parent, sample_seconds)
    pending = b""
    while True:
        wait = beat.sample_if_due()
        if not select.select([0], [], [], wait)[0]:
            continue
        received = os.read(0, 65536)
        if not received:
            return
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            question = msgspec.json.decode(line, type=Question)
            send(parent, answer(question, driver, beat.sample_if_due))


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
    driver = Driver()
    try:
        driver.open_gpus()  # seconds for each GPU that nobody holds open: the parent is more patient before Hello
        send(parent, Hello())
        serve(driver, parent, sample_seconds)
    except pynvml.NVMLError as error:
        send(parent, Failed(fault=driver_fault(error, "sweep")))
    # nvmlShutdown is left to the kernel: it can block, and the parent waits for this process to end
    os._exit(0)


if __name__ == "__main__":
    main()
