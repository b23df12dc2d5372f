"""For which lock of a file a process waits, and who holds it: /proc/locks, see proc_locks(5).

Nothing is opened but /proc, so a file system that gives no answer holds nobody up.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hangwatch import words
from hangwatch.model import FileLock
from hangwatch.probes import pseudo_files
from hangwatch.probes.network import sockets
from hangwatch.probes.process import proc_pid, procfs

_MOST_BYTES = 1 << 20
_MOST_PATH_CHARACTERS = 200


def awaited(pid: int, descriptor: int, proc_root: Path) -> FileLock | None:
    """The lock for which a process waits in flock(2) or fcntl(2) on this descriptor; None where it is none of a file.

    No holder is told where it has ended and left the lock to a process that it started (/proc/locks leaves out who
    has no pid), where another node holds it (NFS), and for locks of open file descriptions.
    """
    try:
        path = str((proc_root / str(pid) / "fd" / str(descriptor)).readlink())
    except OSError:
        return None
    shown = words.elided(path, _MOST_PATH_CHARACTERS)
    holder = _holder(pid, proc_root)
    if holder is None:
        return FileLock(path=shown)
    comm = procfs.read_counters(holder, proc_root).comm
    if not comm or not _may_hold(holder, pid, path, proc_root):
        return FileLock(path=shown)
    return FileLock(path=shown, holder_pid=holder, holder_comm=words.printable(comm))


def _may_hold(holder: int, pid: int, path: str, proc_root: Path) -> bool:
    """Whether a process has this file open, as far as its paths are those of the waiting one; pids are used again."""
    if proc_pid.namespace(proc_root, holder, "mnt") != proc_pid.namespace(proc_root, pid, "mnt"):
        return True
    try:
        return path in sockets.descriptors(holder, proc_root).values()
    except OSError:
        return False


def _holder(pid: int, proc_root: Path) -> int | None:
    """Who holds the lock behind which this process is listed; the line before those of its waiters is the holder's."""
    text = pseudo_files.read(proc_root / "locks", "locks", _MOST_BYTES)
    holder: Sequence[str] = ()
    for line in text.splitlines() if isinstance(text, str) else ():
        fields = line.split()
        if len(fields) > 1 and fields[1] != "->":
            holder = fields
        elif len(fields) > 5 and fields[5] == str(pid) and holder[:1] == fields[:1]:
            return _pid(holder)
    return None


def _pid(fields: Sequence[str]) -> int | None:
    word = fields[4] if len(fields) > 4 else ""
    return int(word) if word.isdecimal() and int(word) > 0 else None
