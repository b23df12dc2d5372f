"""Find the file lock that a process waits for, and its holder: /proc/locks, see proc_locks(5).

Only /proc is opened, so a file system that does not respond blocks nothing.
"""

import itertools
from collections.abc import Container, Sequence
from pathlib import Path

from hangwatch import words
from hangwatch.limits import LONGEST_PATH
from hangwatch.model import FileLock
from hangwatch.probes.base import procfs, pseudo_files
from hangwatch.probes.network import sockets

_MOST_BYTES = 1 << 20
_MOST_DESCRIPTORS = 256


def find_awaited_lock(pid: int, descriptor: int, proc_root: Path) -> FileLock | None:
    """Return the lock that a process waits for in flock(2) or fcntl(2) on this descriptor; None if unknown.

    The holder is unknown in three cases. It has ended, and its child inherited the lock: /proc/locks omits locks
    without a pid. It is on another node (NFS). Or the lock belongs to an open file description.
    """
    path = pseudo_files.read_link(f"{proc_root}/{pid}/fd/{descriptor}")
    if not path:
        return None
    holder = _holder(pid, proc_root)
    held = None if holder is None else _held_by(holder, pid, path, proc_root)
    return held or FileLock(path=words.elided(path, LONGEST_PATH))


def find_polled_lock(pid: int, proc_root: Path, ranks: Container[int] | None = None) -> FileLock | None:
    """Return the lock of another process on a file that this process has open; None if there is none, or several.

    The process may try to take that lock again and again. It then never waits in the kernel for the lock. No file is
    touched: proc_pid_fdinfo(5) shows the inode since Linux 5.14. With `ranks`, only their exclusive locks count.
    """
    holders: dict[str, int] = {}
    lines = pseudo_files.read_or_empty(proc_root / "locks", _MOST_BYTES).splitlines()
    for fields in map(str.split, lines):
        holder = _pid(fields) if len(fields) > 5 and fields[1] != "->" else None
        if holder not in (None, pid) and (ranks is None or (holder in ranks and fields[3] == "WRITE")):
            holders[fields[5].rpartition(":")[2]] = holder
    lock_by_path: dict[str, FileLock | None] = {}
    links = (sockets.descriptors(pid, proc_root) if holders else None) or {}
    for number, path in itertools.islice(links.items(), _MOST_DESCRIPTORS):
        if not path.startswith("/") or path.startswith("/dev/"):
            continue
        rows = pseudo_files.read_or_empty(proc_root / str(pid) / "fdinfo" / str(number)).splitlines()
        inode = next((row.split()[-1] for row in rows if row.startswith("ino:")), "")
        if (holder := holders.get(inode)) is not None:
            lock_by_path[path] = _held_by(holder, pid, path, proc_root)
    locks = [lock for lock in lock_by_path.values() if lock is not None]
    return locks[0] if len(locks) == 1 else None


def _held_by(holder: int, pid: int, path: str, proc_root: Path) -> FileLock | None:
    """Return the lock on a file with its holder; None if that process cannot hold it."""
    comm = procfs.read_comm(holder, proc_root)
    if not comm or not _may_hold(holder, pid, path, proc_root):
        return None
    return FileLock(path=words.elided(path, LONGEST_PATH), holder_pid=holder, holder_comm=comm)


def _may_hold(holder: int, pid: int, path: str, proc_root: Path) -> bool:
    """True if process `holder` has this file open. This guards against reused pids.

    Also true if `holder` and `pid` are in different mount namespaces: then the paths cannot be compared.
    """
    if procfs.namespace(proc_root, holder, "mnt") != procfs.namespace(proc_root, pid, "mnt"):
        return True
    return path in (sockets.descriptors(holder, proc_root) or {}).values()


def _holder(pid: int, proc_root: Path) -> int | None:
    """Return the pid of the holder of the lock that this process waits for; None if unknown.

    In /proc/locks the line of the holder precedes those of the waiting processes.
    """
    holder: Sequence[str] = ()
    for line in pseudo_files.read_or_empty(proc_root / "locks", _MOST_BYTES).splitlines():
        fields = line.split()
        if len(fields) > 1 and fields[1] != "->":
            holder = fields
        elif len(fields) > 5 and fields[5] == str(pid) and holder[:1] == fields[:1]:
            return _pid(holder)
    return None


def _pid(fields: Sequence[str]) -> int | None:
    word = fields[4] if len(fields) > 4 else ""
    return int(word) if word.isdecimal() and int(word) > 0 else None
