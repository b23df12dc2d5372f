"""The process that owns the NVIDIA driver, as its parent sees it: its messages, its orders and its end."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hangwatch.formats import decoding
from hangwatch.model import Fault
from hangwatch.probes.base import pseudo_files
from hangwatch.probes.base.child import Child, signal_name
from hangwatch.probes.base.gpu_source import INSTALL_DRIVER
from hangwatch.probes.gpu.messages import Begin, CallAnnouncement, Message, Order

MAX_MESSAGE_BYTES = 8 << 20
REAP_SECONDS = 2.0
_LIBRARY = "libnvidia-ml.so.1"


class DriverChild(Child):
    """A process of `hangwatch.probes.gpu.driver_process` and its two pipes.

    `announced` is its last `CallAnnouncement` message. `got_answer` is true once the driver has responded about a GPU.
    """

    def __init__(self, begin: Begin, environ: Mapping[str, str]) -> None:
        """Start the process. Raises OSError if that fails, with ELIBACC if there is no driver."""
        cache = pseudo_files.read_start("/etc/ld.so.cache", 16 << 20)
        is_known = isinstance(cache, OSError) or _LIBRARY.encode() in cache or Path("/dev/nvidiactl").exists()
        if not is_known and not environ.get("LD_LIBRARY_PATH"):  # no process has to try
            raise OSError(errno.ELIBACC, _LIBRARY)
        # It imports from the same folders as this process, and never from its working folder.
        import_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100 - strings in and out
        super().__init__(
            [sys.executable, "-m", "hangwatch.probes.gpu.driver_process", msgspec.json.encode(begin).decode()],
            environ={**environ, "PYTHONPATH": import_path},
            has_input=True,
            errors=None,
            own_session=True,
        )
        self._partial = b""
        self._decoder = decoding.decoder(Message)
        self.announced = CallAnnouncement(gpu=None)
        self.got_answer = False

    def messages(self, timeout_seconds: float) -> list[Message]:
        """Wait for the next messages and return them.

        Raises TimeoutError if none comes in time, EOFError if the child has ended, MsgspecError for invalid messages.
        """
        end = time.monotonic() + timeout_seconds
        while True:
            received, _ = self.read(end)
            if not received:
                raise EOFError
            *lines, self._partial = (self._partial + received).split(b"\n")
            if len(self._partial) > MAX_MESSAGE_BYTES:
                raise msgspec.DecodeError(f"a line of more than {MAX_MESSAGE_BYTES} bytes")
            if lines:
                return [self._decoder.decode(line) for line in lines]

    def order(self, order: Order) -> None:
        """Send an order. If the child cannot receive it, do nothing: such a child soon misses its deadline."""
        with contextlib.suppress(BrokenPipeError, TimeoutError):
            self.write(msgspec.json.encode(order) + b"\n", 0.0)

    def end_fault(self) -> Fault:
        """Return a fault with the exit code or signal that ended the process."""
        code = self.wait(REAP_SECONDS)
        ending = f"exit code {code}"
        if code is not None and code < 0:
            ending = f"{signal_name(-code) or 'unknown'} (signal {-code})"
        return Fault(
            subject="driver",
            reason="Crashed",
            detail=f"the process that reads the driver ended with {ending}; hangwatch starts it again",
            remedy="dmesg | grep -i -e nvrm -e xid; if Python failed, its error is in the log of hangwatch",
        )


def not_started(error: OSError) -> Fault:
    """Return the fault for a process that could not be started."""
    if error.errno == errno.ELIBACC:
        detail = f"{_LIBRARY} cannot be loaded"
        return Fault(subject="driver", reason="DriverNotFound", detail=detail, remedy=INSTALL_DRIVER)
    return Fault(
        subject="driver",
        reason="SamplerNotStarted",
        detail=f"the process that reads the GPUs cannot be started: {error}",
        remedy=f"make {sys.executable} executable for this user",
    )
