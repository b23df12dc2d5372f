"""Read the time at which the main thread's system call ends: the end of a sleep, or of a wait with a timeout.

proc_pid_syscall(5) shows the address of the timeout. The timeout is in the memory of the process. Layouts: struct
__kernel_timespec and __kernel_old_timeval of include/uapi/linux/time_types.h, flags of futex(2) and clock_nanosleep(2).
The owner of the process can write anything there. A length counts from now: the call may end earlier.
"""

import struct
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from hangwatch.model import SystemCall
from hangwatch.probes.base import procfs, pseudo_files, system_calls
from hangwatch.probes.process import process_memory

MOST_SECONDS = 366 * 86400.0  # a longer wait counts as one without an end
_PAIR = struct.Struct("=qq")
_UNITS = {"timespec": 10**9, "timeval": 10**6}
_REALTIME, _MONOTONIC = 0, 1  # clockid_t, include/uapi/linux/time.h
_LENGTH = -1  # no clock: the timeout is a length
_TIMER_ABSTIME = 1
_FUTEX_WAIT, _FUTEX_WAIT_BITSET = 0, 9
_FUTEX_PRIVATE_FLAG, _FUTEX_CLOCK_REALTIME = 128, 256


def add_end(pid: int, call: SystemCall | None, proc_root: Path, thread: int | None = None) -> SystemCall | None:
    """Return the call of the main thread (or `thread`) with its latest end, if the thread is still in that call."""
    row = None if call is None else system_calls.calls_by_name().get(call.name)
    current = system_calls.read(pid, proc_root, thread) if row is not None and row.timeout else None
    if call is None or row is None or current is None or current.number != call.number:
        return call
    timeout, memory = current.arguments[row.timeout_at], proc_root / str(pid) / "mem"
    raw = process_memory.SHARED.read(memory, timeout, _PAIR.size) if row.timeout in _UNITS and timeout else b""
    clock = find_clock(call.name, current.arguments)
    if clock is None:
        return call
    shift = _read_shift(proc_root, pid) - _read_shift(procfs.PROC, "self") if clock == _MONOTONIC else 0.0
    now = 0.0 if clock == _LENGTH else time.clock_gettime(clock) + shift
    left_seconds = decode_timeout(row.timeout, timeout, raw, now)
    if left_seconds is None or system_calls.read(pid, proc_root, thread) != current:
        return call
    return replace(call, left_seconds=left_seconds, until_unix_seconds=time.time() + left_seconds)


def _read_shift(proc_root: Path, pid: int | str) -> float:
    """Return the seconds by which CLOCK_MONOTONIC of a process is ahead of the kernel's; see time_namespaces(7)."""
    fields = pseudo_files.read_or_empty(proc_root / str(pid) / "timens_offsets").split()
    return int(fields[1]) + int(fields[2]) / 1e9 if fields else 0.0


def find_clock(name: str, arguments: Sequence[int]) -> int | None:
    """Return the clock by which the timeout of a call is given; `_LENGTH` if the timeout is a length of time.

    None for an unsupported clock or operation.
    """
    if name == "futex":
        is_realtime = bool(arguments[1] & _FUTEX_CLOCK_REALTIME)
        clocks = {_FUTEX_WAIT: _LENGTH, _FUTEX_WAIT_BITSET: _REALTIME if is_realtime else _MONOTONIC}
        return clocks.get(arguments[1] & ~(_FUTEX_PRIVATE_FLAG | _FUTEX_CLOCK_REALTIME))
    if name == "clock_nanosleep" and arguments[1] & _TIMER_ABSTIME:
        return arguments[0] if arguments[0] in (_REALTIME, _MONOTONIC) else None
    return _LENGTH


def decode_timeout(layout: str, argument: int, raw: bytes, now: float) -> float | None:
    """Return the seconds until the end of a timeout.

    None if there is no timeout, if the kernel refuses it, or if it is longer than `MOST_SECONDS`. `argument` is the
    timeout itself or its address, `raw` the content at that address. `now` is the time by the clock of an absolute
    timeout, 0 for a length of time.
    """
    if layout == "milliseconds":
        count = argument & 0xFFFFFFFF  # an int: the upper half of the register is undefined
        left = count / 1000 if count < 1 << 31 else None
    else:
        seconds, parts = _PAIR.unpack(raw) if argument and len(raw) == _PAIR.size else (-1, 0)
        is_valid = seconds >= 0 and 0 <= parts < _UNITS[layout]
        left = seconds - now + parts / _UNITS[layout] if is_valid else None
    return None if left is None or left > MOST_SECONDS else max(0.0, left)
