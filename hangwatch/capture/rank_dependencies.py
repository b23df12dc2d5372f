"""Find out if a rank, or a child that it waits for, waits for another rank of the job.

The kernel shows the holder of a file lock, the process at the other end of a connection, and the writers of a FIFO.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.model import AsksRank, FileLock, SystemCall
from hangwatch.probes.network.sockets import Connection, End
from hangwatch.probes.process import blocked_call, file_locks, main_thread

_MOST_CHILDREN = 16  # of one rank
_MOST_DESCRIPTORS = 16  # of one call
_MOST_THREADS = 64
_ANY_HOST = (bytes(4), bytes(16))  # the address of a socket that listens on all addresses of the node


class OtherRanks(NamedTuple):
    """The other ranks of a job on this node, as the rank `rank_pid` sees them.

    `pids` are the pids of all ranks. `ends` are the local ends of their connections and `listening` their listening
    sockets, each with the pid of its rank. A connection to a listening socket counts even before it is accepted.
    Connections to `store_port`, the port of the store, do not count. Three functions take a pid: `connections_of`
    returns the connections of that process by descriptor, `open_files_of` its open files, `writable_files_of` the
    files that it has open for writing.
    """

    rank_pid: int
    pids: Set[int]
    ends: Mapping[End, int]
    listening: Mapping[End, int]
    store_port: int | None
    connections_of: Callable[[int], Mapping[int, Connection] | None]
    open_files_of: Callable[[int], Set[str]]
    writable_files_of: Callable[[int], Set[str]]
    proc_root: Path

    def find_lock(self, children: Iterable[int]) -> FileLock | None:
        """Return a file lock that another rank holds and for which one of the children waits; None if there is none."""
        for child in itertools.islice(children, _MOST_CHILDREN):
            call = main_thread.read_call(child, self.proc_root)
            if call is None or call.kind != "locks":
                continue
            lock = file_locks.find_awaited_lock(child, call.descriptors[0], self.proc_root)
            if lock is not None and lock.holder_pid in self.pids and lock.holder_pid != self.rank_pid:
                return replace(lock, by_child=True)
        return None

    def find_receiver(self, pid: int, call: SystemCall, children: Sequence[int]) -> AsksRank | None:
        """Return the part of process `pid` that receives from another rank; None if no part does.

        The part is the main thread (in `call`), one of the `children`, or another thread. For another thread, only
        a call on a single descriptor counts, because threads of gloo and NCCL watch all their connections.
        """
        if self._receives(pid, call):
            return "main"
        if any(
            self._receives(child, main_thread.read_call(child, self.proc_root)) for child in children[:_MOST_CHILDREN]
        ):
            return "child"
        if call.name != "futex" or pid != self.rank_pid:
            return None
        threads = main_thread.other_threads(pid, self.proc_root, _MOST_THREADS)
        calls = (main_thread.read_call(pid, self.proc_root, thread) for thread in threads)
        about_one = (other_call for other_call in calls if other_call is not None and len(other_call.descriptors) == 1)
        return "thread" if any(self._receives(pid, other_call) for other_call in about_one) else None

    def _receives(self, pid: int, call: SystemCall | None) -> bool:
        """True if a call receives on a connection to another rank, or from a file that another rank writes."""
        if call is None or call.kind != "receives":
            return False
        held = self.connections_of(pid) or {}
        if any(self._leads_there(held[one]) for one in call.descriptors if one in held):
            return True
        links = (blocked_call.link_of(pid, one, self.proc_root) for one in call.descriptors[:_MOST_DESCRIPTORS])
        ways = set(filter(blocked_call.is_pipe_or_path, links))
        return any(
            ways & self.open_files_of(rank) & self.writable_files_of(rank)
            for rank in self.pids
            if ways and rank != self.rank_pid
        )

    def _leads_there(self, connection: Connection) -> bool:
        host, port = connection.remote
        if not connection.is_open or port == self.store_port:
            return False
        hosts = (host, *(_ANY_HOST if host == connection.local[0] else ()))
        found = (self.ends.get(connection.remote), *(self.listening.get((one, port)) for one in hosts))
        return any(rank not in (None, self.rank_pid) for rank in found)
