"""Sample the GPUs at a steady rate, and answer questions between samples, until the parent is gone.

The process writes one line of JSON per message to stdout, and reads orders from stdin. It ends when stdin is closed.
"""

import os
import select
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

import msgspec
import pynvml

from hangwatch.formats import decoding
from hangwatch.model import Fault, GpuSweep, Value
from hangwatch.probes.gpu import messages
from hangwatch.probes.gpu.details import XidDetails
from hangwatch.probes.gpu.driver_process.driver import Driver
from hangwatch.probes.gpu.driver_process.nvml_device import nvml_fault
from hangwatch.probes.node import daemon_heap


def private_stdout() -> BinaryIO:
    """Return the pipe to the parent, and redirect all other output to stderr. The driver library sometimes prints."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe


def send(parent: BinaryIO, message: messages.Message) -> None:
    """Send a message to the parent, as a line of JSON. End this process if the parent is gone."""
    try:
        parent.write(msgspec.json.encode(message) + b"\n")
        parent.flush()
    except BrokenPipeError:
        os._exit(0)


def answer(question: messages.Question, driver: Driver, between: Callable[[], object]) -> messages.Answer:
    """Return the answer to a question. `between` is called after each GPU, so that sampling continues."""
    from hangwatch.probes.gpu.driver_process import collect  # saves memory in a daemon without GPU checks

    details: Value
    kind = question.kind
    if kind == GpuSweep.__name__:
        details = driver.sweep()
    elif kind == XidDetails.__name__:
        driver.xids.drain()
        details = XidDetails(events=tuple(driver.xids.events))
    elif kind in collect.KINDS:
        details = collect.collect(kind, driver.gpus, driver.lost, between, driver.announce)
    else:
        fault = Fault(subject="driver", reason="UnknownQuestion", detail=f"unknown kind of details: {kind}")
        return messages.Answer(number=question.number, fault=fault)
    return messages.Answer(number=question.number, details=msgspec.Raw(msgspec.json.encode(details)))


class SampleTimer:
    """A timer that sends a sweep to the parent every `every_seconds`. The period begins anew at a late sweep."""

    def __init__(self, driver: Driver, parent: BinaryIO, every_seconds: float) -> None:
        self.driver, self.parent, self.every_seconds = driver, parent, every_seconds
        self.due = time.monotonic()

    def sample_if_due(self) -> float:
        """Send a sweep if it is due. Return the seconds until the next sweep."""
        wait = self.due - time.monotonic()
        if wait > 0:
            return wait
        send(self.parent, messages.SweepMessage(sweep=self.driver.sweep()))
        self.due = max(self.due + self.every_seconds, time.monotonic())
        return max(0.0, self.due - time.monotonic())


def serve(driver: Driver, parent: BinaryIO, sample_seconds: float) -> None:
    """Sample at a steady rate, and answer questions in between, until stdin is closed."""
    timer = SampleTimer(driver, parent, sample_seconds)
    pending = b""
    while True:
        if not select.select([0], [], [], timer.sample_if_due())[0]:
            continue
        received = os.read(0, 65536)
        if not received:
            return
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            order = decoding.decode_json(line, messages.Order)
            if isinstance(order, messages.AdmitOrder):
                driver.admit(order.gpu)
            else:
                send(parent, answer(order, driver, timer.sample_if_due))


def main() -> None:
    """Open the driver and serve the parent until it is gone. Report each failure of the driver as `DriverFailure`."""
    begin = decoding.decode_json(sys.argv[1], messages.Begin)
    if os.getppid() != begin.parent_pid:  # it died before `__main__` asked for the signal
        sys.exit(0)
    parent = private_stdout()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        send(parent, messages.DriverFailure(fault=nvml_fault(error, "nvmlInit")))
        return
    driver = Driver(begin, lambda gpu, purpose: send(parent, messages.CallAnnouncement(gpu=gpu, purpose=purpose)))
    try:
        # Seconds per GPU without persistence mode: the parent waits longer before Hello
        driver.open_gpus()
        daemon_heap.trim()  # memory that imports used
        send(parent, messages.Hello())
        serve(driver, parent, begin.sample_seconds)
    except pynvml.NVMLError as error:
        send(parent, messages.DriverFailure(fault=nvml_fault(error, "sweep")))
    # no nvmlShutdown: it can block, and the parent waits for this process to end
    os._exit(0)
