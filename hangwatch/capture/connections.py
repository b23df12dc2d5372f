"""Read the connections of a job's processes: carried bytes, child processes, and peers outside of the job.

The kernel reports all facts. They are read once in each round and within limits. No process is contacted. A fact
that hangwatch has no permission to read is None.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from hangwatch import words
from hangwatch.capture import call_objects, wait_chains
from hangwatch.capture import rank_dependencies as asked
from hangwatch.jobs import process_role
from hangwatch.model import (
    BLOCKED_STATES,
    ENDED_STATES,
    STOPPED_STATES,
    Awaited,
    CallObject,
    FileLock,
    Job,
    ProcessDump,
    ProcessId,
    Store,
    SystemCall,
    Thread,
    is_loopback,
)
from hangwatch.probes.network import interfaces, sockets
from hangwatch.probes.network.sockets import Connection, Connections, End
from hangwatch.probes.node import filesystems
from hangwatch.probes.process import (
    blocked_call,
    file_locks,
    main_thread,
    proc_pid,
    procfs,
    shared_locks,
    system_calls,
)

_DEADLINE_SECONDS = 2.0  # for reading connections in one round
_MOST_NAMESPACES = 8
_MOST_CHILDREN = 64
_MOST_ENDPOINT_CHARACTERS = 80
_MOST_PATH_CHARACTERS = 200
_MOST_PARENTS = 16  # ranks with a search for ancestors: all ranks of a job on one node have similar ancestors
_MOST_THREADS = 64
_MOST_REGIONS = 1 << 16  # of shared memory, over all ranks: about 300 bytes each
_MOST_ANCESTORS = 4  # of a rank: between it and its server there may be a shell and a launcher
_NOT_FOUND = Awaited(name="a process at the other end of its pipe or socket, which was not found", is_unknown=True)
_TERMINAL = re.compile(r"/dev/(pts/\d+|tty\w*|console)")


class _Counted:
    """Bytes carried by the connections of one process, including connections that were closed meanwhile."""

    def __init__(self) -> None:
        self._before: dict[int, int] | None = None
        self._total = 0

    def total(self, held: Iterable[Connection], wanted: Collection[int] | None = None) -> int:
        """Return the bytes that connections have carried since the first call.

        `wanted` selects inodes; None selects all.
        """
        now = {connection.inode: connection.carried_bytes or 0 for connection in held}
        if self._before is not None:
            grown = {inode: max(0, count - self._before.get(inode, 0)) for inode, count in now.items()}
            self._total += sum(grown[inode] for inode in (grown if wanted is None else grown.keys() & wanted))
        self._before = now
        return self._total


class JobConnections:
    """The connections of a job's processes during one capture. They are read again in each round."""

    def __init__(
        self,
        job: Job,
        targets: Sequence[ProcessId],
        proc_root: Path,
        sys_root: Path,
        search_seconds: float,
    ) -> None:
        self._root, self._sys_root, self._search_seconds = proc_root, sys_root, search_seconds
        self._pids = [target.pid for target in targets]
        self._launchers = tuple(launcher.pid for launcher in job.launcher_ids)
        self._drivers: dict[End, int] = {}
        address, port = process_role.rendezvous(job.environ)
        self._store_port = int(port) if port.isdecimal() else None
        self._is_store_on_loopback = is_loopback(address)
        self._store_endpoint = words.elided(f"{address}:{port}", _MOST_ENDPOINT_CHARACTERS)
        self._has_ranks_on_other_nodes = job.has_ranks_on_other_nodes
        self._rank_of = {
            process.pid: rank.id.pid
            for rank in job.ranks
            for process in (rank.id, *(worker.id for worker in rank.workers))
        }
        self._ranks = frozenset(self._rank_of.values())
        self._counted: dict[tuple[int, str], _Counted] = {}
        self._sockets: dict[int, dict[int, int]] = {}
        self._tables: dict[int, Connections] = {}
        self._inside: set[End] = set()
        self._ends: dict[int, set[End]] = {}
        self._rank_at: dict[End, int] = {}
        self._listens_at: dict[End, int] = {}
        self._unix: dict[int, sockets.UnixSocket] = {}
        self._servers: dict[int, frozenset[str]] = {}
        self._job_server: int | None = None
        self._open: dict[int, frozenset[str]] = {}
        self._writable: dict[int, frozenset[str]] = {}
        self._in_job: dict[tuple[str, bool], tuple[int, ...]] = {}
        self._shared: dict[int, shared_locks.Regions] = {}
        self._bytes_at_first: dict[int, int | None] = {}
        self._used: set[int] = set()
        self._shared_seconds = 0.0
        self._of_one_node: frozenset[str] = frozenset()
        self._is_partial = False
        self._others: dict[tuple[int, str], tuple[str, int] | None] = {}
        in_job = dict.fromkeys((*self._rank_of, *self._launchers))
        strangers = blocked_call.Strangers(in_job, proc_root)
        self._holders = blocked_call.JobHolders(in_job, self._holding, strangers)
        self._chains = wait_chains.Chains(self._rank_of, self._held, self._all_links, self._leaves_job, proc_root)

    def begin_round(self) -> None:
        """Read the connections of every network namespace of the job, and the processes that hold them."""
        end = time.monotonic() + _DEADLINE_SECONDS
        self._sockets, self._tables, self._inside, self._ends, self._open = {}, {}, set(), {}, {}
        self._writable, self._in_job, self._shared, self._shared_seconds = {}, {}, {}, 0.0
        self._rank_at, self._listens_at, self._drivers = {}, {}, {}
        spaces: dict[str | None, Connections | None] = {}
        for pid in (*self._pids, *self._launchers):
            space = proc_pid.namespace(self._root, pid, "net")
            if space is not None and space not in spaces and len(spaces) < _MOST_NAMESPACES and time.monotonic() < end:
                spaces[space] = sockets.read(pid, self._root)
            table = spaces.get(space)
            held = sockets.sockets_of_process(pid, self._root) if table is not None and time.monotonic() < end else None
            if table is not None and held is not None:
                self._tables[pid], self._sockets[pid] = table, held
                connections = [table[inode] for inode in held.values() if inode in table]
                ends = {connection.local for connection in connections if not connection.listens}
                self._inside |= ends
                self._ends.setdefault(self._rank_of.get(pid, pid), set()).update(ends)
                if pid not in self._rank_of:
                    self._drivers.update(dict.fromkeys(ends, pid))
                if (rank := self._rank_of.get(pid)) is not None:
                    self._rank_at.update(dict.fromkeys(ends, rank))
                    self._listens_at.update(
                        {connection.local: rank for connection in connections if connection.listens}
                    )
        self._is_partial = any(self._is_unread(pid) for pid in self._ranks)
        self._of_one_node = self._addresses_of_one_node() if self._has_ranks_on_other_nodes else frozenset()
        self._servers = {} if self._has_ranks_on_other_nodes else self._find_servers(spaces)
        self._job_server = next(filter(self._is_of_job, self._servers), None)

    def _is_of_job(self, pid: int) -> bool:
        """True for a rank, for a launcher, and for a parent of a rank that runs the same program as the rank."""
        if pid in self._ranks or pid in self._launchers:
            return True
        children = (rank for rank in self._ranks if procfs.read_parent(rank, self._root) == pid)
        return any(self._program(child) == self._program(pid) for child in itertools.islice(children, 1))

    def _find_servers(self, spaces: Mapping[str | None, Connections | None]) -> dict[int, frozenset[str]]:
        """Return by pid the ranks and their ancestors that wait for clients, each with the far ends of its pipes.

        Unix sockets count as pipes. The ends are named as in `_far_ends`.
        """
        ranks = [pid for pid, rank in self._rank_of.items() if pid == rank]
        above = dict.fromkeys(itertools.chain.from_iterable(map(self._ancestors, ranks[:_MOST_PARENTS])))
        for pid in above:
            table = spaces.get(proc_pid.namespace(self._root, pid, "net"))
            held = sockets.sockets_of_process(pid, self._root) if table is not None else None
            if table is not None and held is not None:
                self._tables[pid], self._sockets[pid] = table, held
        self._unix = sockets.read_unix(ranks[0], self._root) or {} if ranks else {}
        calls = {pid: main_thread.read_call(pid, self._root) for pid in (*ranks, *above) if pid in self._sockets}
        serving = [pid for pid, call in calls.items() if call is not None and self._awaits_clients(pid, call)]
        return {pid: self._far_ends(pid) for pid in serving}

    def add_connections(self, pid: int, dump: ProcessDump, threads: Sequence[Thread] = ()) -> ProcessDump:
        """Return the dump of process `pid` with all fields about connections. `call` and `state` must be set before.

        `threads` are those with a Python stack.
        """
        call, state = dump.call, dump.state
        thread = None if dump.awaited_thread is None else dump.awaited_thread.id
        kind = call.kind if call else None
        server = None if call is None else self._server(pid, call)
        children, awaited = ([], None) if call is None else self._find_awaited(pid, call, server)
        children_bytes, children_cpu = self._measure(children)
        others = self._other_ranks(pid)
        asks_rank = None if call is None else others.find_receiver(pid, call, children)
        if call is not None and kind == "locks":
            lock = file_locks.find_awaited_lock(pid, call.descriptors[0], self._root)
        else:
            lock = others.find_lock(children)
        if lock is not None or asks_rank is not None:
            awaited = None
        elif call is not None and awaited is None and not self._has_ranks_on_other_nodes:
            awaited = self._chains.find_client(pid, call, threads)
        is_apart = bool(children) or server not in (None, pid)
        peers, active_peers = (None, None)
        if call is not None or state == "R":
            peers, active_peers = self._peers(pid, call, is_apart=is_apart)
        device_bytes, dirty_bytes = self._written(pid, thread, state, kind)
        return replace(
            dump,
            socket_bytes=self._carried(pid),
            rank_bytes=None if self._is_partial else self._carried(pid, "ranks", self._to_ranks(pid)),
            object_bytes=self._carried(pid, "object", self._of_call(pid, call)),
            children_bytes=children_bytes,
            children_cpu_seconds=children_cpu,
            awaited=awaited,
            device_bytes=device_bytes,
            dirty_bytes=dirty_bytes,
            peers=peers,
            active_peers=active_peers,
            thread_in_file=call is not None and call.name == "futex" and self._has_thread_in_file(pid),
            server=server,
            job_server=self._job_server,
            store=self._store(pid, call),
            awaits_store=None if call is None else self._awaits_store(pid, call),
            enclosed_at=self._enclosed_at(pid),
            stuck_on=None if call is None else self._stuck_on(pid, call),
            file_lock=lock,
            asks_rank=asks_rank,
            shares_lock=call is not None and call.name == "futex" and self._shares_lock(pid, thread),
            call=None if call is None else replace(call, object=self._object(pid, call, lock)),
        )

    def _find_awaited(self, pid: int, call: SystemCall, server: int | None) -> tuple[list[int], Awaited | None]:
        """Return the processes outside the job that a call waits for, and the peer that may answer."""
        awaited, pipes = None, frozenset[str]()
        if call.kind == "receives":
            awaited = self._person(pid, call.descriptors) or self._outside(pid, call.descriptors)
            pipes = self._pipes(pid, call) if awaited is None else pipes
        if call.kind == "awaits_child" or pipes:
            children = self._children(pid, call, pipes)
            if children or call.kind == "awaits_child":
                return children, self._able_to_answer(children, "its child")
            if (awaited := self._chains.find_end(pid, pipes)) is not None:
                return [], awaited
        if server is not None or awaited is not None:
            return [], awaited
        return self._other_process(pid, call)

    def _measure(self, processes: Sequence[int]) -> tuple[int | None, float | None]:
        """Return the bytes and the CPU seconds of these processes, except of those that are dumped.

        The seconds in which their main threads waited for a core count, too: on a busy node these are most of them.
        """
        strangers = [one for one in processes if one not in self._pids]
        counters = [procfs.read_counters(one, self._root) for one in strangers]
        carried = [self._carried(one) or 0 for one in strangers]
        if not counters:
            return None, None
        threads = (main_thread.read_counters(one, self._root) for one in strangers)
        delays = (thread.delay_seconds or 0.0 for thread in threads if thread is not None)
        used_seconds = sum(one.cpu_seconds or 0.0 for one in counters) + sum(delays)
        return sum(one.io_bytes or 0 for one in counters) + sum(carried), used_seconds

    def _object(self, pid: int, call: SystemCall, lock: FileLock | None) -> CallObject | None:
        """Return the kind of the object that a call waits for, see `call_objects`."""
        descriptor = next(iter(call.descriptors), -1)
        link = next(self._links(pid, call.descriptors[:1]), "")
        held, inodes = self._held(pid) or {}, self._sockets.get(pid, {})
        connection, unix = held.get(descriptor), self._unix.get(inodes.get(descriptor, 0))
        is_own = (
            (lock is not None and lock.holder_pid == pid)
            or (link.startswith("pipe:") and list(self._all_links(pid)).count(link) > 1)
            or (connection is not None and connection.remote in {one.local for one in held.values()})
            or (unix is not None and unix.peer in inodes.values())
        )
        return call_objects.find_object(call, link, is_own=is_own)

    def _other_ranks(self, pid: int) -> asked.OtherRanks:
        return asked.OtherRanks(
            rank_pid=self._rank_of.get(pid, pid),
            pids=self._ranks,
            ends=self._rank_at,
            listening=self._listens_at,
            store_port=self._store_port,
            connections_of=self._held,
            open_files_of=self._links_of,
            writable_files_of=self._written_by,
            proc_root=self._root,
        )

    def _shares_lock(self, pid: int, thread: int | None) -> bool:
        """True if a rank waits for a lock in memory that another rank maps, too. The other rank may hold the lock."""
        address = shared_locks.awaited_address(pid, self._root, thread) if self._rank_of.get(pid) == pid else None
        place = None if address is None else shared_locks.region_at(address, self._regions(pid))
        return place is not None and any(place in self._regions(rank) for rank in self._ranks - {pid})

    def _regions(self, pid: int) -> shared_locks.Regions:
        """Return the shared memory regions of a process, read once in each round.

        Empty if the reads of this round have already exceeded their deadline.
        """
        if pid not in self._shared:
            began, ranks = time.monotonic(), len(set(self._rank_of.values()))
            is_late = self._shared_seconds > _DEADLINE_SECONDS
            most = max(1, min(shared_locks.MOST_REGIONS, _MOST_REGIONS // ranks))
            self._shared[pid] = {} if is_late else shared_locks.regions(pid, self._root, most)
            self._shared_seconds += time.monotonic() - began
        return self._shared[pid]

    def _stuck_on(self, pid: int, call: SystemCall) -> str | None:
        """Return the file, FIFO or pipe that a call reads or writes; None if another process of the job has it open.

        Also None for a terminal and for a call on several descriptors. None for a pipe with both ends in this
        process, because the process itself can end that wait.
        """
        if call.kind not in ("receives", "writes") or len(call.descriptors) != 1:
            return None
        link = next(self._links(pid, call.descriptors), "")
        is_file = link.startswith("/") and not link.startswith(("/dev/", "/memfd:"))
        if not (is_file or link.startswith("pipe:")) or self._is_shared(pid, link):
            return None
        return (
            words.elided(link, _MOST_PATH_CHARACTERS) if is_file else "a pipe; no process of its job has its other end"
        )

    def _is_shared(self, pid: int, link: str) -> bool:
        """True if the process has the file `link` open twice, or if another process has it open.

        The other processes are those of the job, and the ancestors, children and grandchildren of this process.
        """
        in_job = any(other != pid for other in self._holding(link, False))
        if in_job or list(self._all_links(pid)).count(link) > 1:
            return True
        children = procfs.read_children(pid, self._root, _MOST_CHILDREN)
        below = (one for child in children for one in procfs.read_children(child, self._root, _MOST_CHILDREN))
        others = dict.fromkeys((*children, *below, *self._ancestors(pid)))
        return any(link in self._links_of(other) for other in others if other != pid)

    def _holding(self, link: str, is_written: bool) -> tuple[int, ...]:
        """Return the processes of the job that have a link open, or open for writing, searched once a round."""
        if (link, is_written) not in self._in_job:
            files_of = self._written_by if is_written else self._links_of
            every = dict.fromkeys((*self._rank_of, *self._launchers))
            self._in_job[link, is_written] = tuple(pid for pid in every if link in files_of(pid))
        return self._in_job[link, is_written]

    def _links_of(self, pid: int) -> frozenset[str]:
        """Return the open files of a process, read once a round."""
        if pid not in self._open:
            self._open[pid] = frozenset(self._all_links(pid))
        return self._open[pid]

    def _written_by(self, pid: int) -> frozenset[str]:
        """Return the files that a process has open for writing, read once a round."""
        if pid not in self._writable:
            self._writable[pid] = blocked_call.writable_files(pid, self._root)
        return self._writable[pid]

    def _store(self, pid: int, call: SystemCall | None) -> Store | None:
        held, port = self._held(pid), self._store_port
        if held is None or port is None:
            return None
        use = sockets.classify_port_use(port, held.values())
        sleeps = call is not None and call.kind == "sleeps"
        return Store(endpoint=self._store_endpoint, socket="retries" if use == "none" and sleeps else use)

    def _awaits_store(self, pid: int, call: SystemCall) -> Literal["main", "thread"] | None:
        """Return "main" or "thread": the thread that receives from the job's store; None if no thread does.

        A rank that calls `store.wait` receives until another rank sets the key.
        """
        held, port = self._held(pid) or {}, self._store_port
        asked = {descriptor for descriptor, one in held.items() if one.is_open and one.remote[1] == port}
        if not asked or self._rank_of.get(pid) != pid:
            return None
        if call.kind == "receives" and not asked.isdisjoint(call.descriptors):
            return "main"
        others = main_thread.other_threads(pid, self._root, _MOST_THREADS) if call.name == "futex" else ()
        calls = (main_thread.read_call(pid, self._root, thread) for thread in others)
        receive = (one for one in calls if one is not None and one.kind == "receives")
        return "thread" if any(not asked.isdisjoint(one.descriptors) for one in receive) else None

    def _enclosed_at(self, pid: int) -> str | None:
        """Return the place at which a rank waits, if ranks of other nodes cannot reach it; else None.

        The place is the address of the store or of a listening socket.
        """
        held = self._held(pid)
        if held is None or not self._has_ranks_on_other_nodes or pid not in self._rank_of:
            return None
        has_store = (
            self._store_port is not None and sockets.classify_port_use(self._store_port, held.values()) != "none"
        )
        if self._is_store_on_loopback and has_store:
            return f"the store at {self._store_endpoint}"
        return sockets.find_unreachable_listener(self._of_one_node, self._store_port, held.values())

    def _addresses_of_one_node(self) -> frozenset[str]:
        found = interfaces.interfaces(self._root / str(self._pids[0]) / "net", None) if self._pids else ()
        known = found if isinstance(found, tuple) else ()
        return frozenset(address for one in known if one.is_of_one_node for address in one.addresses)

    def _peers(self, pid: int, call: SystemCall | None, *, is_apart: bool) -> tuple[int | None, int | None]:
        """Return two counts: all connections to other ranks, and those in use. Both are None if they were not read.

        Pipes and Unix sockets on which the main thread receives count too. If the job has ranks on other nodes,
        every connection that is not within this rank counts. `is_apart`: the main thread receives from a child or a
        server, so its pipes and Unix sockets do not count.
        """
        held = self._held(pid)
        if held is None:
            return None, None
        rank_ends = self._ends.get(self._rank_of.get(pid, pid), set())
        receives = call is not None and call.kind == "receives"
        awaited_descriptors = set(call.descriptors) if call is not None and receives else set()
        peers = used = 0
        for descriptor, connection in held.items():
            if (
                connection.is_open
                and connection.remote not in rank_ends
                and (self._has_ranks_on_other_nodes or self._stays_here(connection))
            ):
                peers += 1
                used += self._is_used(connection, is_asked=descriptor in awaited_descriptors)
        if call is None or not receives or is_apart or self._rank_of.get(pid) != pid:
            return peers, used  # a worker receives from its own rank
        open_ = {descriptor for descriptor, connection in held.items() if not connection.listens}
        links = self._links(pid, (number for number in call.descriptors if number not in open_))
        ways = sum(link.startswith(("pipe:", "socket:")) for link in links)
        return peers + ways, used + ways

    def _is_used(self, connection: Connection, *, is_asked: bool) -> bool:
        """True if a connection is new in this round or was in use in any round so far.

        A connection is in use if its number of carried bytes changes, or if the main thread receives on it.
        """
        inode, carried = connection.inode, connection.carried_bytes
        is_new = inode not in self._bytes_at_first
        before = self._bytes_at_first.setdefault(inode, carried)
        if is_asked or carried is None or carried != before:
            self._used.add(inode)
        return is_new or inode in self._used

    def _has_thread_in_file(self, pid: int) -> bool:
        """True if a thread other than the main thread is in a call on a file, path, pipe or child."""
        for thread in main_thread.other_threads(pid, self._root, _MOST_THREADS):
            call = main_thread.read_call(pid, self._root, thread)
            if call is None:
                continue
            on = system_calls.calls_by_name()[call.name].on if call.name else ""
            if call.kind == "awaits_child" or on in ("path", "path_at"):
                return True
            links = self._links(pid, call.descriptors[:1]) if on == "descriptor" else ()
            if any(map(blocked_call.is_pipe_or_path, links)):
                return True
        return False

    def _stays_here(self, connection: Connection) -> bool:
        """True if the other end of a connection may be a rank on this node, or is the store."""
        local, remote = connection.local, connection.remote
        return remote[1] == self._store_port or remote in self._inside or remote[0] == local[0]

    def _ancestors(self, pid: int) -> Iterator[int]:
        for _ in range(_MOST_ANCESTORS):
            pid = procfs.read_parent(pid, self._root) or 1
            if pid == 1:
                return
            yield pid

    def _awaits_clients(self, pid: int, call: SystemCall) -> bool:
        """True if the main thread waits on a listening socket, and on no TCP connection within the job."""
        if call.kind != "receives":
            return False
        held, every = self._held(pid) or {}, self._sockets.get(pid, {})
        tcp = [held[one] for one in call.descriptors if one in held]
        unix = [self._unix[every[one]] for one in call.descriptors if every.get(one) in self._unix]
        listens = any(one.listens for one in tcp) or any(one.listens for one in unix)
        return listens and all(one.listens or self._leaves_job(one) for one in tcp)

    def _far_ends(self, pid: int) -> frozenset[str]:
        """Return the far ends of a process's pipes and Unix sockets, named as in /proc/PID/fd of the other process.

        Both ends of a pipe have the same name.
        """
        links = self._all_links(pid)
        peers = (self._unix[inode].peer for inode in self._sockets.get(pid, {}).values() if inode in self._unix)
        pipes = {link for link in links if link.startswith("pipe:")}
        return frozenset(pipes | {f"socket:[{peer}]" for peer in peers if peer is not None})

    def _server(self, pid: int, call: SystemCall) -> int | None:
        """Return the pid of the process that waits for clients; None if there is none.

        It is this process, or the process from which this one receives on all awaited pipes and Unix sockets.
        """
        if self._has_ranks_on_other_nodes or call.kind != "receives":
            return None
        if self._awaits_clients(pid, call):
            return pid
        links = self._links(pid, call.descriptors)
        ways = {link for link in links if link.startswith(("pipe:", "socket:"))}
        return next((server for server, ends in self._servers.items() if ways and ways <= ends), None)

    def _carried(self, pid: int, purpose: str = "all", wanted: Collection[int] | None = None) -> int | None:
        held = self._held(pid)
        if held is None or any(connection.carried_bytes is None for connection in held.values()):
            return None
        return self._counted.setdefault((pid, purpose), _Counted()).total(held.values(), wanted)

    def _to_ranks(self, pid: int) -> set[int]:
        """Return the inodes of the connections of a process that lead to other ranks.

        If the job has ranks on other nodes, every connection that leaves this node may lead to one.
        """
        own = self._ends.get(self._rank_of.get(pid, pid), set())
        others = [one for one in (self._held(pid) or {}).values() if not one.listens and one.remote not in own]
        return {
            one.inode
            for one in others
            if one.remote in self._inside or (self._has_ranks_on_other_nodes and one.remote[0] != one.local[0])
        }

    def _is_unread(self, pid: int) -> bool:
        """True if a process is alive but its connections could not be read."""
        state = None if pid in self._sockets else procfs.read_state(pid, self._root)
        return state is not None and state[1] not in ENDED_STATES

    def _of_call(self, pid: int, call: SystemCall | None) -> set[int]:
        """Return a set with the inode of the connection on which a call works; empty if the call uses no connection."""
        held = self._held(pid) or {}
        first = () if call is None else call.descriptors[:1]
        return {held[one].inode for one in first if one in held}

    def _held(self, pid: int) -> dict[int, Connection] | None:
        """Return the connections of a process by descriptor; None if they could not be read."""
        table, held = self._tables.get(pid), self._sockets.get(pid)
        if table is None or held is None:
            return None
        return {descriptor: table[inode] for descriptor, inode in held.items() if inode in table}

    def _outside(self, pid: int, descriptors: Iterable[int]) -> Awaited | None:
        held = self._held(pid) or {}
        found = [held[one] for one in descriptors if one in held and self._leaves_job(held[one])]
        if not found:
            return None
        return Awaited(name=sockets.format_end(found[0].remote), is_lost=all(one.is_lost for one in found))

    def _person(self, pid: int, descriptors: Iterable[int]) -> Awaited | None:
        """Return a person at a terminal as the awaited peer if a call reads a terminal; else None.

        In that case the program shows a question or the prompt of a debugger.
        """
        links = self._links(pid, itertools.islice(descriptors, 16))
        terminal = next((link for link in links if _TERMINAL.fullmatch(link)), None)
        return None if terminal is None else Awaited(name=f"a person at the terminal {terminal}")

    def _leaves_job(self, connection: Connection) -> bool:
        """True if the other end of an open connection is neither a process of this job on this node nor the store."""
        remote = connection.remote
        return connection.is_open and remote[1] != self._store_port and remote not in self._inside

    def _pipes(self, pid: int, call: SystemCall) -> frozenset[str]:
        links = self._links(pid, call.descriptors[:16])
        return frozenset(link for link in links if link.startswith("pipe:"))

    def _children(self, pid: int, call: SystemCall, pipes: frozenset[str]) -> list[int]:
        """Return the living children for which a call waits.

        They are selected by pid (then with their own children), or because they hold the other end of a pipe. A
        data-loader worker at a pipe is left out, because its own dumps show its progress. It was forked, so it runs
        the same program as the rank. Other children run another program.
        """
        children = list(procfs.read_children(pid, self._root, _MOST_CHILDREN))
        if pipes:
            program = self._program(pid)
            others = (child for child in children if child not in self._pids or self._program(child) != program)
            children = [child for child in others if self._holds(child, pipes)]
        elif call.child is not None:
            wanted = [child for child in children if procfs.read_inner_pid(child, self._root) == call.child]
            children = [*wanted, *(below for child in wanted for below in procfs.read_children(child, self._root))]
        return self._alive(children, pid)

    def _alive(self, processes: Iterable[int], pid: int) -> list[int]:
        """Return those of these processes that live, with their connections read: those of the namespace of `pid`."""
        alive = [
            one for one in processes if (state := procfs.read_state(one, self._root)) and state[1] not in ENDED_STATES
        ]
        for one in alive:
            self._sockets[one] = sockets.sockets_of_process(one, self._root) or {}
            self._tables[one] = self._tables.get(pid, {})
        return alive

    def _other_process(self, pid: int, call: SystemCall) -> tuple[list[int], Awaited | None]:
        """Return the process outside the job, and its descendants, at the other end of a call's pipe or Unix socket.

        It is empty if a process of the job is at the other end, or if there is none. If the call receives on a Unix
        socket, that process may answer: then it is the awaited peer, too.
        """
        if call.kind not in ("receives", "writes") or len(call.descriptors) != 1:
            return [], None
        link, connection = (
            next(self._links(pid, call.descriptors), ""),
            (self._held(pid) or {}).get(call.descriptors[0]),
        )
        if connection is not None and (driver := self._drivers.get(connection.remote)) is not None:
            return self._alive([driver], pid), None
        if not link.startswith(("pipe:", "socket:")) or connection is not None:
            return [], None
        if (pid, link) not in self._others:
            number, end = call.descriptors[0], time.monotonic() + self._search_seconds
            try:
                other_end = blocked_call.find_other_process(pid, number, self._holders, end, self._root)
            except LookupError:
                return [], _NOT_FOUND
            self._others[pid, link] = other_end
        other_end = self._others[pid, link]
        if other_end is None or other_end[1] in self._rank_of:
            return [], None
        kind, other = other_end
        if self._is_of_job(other):
            return (self._alive([other], pid) if call.kind == "receives" else []), None
        every = self._alive([other, *procfs.read_children(other, self._root, _MOST_CHILDREN)], pid)
        may_answer = kind == "unix" and call.kind == "receives" and other in every
        return every, self._able_to_answer(every, "process") if may_answer else None

    def _program(self, pid: int) -> str | None:
        """Return the path of the program file of a process; None if it is gone or not readable."""
        with contextlib.suppress(OSError):
            return os.readlink(f"{self._root}/{pid}/exe")  # noqa: PTH115 - a magic link, not a path
        return None

    def _holds(self, pid: int, pipes: frozenset[str]) -> bool:
        return any(link in pipes for link in self._all_links(pid))

    def _all_links(self, pid: int) -> Collection[str]:
        """Return the targets of all descriptors of a process; empty without the permission to read them."""
        try:
            return sockets.descriptors(pid, self._root).values()
        except OSError:
            return ()

    def _links(self, pid: int, descriptors: Iterable[int]) -> Iterator[str]:
        """Yield the targets of these descriptors of a process. Targets that cannot be read are skipped."""
        return filter(None, (blocked_call.link_of(pid, one, self._root) for one in descriptors))

    def _able_to_answer(self, processes: Sequence[int], relation: str) -> Awaited | None:
        """Return one of these processes as the awaited peer: "its child 4711 (ssh)" for the `relation` "its child"."""
        connected = (self._connected(one, relation) for one in processes)
        return next(filter(None, connected), None) or self._living(processes, relation)

    def _connected(self, child: int, relation: str) -> Awaited | None:
        """Return the child as the awaited peer, if it is connected to a peer outside of the job; else None."""
        held = [one for one in (self._held(child) or {}).values() if self._leaves_job(one)]
        if not held:
            return None
        name = f"{relation} {self._named(child)}, connected to {sockets.format_end(held[0].remote)}"
        return Awaited(name=name, is_lost=all(one.is_lost for one in held))

    def _named(self, pid: int) -> str:
        stat = procfs.read_stat(f"{self._root}/{pid}")
        return f"{pid} ({'' if stat is None else stat.comm})"

    def _living(self, children: Sequence[int], relation: str) -> Awaited | None:
        """Return the first child as the awaited peer.

        None unless all awaited children work or sleep outside of the job.

        None if a child is a rank or has a connection, because it may belong to the job. None if a child is stopped
        or in `D` state, because it makes no progress.
        """
        ranks = set(self._rank_of.values())
        if any(connection.is_open for child in children for connection in (self._held(child) or {}).values()):
            return None
        states = {child: procfs.read_state(child, self._root) for child in children if child not in ranks}
        able = [child for child, state in states.items() if state and state[1] not in BLOCKED_STATES | STOPPED_STATES]
        if not able or len(able) < len(children):
            return None
        return Awaited(name=f"{relation} {self._named(able[0])}")

    def _written(
        self, pid: int, thread: int | None, state: str | None, kind: str | None
    ) -> tuple[int | None, int | None]:
        if state not in BLOCKED_STATES or kind != "writes":
            return None, None
        mount = filesystems.mount_of_system_call(self._root, pid, thread)
        device = filesystems.written_bytes(mount, pid, self._root, self._sys_root) if mount else None
        return device, filesystems.dirty_bytes(self._root)
