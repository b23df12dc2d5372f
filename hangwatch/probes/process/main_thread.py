"""Read the main thread of a process from /proc: its CPU time, its context switches, its system call.

See proc_pid_stat(5), proc_pid_status(5), proc_pid_syscall(5), and Documentation/scheduler/sched-stats.rst for
`schedstat`. No thread is paused. `system_calls` contains the numbers of the calls.
"""

import bisect
import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from hangwatch.model import SystemCall, ThreadCounters
from hangwatch.probes.base import procfs, pseudo_files, system_calls
from hangwatch.probes.process import process_memory

MOST_DESCRIPTORS = 1024  # of one poll, select or epoll

_AT_FDCWD, _DESCRIPTOR_BITS = -100, 0xFFFFFFFF  # of fcntl.h; a descriptor is the lower half of an argument
_F_OFD_SETLKW = 38
# Read by a major page fault: read_ahead_kb of Documentation/ABI/stable/sysfs-block
_READ_AHEAD_BYTES = 128 << 10
_MOST_PIDS = 1 << 22  # PID_MAX_LIMIT
_MOST_PATH_BYTES = 512
_MOST_THREADS = 65536
_POLLFD = struct.Struct("=ihh")


def read_counters(pid: int, proc_root: Path, thread: int | None = None) -> ThreadCounters | None:
    """Return the counters of the main thread (or `thread`) since its start; None if ended or not readable."""
    folder = f"{proc_root}/{pid}/task/{thread or pid}"
    names = ("stat", "status", "schedstat", "io")
    stat, status, sched, moved = (pseudo_files.read_or_empty(f"{folder}/{name}") for name in names)
    called, stored = (procfs.parse_io(moved, *names) for names in (("rchar", "wchar"), ("read_bytes", "write_bytes")))
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 13 or not status:
        return None
    minor_faults, major_faults = int(fields[7]), int(fields[9])
    user_seconds, system_seconds = (int(field) / procfs.TICKS_PER_SECOND for field in fields[11:13])
    on_core = sched.split()
    switches = dict(line.split(":", 1) for line in status.splitlines() if "ctxt_switches:" in line)
    return ThreadCounters(
        read_monotonic_seconds=time.monotonic(),
        cpu_seconds=int(on_core[0]) / 1e9 if on_core else user_seconds + system_seconds,
        system_seconds=system_seconds,
        delay_seconds=int(on_core[1]) / 1e9 if len(on_core) > 1 else None,
        voluntary_switches=pseudo_files.number(switches.get("voluntary_ctxt_switches")),
        involuntary_switches=pseudo_files.number(switches.get("nonvoluntary_ctxt_switches")),
        io_bytes=None if called is None else max(called, stored or 0),
        faulted_bytes=minor_faults * os.sysconf("SC_PAGE_SIZE") + major_faults * _READ_AHEAD_BYTES,
    )


def read_call(pid: int, proc_root: Path, thread: int | None = None) -> SystemCall | None:
    """Return the call of the main thread (or `thread`) with its descriptors; None in user space or if not readable."""
    folder = proc_root / str(pid)
    call = system_calls.read(pid, proc_root, thread)
    if call is None:
        return None
    number, name, row, arguments = call
    kind, first = row.kind, arguments[0]
    if name == "fcntl" and arguments[1] not in (fcntl.F_SETLKW, _F_OFD_SETLKW):
        kind = "other"
    if row.on == "selected" and not first and arguments[4]:
        kind = "sleeps"  # a timeout without descriptors: time.sleep of Python 3.10
    read = _DESCRIPTORS.get(row.on)
    descriptors = () if read is None else read(folder, first, arguments[1])
    child = arguments[1] if name == "waitid" else first
    is_pid = row.on == "child" and 0 < child <= _MOST_PIDS
    return SystemCall(number=number, name=name, kind=kind, descriptors=descriptors, child=child if is_pid else None)


def list_other_threads(pid: int, proc_root: Path, most: int) -> tuple[int, ...]:
    """Return the ids of the threads besides the main thread: at most `most`, the youngest first."""
    threads = map(int, procfs.list_pids(f"{proc_root}/{pid}/task"))
    return tuple(sorted((thread for thread in threads if thread != pid), reverse=True)[:most])


def find_thread(pid: int, inner_thread: int, proc_root: Path) -> int | None:
    """Return the number of the thread with the number `inner_thread` in its own pid namespace; None if not found.

    See NSpid in proc_pid_status(5). Without a namespace both numbers are the same. Otherwise both rise together, until
    the kernel starts again at the lowest number.
    """
    folder = proc_root / str(pid) / "task"
    if procfs.read_inner_pid(pid, proc_root) == pid:
        return inner_thread if (folder / str(inner_thread)).is_dir() else None
    threads = list_other_threads(pid, proc_root, _MOST_THREADS)[::-1]
    place = bisect.bisect_left(threads, inner_thread, key=lambda thread: procfs.read_inner_pid(thread, folder))
    is_there = place < len(threads) and procfs.read_inner_pid(threads[place], folder) == inner_thread
    return threads[place] if is_there else None


def read_state(pid: int, thread: int, proc_root: Path) -> tuple[str | None, str | None]:
    """Return the state of a thread (a letter of proc_pid_stat(5)) and the kernel function in which it waits."""
    folder = f"{proc_root}/{pid}/task/{thread}"
    fields = pseudo_files.read_or_empty(f"{folder}/stat").rpartition(")")[2].split()
    wchan = pseudo_files.read_or_empty(f"{folder}/wchan").strip()
    return (fields[0] if fields else None), (wchan if wchan not in ("", "0") else None)


def read_path(pid: int, proc_root: Path, thread: int | None = None) -> str | None:
    """Return the path argument of the system call of the main thread (or `thread`); None if the call has none.

    It is absolute, in the mount namespace of the process, if its folder can be read. It is read from the memory of the
    process, so the owner of the process can forge it.
    """
    call = system_calls.read(pid, proc_root, thread)
    index = {"path": 0, "path_at": 1}.get(call.row.on) if call is not None else None
    if call is None or index is None:
        return None
    raw = process_memory.SHARED.read(proc_root / str(pid) / "mem", call.arguments[index], _MOST_PATH_BYTES)
    path = os.fsdecode(raw.partition(b"\0")[0])
    if not path or path.startswith("/"):
        return path or None
    at = call.arguments[0] & _DESCRIPTOR_BITS
    link = f"fd/{at}" if index and at != _AT_FDCWD & _DESCRIPTOR_BITS else "cwd"
    folder = pseudo_files.read_link(proc_root / str(pid) / link)
    return os.path.normpath(f"{folder}/{path}") if folder else path


def _polled(folder: Path, address: int, count: int) -> tuple[int, ...]:
    raw = _memory(folder, address, min(count, MOST_DESCRIPTORS) * _POLLFD.size)
    return tuple(descriptor for descriptor, _, _ in _POLLFD.iter_unpack(raw) if descriptor >= 0)


def _selected(folder: Path, count: int, address: int) -> tuple[int, ...]:
    """Return the descriptors from which select(2) waits to read."""
    raw = _memory(folder, address, (min(count, MOST_DESCRIPTORS) + 63) // 64 * 8)
    return tuple(bit for bit in range(min(count, len(raw) * 8)) if raw[bit // 8] >> bit % 8 & 1)


def _watched(folder: Path, descriptor: int, _: int) -> tuple[int, ...]:
    """Return the descriptors that an epoll instance watches, see proc_pid_fdinfo(5)."""
    rows = pseudo_files.read_or_empty(folder / "fdinfo" / str(descriptor)).splitlines()
    found = [row.split()[1] for row in rows if row.startswith("tfd:")]
    return tuple(int(word) for word in found[:MOST_DESCRIPTORS] if word.isdecimal())


_DESCRIPTORS: dict[str, Callable[[Path, int, int], tuple[int, ...]]] = {
    "descriptor": lambda _folder, descriptor, _: (descriptor,),
    "polled": _polled,
    "selected": _selected,
    "watched": _watched,
}
"""The descriptors of a call by `on` in system_calls.toml, from its folder in /proc and its first two arguments."""


def _memory(folder: Path, address: int, count: int) -> bytes:
    """Return `count` bytes of a process's memory; empty if they cannot be read, which needs the rights of py-spy."""
    if not address or not count:
        return b""
    raw = process_memory.SHARED.read(folder / "mem", address, count)
    return raw[: len(raw) - len(raw) % _POLLFD.size]
