"""The user, groups and start of a process, read at one moment, so that a child acts with exactly these rights.

A process may change its user at any time, by execve(2) of a setuid program for example. So a child never asks for
rights itself: they are in its request, and hold only while the process still has them.
"""

import os
from pathlib import Path

from hangwatch.model import ProcessId, Value
from hangwatch.probes.base import procfs, pseudo_files

_MOST_BYTES = 1 << 20  # 65,536 groups, the limit of the kernel


class Credentials(Value, frozen=True):
    """The rights of a process. Its real, effective, saved and file-system ids are the same."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    start_ticks: int


def read_credentials(pid: int) -> Credentials | None:
    """Return the rights of a process. None if it has ended, or if its ids differ, as those of a setuid program do."""
    raw = pseudo_files.read_start(f"{procfs.PROC}/{pid}/status", _MOST_BYTES)
    stat = procfs.read_stat(f"{procfs.PROC}/{pid}")
    if not isinstance(raw, bytes) or stat is None:
        return None
    rows = dict(line.split(b":", 1) for line in raw.splitlines() if b":" in line)
    uids, gids, groups = (tuple(map(int, rows.get(name, b"").split())) for name in (b"Uid", b"Gid", b"Groups"))
    if len(set(uids)) != 1 or len(set(gids)) != 1:
        return None
    return Credentials(uid=uids[0], gid=gids[0], groups=groups, start_ticks=stat.start_ticks)


def read_only_user(process: ProcessId, proc_root: Path = procfs.PROC) -> int | None:
    """Return the user of a process. None if it has ended, or if its real, effective and other user ids differ."""
    uids = set(procfs.read_user_ids(process.pid, proc_root))
    return uids.pop() if len(uids) == 1 and procfs.is_alive(process, proc_root) else None


def take_rights(uid: int, gid: int, groups: tuple[int, ...]) -> None:
    """Become this user for good. Raises OSError if that is not permitted."""
    if os.geteuid() == 0:
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
