"""Read the kernel's clock state: adjtimex(2) with modes 0. Any user may make the call, which changes nothing."""

import ctypes
import os

from hangwatch.model import Fault, Value

STA_UNSYNC = 0x0040
STA_NANO = 0x2000
TIME_ERROR = 5
REMEDY = "allow adjtimex: set ProtectClock=no in the unit; in a container, use a seccomp profile that permits it"


class Timex(Value, frozen=True):
    """The kernel's clock state.

    `synchronized` is false while STA_UNSYNC is set or the state is TIME_ERROR. `offset_seconds` is the offset that is
    still to be corrected. The time daemon sets `estimated_error_seconds` and `maximum_error_seconds`.
    """

    synchronized: bool
    offset_seconds: float
    estimated_error_seconds: float
    maximum_error_seconds: float


class _TimexStruct(ctypes.Structure):
    """The struct timex of <sys/timex.h> on 64-bit systems."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", ctypes.c_long * 2),
        ("tick", ctypes.c_long),
        ("rest", ctypes.c_char * 128),
    )


def read() -> Timex | Fault:
    """Return the kernel's clock state; a Fault if a seccomp filter forbids the call."""
    libc = ctypes.CDLL(None, use_errno=True)
    raw = _TimexStruct()
    state = libc.adjtimex(ctypes.byref(raw))
    if state < 0:
        code = ctypes.get_errno()
        return Fault(
            subject="kernel clock", reason="AdjtimexDenied", detail=f"adjtimex: {os.strerror(code)}", remedy=REMEDY
        )
    return decode(state, raw.status, raw.offset, raw.esterror, raw.maxerror)


def decode(state: int, status: int, offset: int, esterror: int, maxerror: int) -> Timex:
    """Convert the kernel's integers to seconds: `offset` from ns with STA_NANO, else from us; errors from us."""
    return Timex(
        synchronized=state != TIME_ERROR and not status & STA_UNSYNC,
        offset_seconds=offset * (1e-9 if status & STA_NANO else 1e-6),
        estimated_error_seconds=esterror * 1e-6,
        maximum_error_seconds=maxerror * 1e-6,
    )
