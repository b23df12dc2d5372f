"""What the main thread of a process does in the kernel: its time, its switches, the system call that it is in.

See proc_pid_stat(5), proc_pid_status(5), proc_pid_syscall(5); `schedstat` as Documentation/scheduler/sched-stats.rst
has it. Nothing is paused. Numbers of system calls differ between architectures: of others than these nothing is said.
"""

from __future__ import annotations

import fcntl
import os
import platform
import struct
import time
from pathlib import Path
from typing import Literal, TypeAlias

from hangwatch.model import SystemCall, ThreadCounters
from hangwatch.probes import memory, pseudofiles

MOST_DESCRIPTORS = 1024  # of one poll, select or epoll

_Kind: TypeAlias = Literal["receives", "selects", "polls", "epolls", "awaits_child", "writes", "locks", "sleeps"]
_NUMBERS: dict[str, dict[_Kind, tuple[int, ...]]] = {
    "x86_64": {
        "receives": (0, 19, 42, 43, 45, 47, 288),  # read, readv, connect, accept, recvfrom, recvmsg, accept4
        "polls": (7, 271),  # poll, ppoll
        "selects": (23, 270),  # select, pselect6
        "epolls": (232, 281, 441),  # epoll_wait, epoll_pwait, epoll_pwait2
        "awaits_child": (61, 247),  # wait4, waitid
        "writes": (1, 3, 18, 20, 26, 74, 75, 162, 277, 285, 306),  # write*, close, msync, fsync, sync*, fallocate
        "locks": (72, 73),  # fcntl, flock
        "sleeps": (35, 230),  # nanosleep, clock_nanosleep
    },
    "aarch64": {
        "receives": (63, 65, 202, 203, 207, 212, 242),
        "polls": (73,),
        "selects": (72,),
        "epolls": (22, 441),
        "awaits_child": (95, 260),
        "writes": (47, 57, 64, 66, 68, 81, 82, 83, 84, 227, 267),
        "locks": (25, 32),
        "sleeps": (101, 115),
    },
}
_KINDS = {number: kind for kind, numbers in _NUMBERS.get(platform.machine(), {}).items() for number in numbers}
_WAITID = {"x86_64": (247,), "aarch64": (95,)}.get(platform.machine(), ())
_FCNTL = {"x86_64": (72,), "aarch64": (25,)}.get(platform.machine(), ())
_F_OFD_SETLKW = 38
_MOST_PIDS = 1 << 22  # PID_MAX_LIMIT
_POLLFD = struct.Struct("=ihh")


def read_counters(pid: int, proc_root: Path) -> ThreadCounters | None:
    """What the main thread used so far; None where it is gone or was not to be read."""
    folder = proc_root / str(pid) / "task" / str(pid)
    stat, status, sched = (pseudofiles.read(folder / name, f"pid {pid}") for name in ("stat", "status", "schedstat"))
    fields = stat.rpartition(")")[2].split() if isinstance(stat, str) else []
    if len(fields) < 13 or not isinstance(status, str):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    user_seconds, system_seconds = int(fields[11]) / ticks, int(fields[12]) / ticks
    on_core = sched.split() if isinstance(sched, str) else []
    switches = dict(line.split(":", 1) for line in status.splitlines() if "ctxt_switches:" in line)
    return ThreadCounters(
        read_monotonic_seconds=time.monotonic(),
        cpu_seconds=int(on_core[0]) / 1e9 if on_core else user_seconds + system_seconds,
        system_seconds=system_seconds,
        delay_seconds=int(on_core[1]) / 1e9 if len(on_core) > 1 else None,
        voluntary_switches=pseudofiles.number(switches.get("voluntary_ctxt_switches")),
        involuntary_switches=pseudofiles.number(switches.get("nonvoluntary_ctxt_switches")),
    )


def read_call(pid: int, proc_root: Path) -> SystemCall | None:
    """The system call that the main thread is in, with its descriptors; None where it runs, or it is not permitted."""
    folder = proc_root / str(pid)
    text = pseudofiles.read(folder / "task" / str(pid) / "syscall", f"pid {pid}")
    fields = text.split() if isinstance(text, str) else []
    if len(fields) < 7 or not fields[0].isdecimal():
        return None
    number, arguments = int(fields[0]), [int(field, 16) for field in fields[1:7]]
    kind = _KINDS.get(number)
    if number in _FCNTL and arguments[1] not in (fcntl.F_SETLKW, _F_OFD_SETLKW):
        kind = None
    if kind == "selects" and not arguments[0] and arguments[4]:
        kind = "sleeps"  # on no descriptor, with a time-out: time.sleep of Python 3.10
    first, child = arguments[0], 0
    match kind:
        case None | "awaits_child" | "sleeps":
            descriptors: tuple[int, ...] = ()
            child = arguments[1] if number in _WAITID else first
        case "polls":
            descriptors = _polled(folder, first, arguments[1])
        case "selects":
            descriptors = _selected(folder, first, arguments[1])
        case "epolls":
            descriptors = _watched(folder, first)
        case _:
            descriptors = (first,)
    is_one = kind == "awaits_child" and 0 < child <= _MOST_PIDS
    return SystemCall(number=number, kind=_plain(kind), descriptors=descriptors, child=child if is_one else None)


def _plain(kind: _Kind | None) -> Literal["receives", "awaits_child", "writes", "locks", "sleeps", "other"]:
    match kind:
        case "receives" | "selects" | "polls" | "epolls":
            return "receives"
        case _:
            return kind or "other"


def _polled(folder: Path, address: int, count: int) -> tuple[int, ...]:
    raw = _memory(folder, address, min(count, MOST_DESCRIPTORS) * _POLLFD.size)
    return tuple(descriptor for descriptor, _, _ in _POLLFD.iter_unpack(raw) if descriptor >= 0)


def _selected(folder: Path, count: int, address: int) -> tuple[int, ...]:
    """The descriptors of the set that select(2) waits to read from."""
    raw = _memory(folder, address, (min(count, MOST_DESCRIPTORS) + 63) // 64 * 8)
    return tuple(bit for bit in range(min(count, len(raw) * 8)) if raw[bit // 8] >> bit % 8 & 1)


def _watched(folder: Path, descriptor: int) -> tuple[int, ...]:
    """What an epoll instance watches, see proc_pid_fdinfo(5)."""
    text = pseudofiles.read(folder / "fdinfo" / str(descriptor), "epoll")
    rows = text.splitlines() if isinstance(text, str) else []
    found = [row.split()[1] for row in rows if row.startswith("tfd:")]
    return tuple(int(word) for word in found[:MOST_DESCRIPTORS] if word.isdecimal())


def _memory(folder: Path, address: int, count: int) -> bytes:
    """So many bytes of the memory of a process, or none; needs what py-spy needs, and pauses nothing."""
    if not address or not count:
        return b""
    raw = memory.SHARED.read(folder / "mem", address, count)
    return raw[: len(raw) - len(raw) % _POLLFD.size]
