"""Read GPUs through a child process, which can be abandoned if the NVIDIA driver blocks or crashes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import msgspec

from hangwatch.formats import decoding
from hangwatch.model import Fault, GpuSweep, SamplerStatus
from hangwatch.probes.base.gpu_source import NO_DRIVER, DetailsT, kind_name
from hangwatch.probes.gpu import blocked_gpus, driver_child
from hangwatch.probes.gpu.blocked_gpus import NO_ANSWER, BlockedGpus
from hangwatch.probes.gpu.driver_child import REAP_SECONDS, DriverChild
from hangwatch.probes.gpu.messages import (
    AdmitOrder,
    Answer,
    Begin,
    CallAnnouncement,
    DriverFailure,
    Hello,
    Question,
    SweepMessage,
)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
SUSPENDED_SECONDS = 600.0
"""Time before the sampler asks again for details that made the driver block."""

MAX_ABANDONED = 3
"""Limit of processes that hang in calls about the whole driver. At the limit no new process starts: it would hang, too.

A process that hangs in a call about one GPU does not count. The next process does not read that GPU, so at most one
process hangs per GPU.
"""

KEEP_OPEN = (
    "run `nvidia-smi -pm 1`, or `systemctl enable --now nvidia-persistenced`: without persistence mode, opening takes "
    "seconds per GPU; if `nvidia-smi` does not return, drain and reboot the node"
)


class NvmlSampler:
    """A `GpuSource` that samples all GPUs every `sample_seconds`.

    A child that dies, or that sends nothing for `deadline_seconds` longer than expected, is killed. Another child
    replaces it after a pause; pauses grow. A child that cannot be killed (blocked in the driver) is abandoned and
    counted.

    If the blocking call is about one GPU, the next child starts at once without that GPU. Sweeps continue with the
    other GPUs, and hold a fault for this one. If that child had read no other GPU, the driver as a whole may be the
    cause: then the next child opens that GPU last. A separate process retries the GPU after `gpu_retry_seconds`, then
    with growing pauses. It never starts while an earlier process still hangs in this GPU.

    Without a driver, the status has a fault, and the sampler looks for it every `driver_retry_seconds`.
    `start_deadline_seconds` limits the opening of the driver, and a quarter of it the opening of each GPU. Without
    persistence mode each GPU takes seconds. `environ` is the child's environment.
    """

    def __init__(
        self,
        *,
        sample_seconds: float,
        deadline_seconds: float,
        environ: Mapping[str, str] | None = None,
        start_deadline_seconds: float = 60.0,
        driver_retry_seconds: float = 60.0,
        gpu_retry_seconds: float = blocked_gpus.FIRST_PAUSE_SECONDS,
    ) -> None:
        self._sample_seconds = sample_seconds
        self._deadline_seconds = deadline_seconds
        self._silence_seconds = sample_seconds + deadline_seconds
        self._start_deadline_seconds = max(start_deadline_seconds, deadline_seconds)
        self._open_deadline_seconds = max(self._start_deadline_seconds / 4, deadline_seconds)
        self._driver_retry_seconds = driver_retry_seconds
        self._environ = dict(os.environ if environ is None else environ)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._child: DriverChild | None = None
        self._abandoned: list[DriverChild] = []
        self._blocked = BlockedGpus(gpu_retry_seconds)
        self._retrying: dict[int, DriverChild | None] = {}
        self._asked_last: tuple[int, ...] = ()
        self._latest: GpuSweep | None = None
        self._status = SamplerStatus()
        self._questions = 0
        self._pending: dict[int, tuple[str, Future[Answer]]] = {}
        self._suspended_until: dict[str, float] = {}

    def start(self) -> None:
        """Start the child and the thread that reads from it. Return at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nvml-reader", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Kill the child, and wait at most a few seconds for the thread."""
        with self._changed:
            self._stopping.set()
            for child in (self._child, *self._retrying.values()):
                if child is not None:
                    child.kill()
        if self._thread is not None:
            self._thread.join(2 * REAP_SECONDS)

    def latest(self) -> GpuSweep | None:
        """Return the last sweep, however old; None before the first one."""
        return self._latest

    def wait_for_sweep(self, deadline_seconds: float) -> GpuSweep | None:
        """Wait for the first sweep and return the newest. None if the driver failed or did not respond in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest or self._status.fault, deadline_seconds)
            return self._latest

    def status(self) -> SamplerStatus:
        """Return the state of the sampling itself."""
        with self._changed:
            return msgspec.structs.replace(self._status, abandoned=len(self._reap()))

    def query(self, kind: type[DetailsT], deadline_seconds: float) -> DetailsT | Fault:
        """Request details of one kind from the child, and wait for them.

        The wait is at most `deadline_seconds`, including the opening of the driver. A kind that made the driver block
        is refused for ten minutes, so that the sampling of power continues.
        """
        end = time.monotonic() + deadline_seconds
        name = kind_name(kind)
        if time.monotonic() < self._suspended_until.get(name, 0.0):
            return _stalled(
                name,
                f"made the driver block, so hangwatch does not read it for {SUSPENDED_SECONDS / 60:.0f} min; power is "
                "still sampled",
            )
        with self._changed:
            self._changed.wait_for(lambda: self._status.alive or self._status.fault is not None, deadline_seconds)
            child = self._child
            if child is None or not self._status.alive:
                return self._status.fault or _stalled(name, "the driver is still being opened", KEEP_OPEN)
            self._questions += 1
            number = self._questions
            future: Future[Answer] = Future()
            self._pending[number] = name, future
            child.order(Question(number=number, kind=name))
        try:
            answer = future.result(max(0.0, end - time.monotonic()))
        except FutureTimeoutError:  # the question stays open: if the child hangs in it, its kind is suspended
            return _stalled(name, f"the driver did not respond within {deadline_seconds:g} s")
        return answer.fault or decoding.decode_json(answer.details, kind)

    # --- the reading thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            started = time.monotonic()
            fault = self._run_child()
            if fault is None:
                return
            if time.monotonic() - started > LONGEST_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            if fault.reason == blocked_gpus.REASON:
                continue
            self._stopping.wait(self._driver_retry_seconds if fault.reason in NO_DRIVER else pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            while self._hanging_in_driver() >= MAX_ABANDONED and not self._stopping.wait(LONGEST_PAUSE_SECONDS):
                pass

    def _run_child(self) -> Fault | None:
        """Run one child from its start to its end. Return the reason why it ended; None if the sampler is stopping."""
        with self._changed:
            if self._stopping.is_set():
                return None
            try:
                child = self._child = self._start_child(blocked=dict(self._blocked.faults))
            except OSError as error:
                fault = driver_child.not_started(error)
                self._update(alive=False, stalled=False, fault=fault)
                return fault
        fault = self._listen(child)
        with self._changed:
            self._child = None
        reaped = child.end(REAP_SECONDS)
        with self._changed:
            if not reaped:
                self._abandoned.append(child)
            stopping = self._stopping.is_set()
            silent = fault.reason in ("Stalled", blocked_gpus.REASON)
            self._update(
                alive=False,
                stalled=not stopping and silent,
                fault=None if stopping else fault,
                restarts=self._status.restarts + (not stopping and fault.reason not in NO_DRIVER),
            )
            if silent:
                self._suspend(child.announced)
            for number in list(self._pending):
                self._settle(Answer(number=number, fault=fault))
        return None if stopping else fault

    def _listen(self, child: DriverChild) -> Fault:
        """Read the child's messages until it fails, dies, or does not respond in time."""
        deadline, remedy, is_open = self._start_deadline_seconds, KEEP_OPEN, False
        while True:
            try:
                messages = child.messages(deadline)
            except TimeoutError:
                gpu = child.announced.gpu
                if gpu is not None and child.got_answer:
                    with self._changed:  # stop reading this GPU
                        self._blocked.block(gpu, child.announced.purpose, deadline, time.monotonic())
                        return self._blocked.faults[gpu]
                if gpu is not None:
                    self._asked_last = (*self._asked_last, gpu)
                    child.announced = CallAnnouncement(gpu=None)
                detail = f"process {child.pid} has been waiting for the driver for {deadline:g} s"
                return _stalled("driver", detail, remedy)
            except EOFError:
                return child.end_fault()
            except msgspec.MsgspecError as error:
                return Fault(
                    subject="driver", reason="Garbled", detail=f"the sampling process sent an invalid message: {error}"
                )
            for message in messages:
                if isinstance(message, DriverFailure):
                    return message.fault
                is_open = is_open or isinstance(message, Hello)
                if isinstance(message, CallAnnouncement):
                    child.got_answer = child.got_answer or child.announced.gpu is not None
                    child.announced = message
                else:
                    self._take(message)
            about_gpu = child.announced.gpu is not None
            if is_open:
                deadline, remedy = self._deadline_seconds if about_gpu else self._silence_seconds, NO_ANSWER
            else:
                deadline = self._open_deadline_seconds if about_gpu else self._start_deadline_seconds
            self._retry_blocked()

    # --- GPUs that are not read ------------------------------------------------------------------------------------

    def _retry_blocked(self) -> None:
        """Retry the blocked GPUs that are due, each in its own process. Sampling of the other GPUs continues."""
        with self._changed:
            hanging = {child.announced.gpu for child in self._reap()}
            for index in self._blocked.due_for_retry(time.monotonic(), hanging | self._retrying.keys()):
                self._retrying[index] = None
                threading.Thread(target=self._retry_gpu, args=(index,), name=f"nvml-try-{index}", daemon=True).start()

    def _retry_gpu(self, index: int) -> None:
        is_answered = False
        try:
            with self._changed:
                child = None if self._stopping.is_set() else self._start_child(only_gpu=index)
                self._retrying[index] = child
            if child is not None:
                is_answered = self._has_answer(child)
                if not child.end(REAP_SECONDS):
                    child.announced = CallAnnouncement(gpu=index)
                    with self._changed:
                        self._abandoned.append(child)
        except OSError:  # no process could be started: the next retry may succeed
            pass
        finally:
            with self._changed:
                del self._retrying[index]
                if not is_answered:
                    self._blocked.retry_failed(index, time.monotonic())
                else:
                    self._blocked.retry_succeeded(index, time.monotonic())
                    if self._child is not None:
                        self._child.order(AdmitOrder(gpu=index))

    def _has_answer(self, child: DriverChild) -> bool:
        """True if the process that reads one GPU completes a sweep in time, even a sweep with an error."""
        end = time.monotonic() + self._start_deadline_seconds
        try:
            while True:
                for message in child.messages(max(0.0, end - time.monotonic())):
                    if isinstance(message, SweepMessage):
                        return True
        except (TimeoutError, EOFError, msgspec.MsgspecError):
            return False

    # --- state shared by the threads; `_changed` is held -----------------------------------------------------------

    def _start_child(self, *, blocked: dict[int, Fault] | None = None, only_gpu: int | None = None) -> DriverChild:
        """Start a driver process. Raises OSError as `DriverChild` does."""
        begin = Begin(
            sample_seconds=self._sample_seconds,
            parent_pid=os.getpid(),
            blocked=blocked or {},
            read_last=self._asked_last,
            only_gpu=only_gpu,
        )
        return DriverChild(begin, self._environ)

    def _reap(self) -> list[DriverChild]:
        """Return the processes that could not be killed and still exist."""
        self._abandoned = [child for child in self._abandoned if child.wait() is None]
        return self._abandoned

    def _hanging_in_driver(self) -> int:
        """Return the number of abandoned processes that hang in a call about the whole driver, as a new one would."""
        with self._changed:
            return sum(child.announced.gpu is None for child in self._reap())

    def _take(self, message: Hello | SweepMessage | Answer) -> None:
        with self._changed:
            if isinstance(message, Answer):
                self._settle(message)
            elif isinstance(message, SweepMessage):
                self._latest = message.sweep
                self._update(alive=True, stalled=False, fault=None)
            else:
                self._update(alive=True)

    def _update(self, **changes: object) -> None:
        self._status = msgspec.structs.replace(self._status, **changes)
        self._changed.notify_all()

    def _settle(self, answer: Answer) -> None:
        _, future = self._pending.pop(answer.number, ("", None))
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(answer)

    def _suspend(self, announced: CallAnnouncement) -> None:
        """Suspend the kind of details for which the driver did not respond.

        A call about a GPU has this kind as its purpose. For other calls it is the kind of the oldest open question,
        since questions are answered in order.
        """
        kinds = [name for name, _ in self._pending.values()]
        blocked = [name for name in kinds if name == announced.purpose] if announced.gpu is not None else kinds[:1]
        for name in blocked[:1]:
            self._suspended_until[name] = time.monotonic() + SUSPENDED_SECONDS


@contextlib.contextmanager
def run_sampler(deadline_seconds: float) -> Iterator[NvmlSampler]:
    """Sample the GPUs of this node every second until the block ends."""
    gpus = NvmlSampler(sample_seconds=1.0, deadline_seconds=deadline_seconds)
    gpus.start()
    try:
        yield gpus
    finally:
        gpus.stop()


def _stalled(subject: str, detail: str, remedy: str = NO_ANSWER) -> Fault:
    return Fault(subject=subject, reason="Stalled", detail=detail, remedy=remedy)
