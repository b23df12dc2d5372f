"""Read XIDs from the events of NVML."""

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from hangwatch.probes.gpu.details import XidEvent
from hangwatch.probes.gpu.driver_process.nvml_device import Gpu

EVENTS_KEPT = 256
MAX_PER_DRAIN = 64


class XidListener:
    """A listener for the XIDs of all GPUs. It ignores driver errors: the kernel log is the first source.

    Call `listen` after the GPUs were reopened, and `drain` with each sample. `drain` does not wait for events.
    """

    def __init__(self) -> None:
        self.events: deque[XidEvent] = deque(maxlen=EVENTS_KEPT)
        self._set: Any = None
        self._gpus: dict[int | None, Gpu] = {}

    def listen(self, gpus: Sequence[Gpu], announce: Callable[[int | None, str], object]) -> None:
        """Register for the XIDs of these GPUs, unless they are already registered.

        `announce` is called before the driver call about each GPU.
        """
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
