"""Whether a process that a rank started, and waits for, waits itself for another rank of the job.

By the kernel's word: who holds the lock of a file, who has the other end of a connection, who may write into a FIFO.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from msgspec.structs import replace

from hangwatch.model import FileLock
from hangwatch.probes import behind_call, file_locks, main_thread

_MOST_CHILDREN = 16  # of one rank
_MOST_DESCRIPTORS = 16  # of one call


def lock_of_rank(children: Iterable[int], others: Collection[int], proc_root: Path) -> FileLock | None:
    """The lock of a file for which one of the children waits and which one of the `others` holds, pids of ranks."""
    for child in itertools.islice(children, _MOST_CHILDREN):
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
    leads_to_rank: Callable[[int, Collection[int]], bool],
    written: Callable[[int], Collection[str]],
    proc_root: Path,
) -> bool:
    """Whether one of the children receives from another rank: over a connection, or from what one of `others` writes.

    `leads_to_rank` tells whether one of these descriptors of a process is such a connection, and `written` what a
    process has open for writing.
    """
    ways: set[str] = set()
    for child in itertools.islice(children, _MOST_CHILDREN):
        call = main_thread.read_call(child, proc_root)
        if call is None or call.kind != "receives":
            continue
        if leads_to_rank(child, call.descriptors):
            return True
        links = (behind_call.link_of(child, one, proc_root) for one in call.descriptors[:_MOST_DESCRIPTORS])
        ways.update(link for link in links if behind_call.is_way(link))
    return bool(ways) and any(not ways.isdisjoint(written(pid)) for pid in others)
