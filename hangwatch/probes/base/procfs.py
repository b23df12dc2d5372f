"""Read a process from /proc: its identity, its state, and its counters. See proc_pid_stat(5).

The files are read directly, which is cheap, and the root of /proc is an argument. A process that ends while it is read
is normal, and no error is raised. `process_scan` reads all processes of the node.
"""

import functools
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from hangwatch import words
from hangwatch.model import Fault, ProcessId, Value
from hangwatch.probes.base.pseudo_files import PAGE_BYTES, read_link, read_start

PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, field 9 of stat
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_THREADS_ASKED = 64
FRAMEWORK_MAPPED_BYTES = 300 << 20  # torch 2.13 without CUDA maps 627 MiB, a plain Python less than this
COMM_CHARACTERS = 15  # TASK_COMM_LEN without the final NUL


class Counters(Value, frozen=True):
    """The counters of a process at one moment. A value is None if its file was denied or does not exist.

    `state` is None if the process does not exist. `cpu_seconds` is user and system time of all threads. `io_bytes` is
    rchar + wchar of /proc/PID/io: the bytes that system calls moved. `fetched_bytes` is read_bytes of the same file:
    the bytes from storage, which includes pages of mapped files. `wchan` and `kernel_stack` are those of the main
    thread. `faults` list the denied files with the missing capability.
    """

    id: ProcessId | None = None
    state: str | None = None
    cpu_seconds: float | None = None
    io_bytes: int | None = None
    fetched_bytes: int | None = None
    wchan: str | None = None
    kernel_stack: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


def read_counters(pid: int, proc_root: Path = PROC) -> Counters:
    """Read the counters of a process, and where it waits in the kernel. Never raises: a denied file is a fault."""
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
        state=stat.state,
        cpu_seconds=stat.cpu_ticks / TICKS_PER_SECOND,
        io_bytes=parse_io(texts["io"], "rchar", "wchar"),
        fetched_bytes=parse_io(texts["io"], "read_bytes"),
        wchan=None if wchan in ("", "0") else wchan,
        kernel_stack=tuple(line.partition("] ")[2] or line for line in texts["stack"].splitlines()),
        faults=tuple(faults),
    )


def read_children(pid: int, proc_root: Path = PROC, most: int = 64) -> tuple[int, ...]:
    """Return the pids of at most `most` descendants; see proc_pid_children(5)."""
    descendants: list[int] = []
    parents = [pid]
    for parent in parents:
        for thread in list_pids(f"{proc_root}/{parent}/task")[:_THREADS_ASKED]:
            raw = read_start(f"{proc_root}/{parent}/task/{thread}/children", PAGE_BYTES)
            children = [int(word) for word in raw.split()] if isinstance(raw, bytes) else []
            descendants += children
            parents += children
            if len(descendants) >= most:
                return tuple(descendants[:most])
    return tuple(descendants)


def read_state(pid: int, proc_root: Path = PROC) -> tuple[ProcessId, str] | None:
    """Return the process that has this pid now, and the state letter of its main thread; None if there is none."""
    stat = read_stat(f"{proc_root}/{pid}")
    return None if stat is None else (ProcessId(pid=pid, start_ticks=stat.start_ticks), stat.state)


def is_alive(process: ProcessId, proc_root: Path = PROC) -> bool:
    """True if this process exists. Another process with the same pid does not count."""
    state = read_state(process.pid, proc_root)
    return state is not None and state[0] == process


def read_comm(pid: int, proc_root: Path = PROC) -> str:
    """Return the name of a process with escapes for control characters; empty if it has ended."""
    stat = read_stat(f"{proc_root}/{pid}")
    return "" if stat is None else stat.comm


def read_parent(pid: int, proc_root: Path = PROC) -> int | None:
    """Return the pid of the parent process; None if the process has ended."""
    stat = read_stat(f"{proc_root}/{pid}")
    return None if stat is None else stat.parent_pid


def read_thread_states(pid: int, proc_root: Path = PROC) -> str:
    """Return the state letters of all threads of a process, e.g. "SSSD"; empty if it has ended."""
    tasks = f"{proc_root}/{pid}/task"
    stats = (read_stat(f"{tasks}/{thread}") for thread in list_pids(tasks))
    return "".join(stat.state for stat in stats if stat is not None)


def read_thread_count(pid: int, proc_root: Path = PROC) -> int:
    """Return the number of threads of a process; 0 if it has ended."""
    return int(next(iter(_read_status(pid, proc_root, b"Threads:")), 0))


def read_swap_bytes(pid: int, proc_root: Path = PROC) -> int | None:
    """Return the memory of a process that is in swap; None if it has ended."""
    words_of_row = _read_status(pid, proc_root, b"VmSwap:")
    return int(words_of_row[0]) * 1024 if words_of_row and words_of_row[0].isdigit() else None


def is_stop_pending(pid: int, proc_root: Path = PROC) -> bool:
    """True if a SIGSTOP is pending. It takes effect when the process runs on a core or leaves the kernel."""
    masks = _read_status(pid, proc_root, b"SigPnd:", b"ShdPnd:")
    return any(int(mask, 16) >> (signal.SIGSTOP - 1) & 1 for mask in masks)


def catches_alarm(pid: int, proc_root: Path = PROC) -> bool:
    """True if a process catches SIGALRM: a timer may end its calls."""
    return any(int(mask, 16) >> (signal.SIGALRM - 1) & 1 for mask in _read_status(pid, proc_root, b"SigCgt:"))


def read_user_id(pid: int, proc_root: Path = PROC) -> int | None:
    """Return the real user id of a process in the daemon's user namespace; None if it has ended."""
    return next(iter(read_user_ids(pid, proc_root)), None)


def read_user_ids(pid: int, proc_root: Path | str = PROC) -> tuple[int, ...]:
    """Return the real, effective and saved user id of a process in the daemon's user namespace; empty if it has ended.

    The owner of /proc/PID is not a substitute: it is root for every process that may not be dumped.
    """
    words = _read_status(pid, proc_root, b"Uid:")[:3]
    return tuple(map(int, words)) if all(word.isdigit() for word in words) else ()


def read_tracer(pid: int, proc_root: Path | str = PROC) -> int | None:
    """Return the pid of the process that traces a process, see ptrace(2); None if there is no tracer."""
    number = next(iter(_read_status(pid, proc_root, b"TracerPid:")), b"0")
    return int(number) or None if number.isdigit() else None


def read_inner_pid(pid: int, proc_root: Path = PROC) -> int:
    """Return the pid of a process in its own PID namespace: the last NSpid in /proc/PID/status, else `pid`."""
    return int(next(reversed(_read_status(pid, proc_root, b"NSpid:")), pid))


def find_by_name(programs: Collection[str], proc_root: Path = PROC) -> Iterator[tuple[int, str]]:
    """Yield the pid and the comm of each process of these programs. The kernel keeps only the first 15 characters."""
    comms = {program[:COMM_CHARACTERS].encode() for program in programs}
    for name in list_pids(str(proc_root)):
        raw = read_start(f"{proc_root}/{name}/comm", PAGE_BYTES)
        if isinstance(raw, bytes) and raw.rstrip(b"\n") in comms:
            yield int(name), printable(raw.rstrip(b"\n"))


class Stat(NamedTuple):
    """The fields of a `stat` file that hangwatch uses. `env_start` and `environ_bytes` are 0 if they may not be read.

    `content_hash` is the hash of the whole file, 64 bits with a random key: an idle process keeps it.
    """

    pid: int
    comm: str
    state: str
    parent_pid: int
    start_ticks: int
    cpu_ticks: int
    is_kernel_thread: bool
    resident_bytes: int
    env_start: int
    environ_bytes: int
    content_hash: int


def denied(pid: int, path: str, remedy: str) -> Fault:
    """Return the fault for a file of a process that may not be read."""
    return Fault(subject=f"pid {pid}", reason="PermissionDenied", detail=f"{path} may not be read", remedy=remedy)


def paths_of_cgroups(raw: bytes) -> tuple[str, ...]:
    """Return the distinct paths in /proc/PID/cgroup, which has lines such as `11:devices:/slurm/job_1`; cgroups(7)."""
    lines = raw.decode("utf-8", "replace").splitlines()
    return tuple(dict.fromkeys(line.split(":", 2)[2] for line in lines if line.count(":") >= 2))


def _read_status(pid: int, proc_root: Path | str, *names: bytes) -> list[bytes]:
    """Return the words after `names` in /proc/PID/status; empty if the process has ended."""
    raw = read_start(f"{proc_root}/{pid}/status", 8192)
    if not isinstance(raw, bytes):
        return []
    # Searched, because splitting the sixty lines of the file took a fifth of the time of a first scan.
    rests = [rest for name in names for _, found, rest in [(b"\n" + raw).partition(b"\n" + name)] if found]
    return [word for rest in rests for word in rest.partition(b"\n")[0].split()]


def list_pids(folder: str) -> list[str]:
    """Return the names of the processes or threads in a folder; empty if the folder does not exist."""
    try:
        return [name for name in os.listdir(folder) if name.isdecimal()]  # noqa: PTH208 - 600 names at each scan
    except OSError:
        return []


def read_stat(folder: str) -> Stat | None:
    """Return the `stat` of the process or thread with this folder; None if it has ended."""
    raw = read_start(f"{folder}/stat", PAGE_BYTES)
    return parse_stat(raw) if isinstance(raw, bytes) else None


def read_mapped_bytes(pid: int, proc_root: Path | str) -> int:
    """Return the size of the address space, see proc_pid_statm(5); 0 if unknown. Unlike `maps` it takes no lock."""
    raw = read_start(f"{proc_root}/{pid}/statm", PAGE_BYTES)
    fields = raw.split() if isinstance(raw, bytes) else []
    return int(fields[0]) * PAGE_BYTES if fields else 0


def parse_stat(raw: bytes) -> Stat | None:
    """Parse fields by their number in proc_pid_stat(5). The comm may contain any byte, also closing brackets."""
    comm_start, comm_end = raw.find(b"("), raw.rfind(b")")
    fields = raw[comm_end + 2 :].split()
    if comm_start < 0 or len(fields) < 22:
        return None
    try:
        return Stat(
            pid=int(raw[:comm_start]),
            comm=_printable_comm(raw[comm_start + 1 : comm_end]),
            # The state of the main thread. If only that has ended, see pthread_exit(3), others may run or sleep.
            state=fields[0].decode("ascii") if int(fields[17]) < 2 else fields[0].replace(b"Z", b"S").decode("ascii"),
            parent_pid=int(fields[1]),
            start_ticks=int(fields[19]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            is_kernel_thread=bool(int(fields[6]) & _KERNEL_THREAD),
            resident_bytes=int(fields[21]) * PAGE_BYTES,
            env_start=int(fields[47]) if len(fields) > 47 else 0,
            environ_bytes=int(fields[48]) - int(fields[47]) if len(fields) > 48 else 0,
            content_hash=hash(raw),
        )
    except ValueError:
        return None


def namespace(proc_root: Path, pid: int | str, kind: str) -> str | None:
    """Return the name of a namespace of a process, e.g. `net:[4026531840]`; None if unknown."""
    return read_link(f"{proc_root}/{pid}/ns/{kind}") or None


def sees_all_pids(proc_root: Path) -> bool:
    """True if this process is in the initial pid namespace, in which pids are those of the kernel and its drivers."""
    return namespace(proc_root, "self", "pid") == _INITIAL_PID_NAMESPACE


def parse_io(text: str, *names: str) -> int | None:
    """Return the sum of these counters of proc_pid_io(5); None if one is missing."""
    counters = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    try:
        return sum(int(counters[name]) for name in names)
    except (KeyError, ValueError):
        return None


def printable(raw: bytes) -> str:
    """Return text of another process with escapes for control characters, so that it is safe to show."""
    return words.printable(raw.decode("utf-8", "replace"))


_printable_comm = functools.lru_cache(maxsize=256)(printable)  # at most 64 bytes each; many processes share a few
