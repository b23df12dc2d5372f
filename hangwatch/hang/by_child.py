"""Whether a process that a rank started, and waits for, waits itself for another rank of the job.

By the kernel's word: who holds the lock of a file, who has the other end of a connection, who may write into a FIFO.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from hangwatch.model import FileLock
from hangwatch.probes import behind_call, file_locks, main_thread, sockets
from hangwatch.probes.sockets import Connection

_MOST_DESCRIPTORS = 16  # of one call


def lock_of_rank(children: Iterable[int], others: Collection[int], proc_root: Path) -> FileLock | None:
    """The lock of a file for which one of the children waits and which one of the `others` holds, pids of ranks."""
    for child in children:
        call = main_thread.read_call(child, proc_root)
        if call is None or call.kind != "locks":
            continue
        lock = file_locks.awaited(child, call.descriptors[0], proc_root)
        if lock is not None and lock.holder_pid in others:
            return replace(lock, by_child=True)
    return None


def receives_from_rank(
    children: Iterable[int],
    others: Collection[int],
    held: Callable[[int], Mapping[int, Connection] | None],
    leads_to_rank: Callable[[Connection], bool],
    proc_root: Path,
) -> bool:
    """Whether one of the children receives from another rank: over a connection, or from what one of `others` writes.

    `held` are the connections of a process by descriptor, and `leads_to_rank` tells which of them lead there.
    """
    return any(_receives(child, others, held(child) or {}, leads_to_rank, proc_root) for child in children)


def _receives(
    child: int,
    others: Collection[int],
    held: Mapping[int, Connection],
    leads_to_rank: Callable[[Connection], bool],
    proc_root: Path,
) -> bool:
    call = main_thread.read_call(child, proc_root)
    if call is None or call.kind != "receives":
        return False
    if any(leads_to_rank(held[one]) for one in call.descriptors if one in held):
        return True
    try:
        every = sockets.descriptors(child, proc_root)
    except OSError:
        return False
    links = {every[one] for one in call.descriptors[:_MOST_DESCRIPTORS] if one in every}
    ways = [link for link in links if link.startswith(("pipe:", "/")) and not link.startswith("/dev/")]
    return any(behind_call.may_write(pid, way, proc_root) for pid, way in itertools.product(others, ways))
