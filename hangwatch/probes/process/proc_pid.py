"""Read limits, open files, rights, variables and libraries of a process from /proc/PID.

Each answer is a value, None (the process is gone), or a Fault (it may not be read). See proc(5).
"""

import math
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from hangwatch.model import Fault, ProcessId, Value
from hangwatch.probes.base import procfs, pseudo_files
from hangwatch.probes.process import environment, locked_memory
from hangwatch.probes.process.locked_memory import Target


class FileLimit(Value, frozen=True):
    """The row `Max open files` of a process; inf means unlimited."""

    soft: float
    hard: float


def file_limit(proc_root: Path, pid: int) -> FileLimit | Fault | None:
    """Return the open-file limits of a process, from /proc/PID/limits."""
    text = pseudo_files.read(proc_root / str(pid) / "limits", f"pid {pid}")
    return parse_file_limit(text, f"pid {pid}") if isinstance(text, str) else text


def parse_file_limit(text: str, subject: str) -> FileLimit | Fault:
    """Parse the row `Max open files` of /proc/PID/limits, e.g. `Max open files 1024 524288 files`."""
    for line in text.splitlines():
        if line.startswith("Max open files"):
            fields = line[len("Max open files") :].split()
            if len(fields) >= 2 and all(word == "unlimited" or word.isdecimal() for word in fields[:2]):
                soft, hard = (math.inf if word == "unlimited" else float(word) for word in fields[:2])
                return FileLimit(soft=soft, hard=hard)
    return Fault(subject=subject, reason="UnreadableLimits", detail="/proc/PID/limits has no row `Max open files`")


def open_files(proc_root: Path, pid: int) -> int | Fault | None:
    """Return the number of open files of a process. Since Linux 6.2 it is the size of the folder /proc/PID/fd."""
    folder = proc_root / str(pid) / "fd"
    try:
        listed = folder.stat().st_size if proc_root == Path("/proc") else 0
        return listed or sum(1 for _ in os.scandir(folder))
    except OSError as error:
        return pseudo_files.fault_of(error, f"pid {pid}", str(folder))


def status(proc_root: Path, pid: int | str) -> dict[str, str] | Fault | None:
    """Return the rows of /proc/PID/status by name, e.g. `CapEff`, `Seccomp`."""
    text = pseudo_files.read(proc_root / str(pid) / "status", f"pid {pid}")
    if not isinstance(text, str):
        return text
    rows = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in rows if value}


def variables(proc_root: Path, pid: int, wanted: Collection[str]) -> dict[str, str] | Fault | None:
    """Return the wanted variables of the environment with which a process was started, see `process/environment`."""
    folder = f"{proc_root}/{pid}"

    def read(_: ProcessId) -> dict[str, str] | Fault | None:
        try:
            return environment.read(folder, wanted).variables
        except OSError as error:
            return pseudo_files.fault_of(error, f"pid {pid}", f"{folder}/environ")

    return locked_memory.SHARED.read_one(_target(proc_root, pid), read)


class MappedFile(NamedTuple):
    """A row of /proc/PID/maps with a file: its path, and the offset of the mapped part in bytes."""

    path: str
    offset: int


def map_rows(proc_root: Path, pid: int) -> tuple[MappedFile, ...] | Fault | None:
    """Return the mapped files of a process in the order of addresses, see proc_pid_maps(5)."""
    path = proc_root / str(pid) / "maps"
    text = locked_memory.SHARED.read_one(
        _target(proc_root, pid), lambda _: pseudo_files.read(path, f"pid {pid}", limit_bytes=16 << 20)
    )
    if not isinstance(text, str):
        return text
    rows = (line.split(None, 5) for line in text.splitlines() if "/" in line)
    return tuple(MappedFile(row[5].removesuffix(" (deleted)"), int(row[2], 16)) for row in rows if len(row) == 6)


def mapped_files(proc_root: Path, pid: int, pattern: re.Pattern[str]) -> tuple[str, ...] | Fault | None:
    """Return the paths of mapped files (libraries) that match `pattern`, each once, in the order of addresses."""
    rows = map_rows(proc_root, pid)
    if not isinstance(rows, tuple):
        return rows
    return tuple(dict.fromkeys(row.path for row in rows if pattern.search(row.path)))


def _target(proc_root: Path, pid: int) -> Target:
    now = procfs.read_state(pid, proc_root)
    return Target(now[0] if now else ProcessId(pid=pid, start_ticks=-1), f"uid {procfs.read_user_id(pid, proc_root)}")
