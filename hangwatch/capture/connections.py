"""Read the connections of a job's processes: carried bytes, other ranks, locks, and the store of the job.

The kernel reports all facts. They are read once in each round and within limits. No process is contacted. A fact
that hangwatch has no permission to read is None.
"""

import itertools
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec.structs import replace

from hangwatch import words
from hangwatch.capture.job_sockets import JobSockets
from hangwatch.capture.wait_chains import WaitChains
from hangwatch.jobs import process_role
from hangwatch.limits import LONGEST_PATH
from hangwatch.model import (
    BLOCKED_STATES,
    CallObject,
    FileLock,
    Job,
    ProcessDump,
    ProcessId,
    Store,
    SystemCall,
    Thread,
    Traffic,
    Waits,
    is_loopback,
)
from hangwatch.probes.base import filesystems, procfs, system_calls
from hangwatch.probes.network import interfaces, sockets
from hangwatch.probes.network.sockets import Connection
from hangwatch.probes.process import blocked_call, main_thread, shared_locks
from hangwatch.stacks import process_activity

# For reading shared memory regions in one round; a busy node delays the thread
_CPU_SECONDS = 1.0
_MOST_CHILDREN = 64
_OF_MEMORY_OR_DEVICE = ("/dev/", "/memfd:")
_OBJECTS: dict[str, CallObject] = {"child": "child", "path": "file", "path_at": "file"}
_MOST_ENDPOINT_CHARACTERS = 80
# Ranks with a search for ancestors: all ranks of a job on one node have similar ancestors
_MOST_PARENTS = 16
_MOST_REGIONS = 1 << 16  # of shared memory, over all ranks: about 300 bytes each


_Held: TypeAlias = dict[int, Connection]
"""The connections of a process by descriptor."""

_NO_CALL = SystemCall(number=-1)
"""Stands for the call of a process that is in no call, or in a call that may not be read: it waits for nothing."""


class _Counted:
    """Bytes carried by the connections of one process, including connections that were closed meanwhile."""

    def __init__(self) -> None:
        self._before: dict[int, int] | None = None
        self._total = 0

    def total(self, held: Iterable[Connection], wanted: Collection[int] | None = None) -> int:
        """Return the bytes carried since the first call by connections with an inode in `wanted`; None counts all."""
        now = {connection.inode: connection.carried_bytes or 0 for connection in held}
        if self._before is not None:
            grown = {inode: max(0, count - self._before.get(inode, 0)) for inode, count in now.items()}
            self._total += sum(grown[inode] for inode in (grown if wanted is None else grown.keys() & wanted))
        self._before = now
        return self._total


class JobConnections:
    """The connections of a job's processes during one capture. They are read again in each round."""

    def __init__(
        self, job: Job, targets: Sequence[ProcessId], proc_root: Path, sys_root: Path, search_seconds: float
    ) -> None:
        self._root, self._sys_root = proc_root, sys_root
        self._job = JobSockets(job, targets, proc_root, search_seconds)
        self._chains = WaitChains(self._job, {})
        self.waits_for, self.find_awaited = self._chains.waits_for, self._chains.find_awaited
        address, port = process_role.rendezvous(job.environ)
        self._is_store_on_loopback = is_loopback(address)
        self._store_endpoint = words.elided(f"{address}:{port}", _MOST_ENDPOINT_CHARACTERS)
        self._counted: dict[tuple[int, str], _Counted] = {}
        self._bytes_at_first: dict[int, int | None] = {}
        self._used: set[int] = set()

    def begin_round(self) -> None:
        """Read the connections of every network namespace of the job, and the processes that hold them."""
        job = self._job
        self._shared: dict[int, shared_locks.Regions] = {}
        self._shared_seconds = 0.0
        job.begin_round()
        self._is_partial = any(job.is_alive(rank) for rank in job.ranks - job.sockets.keys())
        self._of_one_node = self._addresses_of_one_node() if job.has_ranks_on_other_nodes else frozenset()
        self._servers = {} if job.has_ranks_on_other_nodes else self._find_servers()
        self._job_server = next(filter(job.is_of_job, self._servers), None)

    def _find_servers(self) -> dict[int, frozenset[str]]:
        """Return the ranks and ancestors that wait for clients, with the far ends of their pipes and Unix sockets."""
        job = self._job
        ranks = [pid for pid, rank in job.rank_of.items() if pid == rank]
        above = dict.fromkeys(itertools.chain.from_iterable(map(job.ancestors, ranks[:_MOST_PARENTS])))
        calls = ((pid, job.read_call(pid)) for pid in (*ranks, *above) if job.read_process(pid))
        return {
            pid: job.far_ends(job.open_files(pid))
            for pid, call in calls
            if call is not None and self._chains.awaits_clients(pid, call)
        }

    def add_connections(self, pid: int, dump: ProcessDump, threads: Sequence[Thread] = ()) -> ProcessDump:
        """Return the dump of process `pid` with its traffic and waits. `main` and `state` must be set before.

        `threads` are those with a Python stack.
        """
        main, call, held = dump.main, dump.main.call or _NO_CALL, self._job.connections_of(pid)
        thread = None if main.awaited_thread is None else main.awaited_thread.id
        server = self._server(pid, call)
        at_lock = call.name == "futex"
        sharing = self._find_sharing(pid, thread) if at_lock else frozenset[int]()
        chain = self._chains.follow(
            pid, call, threads, server, sharing, awaits_any=thread is None and process_activity.awaits_thread(threads)
        )
        children_bytes, children_cpu = self._measure(chain.processes)
        peers, active_peers = (None, None)
        if held is not None and (main.call is not None or dump.state == "R"):
            is_apart = bool(chain.processes) or server not in (None, pid)
            peers, active_peers = self._peers(pid, call, held, is_apart=is_apart)
        device_bytes, dirty_bytes = self._written(pid, thread, dump.state, call)
        objects = {held[number].inode for number in call.descriptors[:1] if held and number in held}
        chained = replace(call, object=self._object(pid, call, chain.file_lock), workers=chain.workers)
        return replace(
            dump,
            main=replace(
                main,
                call=main.call and chained,
                device_bytes=device_bytes,
                dirty_bytes=dirty_bytes,
                thread_in_file=at_lock and self._has_thread_in_file(pid),
            ),
            traffic=Traffic(
                socket_bytes=self._carried(pid, held),
                rank_bytes=None if self._is_partial else self._carried(pid, held, "ranks", self._to_ranks(pid, held)),
                object_bytes=self._carried(pid, held, "object", objects),
                children_bytes=children_bytes,
                children_cpu_seconds=children_cpu,
            ),
            waits=Waits(
                awaited=chain.awaited,
                peers=peers,
                active_peers=active_peers,
                server=server,
                job_server=self._job_server,
                store=self._store(call, held),
                awaits_store=self._awaits_store(pid, call, held),
                enclosed_at=self._enclosed_at(pid, held),
                stuck_on=self._stuck_on(pid, call),
                file_lock=chain.file_lock,
                asks_rank=chain.asks_rank,
                shares_lock=not sharing.isdisjoint(self._job.ranks),
            ),
        )

    def _measure(self, processes: Sequence[int]) -> tuple[int | None, float | None]:
        """Return the bytes and the CPU seconds of these processes, except of those that are dumped.

        The seconds in which their main threads waited for a core count, too: on a busy node these are most of them.
        """
        strangers = [one for one in processes if one not in self._job.dumped]
        counters = [procfs.read_counters(one, self._root) for one in strangers]
        carried = [self._carried(one, self._job.connections_of(one)) or 0 for one in strangers]
        if not counters:
            return None, None
        threads = (main_thread.read_counters(one, self._root) for one in strangers)
        delays = (thread.delay_seconds or 0.0 for thread in threads if thread is not None)
        used_seconds = sum(one.cpu_seconds or 0.0 for one in counters) + sum(delays)
        return sum(one.io_bytes or 0 for one in counters) + sum(carried), used_seconds

    def _object(self, pid: int, call: SystemCall, lock: FileLock | None) -> CallObject | None:
        """Return the kind of the object that a call waits for, see `find_object`."""
        descriptor = next(iter(call.descriptors), -1)
        link = next(self._job.links(pid, call.descriptors[:1]), "")
        held = self._job.connections_of(pid) or {}
        connection, unix = held.get(descriptor), self._job.unix_socket(pid, descriptor)
        is_own = (
            (lock is not None and lock.holder_pid == pid)
            or (link.startswith("pipe:") and self._job.holds_twice(pid, link))
            or (connection is not None and connection.remote in {one.local for one in held.values()})
            or (unix is not None and unix.peer in self._job.sockets[pid].values())
        )
        return find_object(call, link, is_own=is_own)

    def _find_sharing(self, pid: int, thread: int | None) -> frozenset[int]:
        """Return the other ranks and own workers that map the memory of the awaited lock: each of them may hold it."""
        job = self._job
        address = shared_locks.awaited_address(pid, self._root, thread) if job.rank_of.get(pid) == pid else None
        place = None if address is None else shared_locks.region_at(address, self._regions(pid))
        if place is None:
            return frozenset()
        near = {other for other, rank in job.rank_of.items() if rank in (pid, other)}
        return frozenset(other for other in near - {pid} if place in self._regions(other))

    def _regions(self, pid: int) -> shared_locks.Regions:
        """Return the shared memory regions of a process, read once a round. Empty after `_CPU_SECONDS`."""
        if pid not in self._shared:
            began, ranks = time.thread_time(), len(set(self._job.rank_of.values()))
            is_late = self._shared_seconds > _CPU_SECONDS
            most = max(1, min(shared_locks.MOST_REGIONS, _MOST_REGIONS // ranks))
            self._shared[pid] = {} if is_late else shared_locks.regions(pid, self._root, most)
            self._shared_seconds += time.thread_time() - began
        return self._shared[pid]

    def _stuck_on(self, pid: int, call: SystemCall) -> str | None:
        """Return the file, FIFO or pipe that a call reads or writes; None if another process of the job has it open.

        Also None for a terminal and for a call on several descriptors. None for a pipe with both ends in this
        process, because the process itself can end that wait.
        """
        if call.kind not in ("receives", "writes") or len(call.descriptors) != 1:
            return None
        link = next(self._job.links(pid, call.descriptors), "")
        is_file = link.startswith("/") and not link.startswith(_OF_MEMORY_OR_DEVICE)
        if not (is_file or link.startswith("pipe:")) or self._is_shared(pid, link):
            return None
        return words.elided(link, LONGEST_PATH) if is_file else "a pipe; no process of its job has its other end"

    def _is_shared(self, pid: int, link: str) -> bool:
        """True if the process has `link` open twice, or another process of the job or a near relative has it open."""
        in_job = any(other != pid for other in self._job.holding(link, False))
        if in_job or self._job.holds_twice(pid, link):
            return True
        children = procfs.read_children(pid, self._root, _MOST_CHILDREN)
        below = (one for child in children for one in procfs.read_children(child, self._root, _MOST_CHILDREN))
        others = dict.fromkeys((*children, *below, *self._job.ancestors(pid)))
        return any(link in self._job.open_files(other) for other in others if other != pid)

    def _store(self, call: SystemCall, held: _Held | None) -> Store | None:
        if held is None or self._job.store_port is None:
            return None
        use = sockets.classify_port_use(self._job.store_port, held.values())
        return Store(
            endpoint=self._store_endpoint, socket="retries" if use == "none" and call.kind == "sleeps" else use
        )

    def _awaits_store(self, pid: int, call: SystemCall, held: _Held | None) -> Literal["main", "thread"] | None:
        """Return the thread that receives from the store, as in `store.wait`: "main" or "thread"; else None."""
        port, every = self._job.store_port, (held or {}).items()
        asked = {descriptor for descriptor, one in every if one.is_open and one.remote[1] == port}
        if not asked or self._job.rank_of.get(pid) != pid:
            return None
        if call.kind == "receives" and not asked.isdisjoint(call.descriptors):
            return "main"
        calls = self._job.thread_calls(pid).values() if call.name == "futex" else ()
        receive = (other for other in calls if other.kind == "receives")
        return "thread" if any(not asked.isdisjoint(other.descriptors) for other in receive) else None

    def _enclosed_at(self, pid: int, held: _Held | None) -> str | None:
        """Return the address of the store or socket at which a rank waits if no other node can reach it; else None."""
        port = self._job.store_port
        if held is None or not self._job.has_ranks_on_other_nodes or pid not in self._job.rank_of:
            return None
        has_store = port is not None and sockets.classify_port_use(port, held.values()) != "none"
        if self._is_store_on_loopback and has_store:
            return f"the store at {self._store_endpoint}"
        return sockets.find_unreachable_listener(self._of_one_node, port, held.values())

    def _addresses_of_one_node(self) -> frozenset[str]:
        found = interfaces.interfaces(self._root / str(self._job.dumped[0]) / "net", None) if self._job.dumped else ()
        known = found if isinstance(found, tuple) else ()
        return frozenset(address for one in known if one.is_of_one_node for address in one.addresses)

    def _peers(self, pid: int, call: SystemCall, held: _Held, *, is_apart: bool) -> tuple[int, int]:
        """Return two counts: all connections to other ranks, and those in use.

        Pipes and Unix sockets on which the main thread receives count too. If the job has ranks on other nodes,
        every connection that is not within this rank counts. `is_apart`: the main thread receives from a child or a
        server, so its pipes and Unix sockets do not count.
        """
        rank_ends = self._job.ends.get(self._job.rank_of.get(pid, pid), set())
        receives = call.kind == "receives"
        awaited_descriptors = set(call.descriptors) if receives else set()
        peers = used = 0
        for descriptor, connection in held.items():
            if (
                connection.is_open
                and connection.remote not in rank_ends
                and (self._job.has_ranks_on_other_nodes or self._stays_here(connection))
            ):
                peers += 1
                used += self._is_used(connection, is_asked=descriptor in awaited_descriptors)
        if not receives or is_apart or self._job.rank_of.get(pid) != pid:
            return peers, used  # a worker receives from its own rank
        open_ = {descriptor for descriptor, connection in held.items() if not connection.listens}
        links = self._job.links(pid, (number for number in call.descriptors if number not in open_))
        ways = sum(link.startswith(("pipe:", "socket:")) for link in links)
        return peers + ways, used + ways

    def _is_used(self, connection: Connection, *, is_asked: bool) -> bool:
        """True if a connection is new, or if in any round its bytes changed or the main thread received on it."""
        inode, carried = connection.inode, connection.carried_bytes
        is_new = inode not in self._bytes_at_first
        before = self._bytes_at_first.setdefault(inode, carried)
        if is_asked or carried is None or carried != before:
            self._used.add(inode)
        return is_new or inode in self._used

    def _has_thread_in_file(self, pid: int) -> bool:
        """True if a thread other than the main thread is in a call on a file, path, pipe or child."""
        for call in self._job.thread_calls(pid).values():
            on = system_calls.calls_by_name()[call.name].on if call.name else ""
            links = self._job.links(pid, call.descriptors[:1]) if on == "descriptor" else ()
            is_file = call.kind == "awaits_child" or on in ("path", "path_at")
            if is_file or any(map(blocked_call.is_pipe_or_path, links)):
                return True
        return False

    def _stays_here(self, connection: Connection) -> bool:
        """True if the other end of a connection may be a rank on this node, or is the store."""
        remote = connection.remote
        return remote[1] == self._job.store_port or remote in self._job.inside or remote[0] == connection.local[0]

    def _server(self, pid: int, call: SystemCall) -> int | None:
        """Return the pid of the process that waits for clients; None if there is none.

        It is this process, or the process from which this one receives on all awaited pipes and Unix sockets.
        """
        if self._job.has_ranks_on_other_nodes or call.kind != "receives":
            return None
        if self._chains.awaits_clients(pid, call):
            return pid
        ways = {link for link in self._job.links(pid, call.descriptors) if link.startswith(("pipe:", "socket:"))}
        return next((server for server, ends in self._servers.items() if ways and ways <= ends), None)

    def _carried(
        self, pid: int, held: _Held | None, purpose: str = "all", wanted: Collection[int] | None = None
    ) -> int | None:
        if held is None or any(connection.carried_bytes is None for connection in held.values()):
            return None
        return self._counted.setdefault((pid, purpose), _Counted()).total(held.values(), wanted)

    def _to_ranks(self, pid: int, held: _Held | None) -> set[int]:
        """Return the inodes of the connections of a process that lead to other ranks.

        If the job has ranks on other nodes, every connection that leaves this node may lead to one.
        """
        own = self._job.ends.get(self._job.rank_of.get(pid, pid), set())
        others = [one for one in (held or {}).values() if not one.listens and one.remote not in own]
        return {
            one.inode
            for one in others
            if one.remote in self._job.inside or (self._job.has_ranks_on_other_nodes and one.remote[0] != one.local[0])
        }

    def _written(
        self, pid: int, thread: int | None, state: str | None, call: SystemCall
    ) -> tuple[int | None, int | None]:
        if state not in BLOCKED_STATES or call.kind != "writes":
            return None, None
        mount = filesystems.mount_of_system_call(self._root, pid, thread)
        device = filesystems.written_bytes(mount, pid, self._root, self._sys_root) if mount else None
        return device, filesystems.dirty_bytes(self._root)


def find_object(call: SystemCall, link: str, *, is_own: bool) -> CallObject | None:
    """Return the kind of the object of a call: the file, pipe, socket, lock or child for which a main thread waits.

    None if another thread of the process or a GPU may end the call, as on device files and eventfds. `link` is the
    target of the call's first descriptor, as in /proc/PID/fd. `is_own` is true if the process itself has the other end
    of the object or holds the lock.
    """
    row = system_calls.calls_by_name().get(call.name)
    if row is None or is_own:
        return None
    if row.on in _OBJECTS:
        return _OBJECTS[row.on]
    if row.on != "descriptor" or call.name == "ioctl" or link.startswith(_OF_MEMORY_OR_DEVICE):
        return None
    if call.kind == "locks":
        return "lock"
    if link.startswith("/"):
        return "file"
    return "pipe" if link.startswith("pipe:") else "socket" if link.startswith("socket:") else None
