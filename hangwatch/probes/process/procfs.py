"""One process as /proc shows it: who it is, its state, and what it used so far. See proc_pid_stat(5).

Everything is read directly: that costs next to nothing, and the root of /proc is an argument. Processes that vanish
while they are read are normal and leave no trace. All of the node, again and again: `process_scan`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hangwatch import words
from hangwatch.model import Fault, ProcessId, Value

PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, field 9 of stat
PAGE_BYTES = 4096
_THREADS_ASKED = 64
COMM_CHARACTERS = 15  # TASK_COMM_LEN, without its end


class Counters(Value, frozen=True):
    """What the kernel says of one process at one moment; a field is None where it was not permitted or not there.

    `state` is None when the process does not exist. `cpu_seconds` is user and system time of all threads, `io_bytes`
    rchar + wchar of /proc/PID/io, which system calls moved, `fetched_bytes` its read_bytes, which storage gave, for
    pages of mapped files as well; `wchan` and `kernel_stack` are those of the main thread. `faults` name what was
    denied, with the capability that is missing.
    """

    id: ProcessId | None = None
    comm: str = ""
    state: str | None = None
    cpu_seconds: float | None = None
    io_bytes: int | None = None
    fetched_bytes: int | None = None
    wchan: str | None = None
    kernel_stack: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


def read_counters(pid: int, proc_root: Path = PROC) -> Counters:
    """Read what one process used so far, and where it waits in the kernel. Never raises: what is denied is a fault."""
    root = str(proc_root)
    stat = read_stat(f"{root}/{pid}")
    if stat is None:
        return Counters()
    faults = []
    texts = {}
    for name, capabilities in (
        ("io", "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"),
        ("wchan", "CAP_SYS_PTRACE"),
        ("stack", "CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH and CAP_SYS_ADMIN"),
    ):
        answer = read_start(f"{root}/{pid}/{name}", 16384)
        texts[name] = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else ""
        if isinstance(answer, PermissionError):
            faults.append(denied(pid, f"/proc/{pid}/{name}", f"run hangwatch as root, or grant it {capabilities}"))
    wchan = texts["wchan"].strip()
    return Counters(
        id=ProcessId(pid=pid, start_ticks=stat.start_ticks),
        comm=stat.comm,
        state=stat.state,
        cpu_seconds=stat.cpu_ticks / TICKS_PER_SECOND,
        io_bytes=_parse_io(texts["io"], "rchar", "wchar"),
        fetched_bytes=_parse_io(texts["io"], "read_bytes"),
        wchan=None if wchan in ("", "0") else wchan,
        kernel_stack=tuple(line.partition("] ")[2] or line for line in texts["stack"].splitlines()),
        faults=tuple(faults),
    )


def read_children(pid: int, proc_root: Path = PROC, most: int = 64) -> tuple[int, ...]:
    """The pids of those that a process has started, and of those that these have, at most so many; see proc_pid(5)."""
    found: list[int] = []
    parents = [pid]
    for parent in parents:
        for thread in numbers(f"{proc_root}/{parent}/task")[:_THREADS_ASKED]:
            raw = read_start(f"{proc_root}/{parent}/task/{thread}/children", PAGE_BYTES)
            children = [int(word) for word in raw.split()] if isinstance(raw, bytes) else []
            found += children
            parents += children
            if len(found) >= most:
                return tuple(found[:most])
    return tuple(found)


def read_state(pid: int, proc_root: Path = PROC) -> tuple[ProcessId, str] | None:
    """Who has this pid now, and the state letter of its main thread; None when nobody has."""
    stat = read_stat(f"{proc_root}/{pid}")
    return None if stat is None else (ProcessId(pid=pid, start_ticks=stat.start_ticks), stat.state)


def read_parent(pid: int, proc_root: Path = PROC) -> int | None:
    """The pid of the process that started it, or has taken it over; None when it is gone."""
    stat = read_stat(f"{proc_root}/{pid}")
    return None if stat is None else stat.parent_pid


def read_thread_states(pid: int, proc_root: Path = PROC) -> str:
    """The state letter of every thread of a process, e.g. "SSSD"; empty when it is gone."""
    states = []
    for thread in numbers(f"{proc_root}/{pid}/task"):
        stat = read_stat(f"{proc_root}/{pid}/task/{thread}")
        if stat is not None:
            states.append(stat.state)
    return "".join(states)


def read_thread_count(pid: int, proc_root: Path = PROC) -> int:
    """How many threads a process has, whatever they run; 0 when it is gone."""
    counts = _read_status(pid, proc_root, b"Threads:")
    return int(counts[0]) if counts else 0


def is_stop_pending(pid: int, proc_root: Path = PROC) -> bool:
    """Whether a SIGSTOP was sent that takes hold once the process is next on a core or back from the kernel."""
    masks = _read_status(pid, proc_root, b"SigPnd:", b"ShdPnd:")
    return any(int(mask, 16) >> (signal.SIGSTOP - 1) & 1 for mask in masks)


def read_user_id(pid: int, proc_root: Path = PROC) -> int | None:
    """The real user id of a process in the namespace of the daemon; None when it is gone."""
    ids = read_user_ids(pid, proc_root)
    return ids[0] if ids else None


def read_user_ids(pid: int, proc_root: Path | str = PROC) -> tuple[int, ...]:
    """The real, effective and saved user id of a process in the namespace of the daemon; none when it is gone.

    The folder's owner is root's for every process that may not be dumped.
    """
    words = _read_status(pid, proc_root, b"Uid:")[:3]
    return tuple(map(int, words)) if all(word.isdigit() for word in words) else ()


def read_cgroups(proc_root: Path = PROC) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Every process by pid, with the different paths of its control groups; nothing of those that vanish meanwhile."""
    for pid in map(int, numbers(str(proc_root))):
        raw = read_start(f"{proc_root}/{pid}/cgroup", PAGE_BYTES)
        if isinstance(raw, bytes):
            yield pid, paths_of_cgroups(raw)


def read_inner_pid(pid: int, proc_root: Path = PROC) -> int:
    """The pid by which a process knows itself: the last number of NSpid in /proc/PID/status, else `pid`."""
    numbers = _read_status(pid, proc_root, b"NSpid:")
    return int(numbers[-1]) if numbers else pid


def is_running(program: str, proc_root: Path = PROC) -> bool:
    """Whether any process has the name of this program, of which the kernel keeps 15 characters."""
    comm = program[:COMM_CHARACTERS].encode() + b"\n"
    return any(read_start(f"{proc_root}/{pid}/comm", PAGE_BYTES) == comm for pid in numbers(str(proc_root)))


class Stat(NamedTuple):
    """What is used of the fields of a `stat`; `env_start` is 0 where it may not be seen."""

    pid: int
    comm: str
    state: str
    parent_pid: int
    start_ticks: int
    cpu_ticks: int
    is_kernel_thread: bool
    env_start: int


def denied(pid: int, path: str, remedy: str) -> Fault:
    """What is wrong where a file of a process may not be read."""
    return Fault(subject=f"pid {pid}", reason="PermissionDenied", detail=f"{path} may not be read", remedy=remedy)


def paths_of_cgroups(raw: bytes | OSError) -> tuple[str, ...]:
    """The different paths of /proc/PID/cgroup, see cgroups(7): `11:devices:/slurm/uid_0/job_1`, `0::/user.slice`."""
    lines = raw.decode("utf-8", "replace").splitlines() if isinstance(raw, bytes) else []
    paths = dict.fromkeys(line.split(":", 2)[2] for line in lines if line.count(":") >= 2)
    return tuple(paths)


def _read_status(pid: int, proc_root: Path | str, *names: bytes) -> list[bytes]:
    """The words of these lines of /proc/PID/status; none when the process is gone."""
    raw = read_start(f"{proc_root}/{pid}/status", 8192)
    if not isinstance(raw, bytes):
        return []
    # Searched for, since a status has sixty lines, and splitting them was a fifth of a first scan.
    rests = [rest for name in names for _, found, rest in [(b"\n" + raw).partition(b"\n" + name)] if found]
    return [word for rest in rests for word in rest.partition(b"\n")[0].split()]


def numbers(folder: str) -> list[str]:
    """The names of the processes, or threads, in a folder; none where it is gone."""
    try:
        return [name for name in os.listdir(folder) if name.isdecimal()]  # noqa: PTH208 - 600 names at each scan
    except OSError:
        return []


def read_start(path: str, limit_bytes: int) -> bytes | OSError:
    """The start of a file, or why it could not be read (gone, denied)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error
    try:
        if limit_bytes <= PAGE_BYTES:  # the kernel gives a small file whole; a second read would only say so
            return os.read(descriptor, limit_bytes)
        parts = []
        while limit_bytes > 0 and (part := os.read(descriptor, min(limit_bytes, 65536))):
            parts.append(part)
            limit_bytes -= len(part)
        return b"".join(parts)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)


def read_stat(folder: str) -> Stat | None:
    """The `stat` of the process, or thread, with this folder; None when it is gone."""
    raw = read_start(f"{folder}/stat", PAGE_BYTES)
    return _parse_stat(raw) if isinstance(raw, bytes) else None


def _parse_stat(raw: bytes) -> Stat | None:
    """Fields by their number in proc_pid_stat(5); the comm may hold anything, closing brackets too."""
    left, right = raw.find(b"("), raw.rfind(b")")
    fields = raw[right + 2 :].split()
    if left < 0 or len(fields) < 20:
        return None
    try:
        return Stat(
            pid=int(raw[:left]),
            comm=printable(raw[left + 1 : right]),
            state=fields[0].decode("ascii"),
            parent_pid=int(fields[1]),
            start_ticks=int(fields[19]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            is_kernel_thread=bool(int(fields[6]) & _KERNEL_THREAD),
            env_start=int(fields[47]) if len(fields) > 47 else 0,
        )
    except ValueError:
        return None


def _parse_io(text: str, *names: str) -> int | None:
    counters = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    try:
        return sum(int(counters[name]) for name in names)
    except (KeyError, ValueError):
        return None


def printable(raw: bytes) -> str:
    """Text of another process, safe to show."""
    return words.printable(raw.decode("utf-8", "replace"))
