"""The sockets, pipes and files of the processes of a job, and the processes at their other ends.

The kernel reports all facts. They are read once in each round and within limits. No process is contacted.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from hangwatch.jobs import process_role
from hangwatch.model import ENDED_STATES, Job, ProcessId, SystemCall
from hangwatch.probes.base import procfs, pseudo_files
from hangwatch.probes.network import sockets
from hangwatch.probes.network.sockets import Connection, Connections, End, UnixSocket
from hangwatch.probes.process import blocked_call, main_thread

_CPU_SECONDS = 1.0  # for reading connections in one round; a busy node delays the thread
_MOST_NAMESPACES = 8
MOST_THREADS = 64
_MOST_ANCESTORS = 4  # of a rank: between it and its server there may be a shell and a launcher
_LEAST_RANKS = 2  # that are connected to a process which drives a job
MOST_DESCRIPTORS = 16  # of one call, in which another rank is searched
_OWN_ENDS = frozenset(f"anon_inode:[{name}]" for name in ("eventfd", "eventpoll", "io_uring"))
_ANY_HOST = (bytes(4), bytes(16))  # the address of a socket that listens on all addresses of the node


class JobSockets:
    """The sockets, pipes and files of a job's processes during one capture.

    * `rank_of` has the pid of the rank of each rank and worker, `dumped` the processes to dump.
    * `store_port` is the port of the job's store, None if unknown.
    * `inside` are the local ends of all connections of the job on this node, `ends` the same by rank, `rank_at` the
      rank of each.
    * `unix` are the Unix sockets in the network namespace of the first rank, by inode.
    * `open_files` returns the open files of a process, `read_call` the system call of its main thread, `thread_calls`
      those of its other threads, by thread. `holding` returns the processes of the job that have a link open, or open
      for writing. Each is read once a round.
    """

    def __init__(self, job: Job, targets: Sequence[ProcessId], proc_root: Path, search_seconds: float) -> None:
        self.proc_root = proc_root
        self.dumped = [target.pid for target in targets]
        self.launchers = tuple(launcher.pid for launcher in job.launcher_ids)
        port = process_role.rendezvous(job.environ)[1]
        self.store_port = int(port) if port.isdecimal() else None
        self.has_ranks_on_other_nodes = job.has_ranks_on_other_nodes
        self.rank_of = {
            process.pid: rank.id.pid
            for rank in job.ranks
            for process in (rank.id, *(worker.id for worker in rank.workers))
        }
        self.ranks = frozenset(self.rank_of.values())
        self._every = dict.fromkeys((*self.rank_of, *self.launchers))
        self._others: dict[tuple[int, str], tuple[str, int] | None] = {}
        self._strangers = blocked_call.Strangers(self._every, proc_root, search_seconds)

    def begin_round(self) -> None:
        """Read the connections of every network namespace of the job, and the processes that hold them."""
        end = time.thread_time() + _CPU_SECONDS
        self.sockets: dict[int, dict[int, int]] = {}
        self._tables: dict[int, Connections] = {}
        self._spaces: dict[str | None, Connections | None] = {}
        self.inside: set[End] = set()
        self.ends: dict[int, set[End]] = {}
        self.rank_at: dict[End, int] = {}
        self._listens_at: dict[End, int] = {}
        self._drivers: dict[End, int] = {}
        self._rank_of_socket: dict[int | None, int] = {}
        self._descriptors = cache(lambda pid: sockets.descriptors(pid, self.proc_root))
        self.open_files = cache(lambda pid: frozenset((self._descriptors(pid) or {}).values()))
        self.read_call = cache(partial(main_thread.read_call, proc_root=self.proc_root))
        self._writes = cache(
            lambda pid, link: blocked_call.has_open(
                pid, link, blocked_call.WRITE, self.proc_root, self._descriptors(pid) or {}
            )
        )
        self.holding, self.thread_calls = cache(self._find_holding), cache(self._read_thread_calls)
        self._holders = blocked_call.JobHolders(self._every, self.holding, self._strangers)
        for pid in (*self.dumped, *self.launchers):
            space = procfs.namespace(self.proc_root, pid, "net")
            is_new = space is not None and space not in self._spaces and len(self._spaces) < _MOST_NAMESPACES
            if is_new and time.thread_time() < end:
                self._spaces[space] = sockets.read(pid, self.proc_root)
            if time.thread_time() < end and self.read_process(pid):
                self._add_ends(pid)
        ranks = [pid for pid, rank in self.rank_of.items() if pid == rank]
        self.unix = sockets.read_unix(ranks[0], self.proc_root) or {} if ranks else {}

    def unix_socket(self, pid: int, descriptor: int) -> UnixSocket | None:
        """Return the Unix socket at a descriptor of a process; None if it is something else, or was not read."""
        return self.unix.get(self.sockets.get(pid, {}).get(descriptor, 0))

    def _add_ends(self, pid: int) -> None:
        connections = (self.connections_of(pid) or {}).values()
        ends = {connection.local for connection in connections if not connection.listens}
        self.inside |= ends
        self.ends.setdefault(self.rank_of.get(pid, pid), set()).update(ends)
        if (rank := self.rank_of.get(pid)) is None:
            self._drivers.update(dict.fromkeys(ends, pid))
            return
        self.rank_at.update(dict.fromkeys(ends, rank))
        self._rank_of_socket.update(dict.fromkeys(self.sockets[pid].values(), rank))
        self._listens_at.update({connection.local: rank for connection in connections if connection.listens})

    def read_process(self, pid: int) -> bool:
        """Read the connections of a process. Return True if they and its network namespace are known."""
        if pid not in self.sockets:
            table = self._spaces.get(procfs.namespace(self.proc_root, pid, "net"))
            held = sockets.sockets_among(self._descriptors(pid)) if table is not None else None
            if table is None or held is None:
                return False
            self._tables[pid], self.sockets[pid] = table, held
        return True

    def connections_of(self, pid: int) -> dict[int, Connection] | None:
        """Return the connections of a process by descriptor; None if they could not be read."""
        table, held = self._tables.get(pid), self.sockets.get(pid)
        if table is None or held is None:
            return None
        return {descriptor: table[inode] for descriptor, inode in held.items() if inode in table}

    def is_alive(self, pid: int) -> bool:
        """True if a process exists and has not ended."""
        state = procfs.read_state(pid, self.proc_root)
        return state is not None and state[1] not in ENDED_STATES

    def leaves_job(self, connection: Connection) -> bool:
        """True if the other end of an open connection is neither a process of this job on this node nor the store."""
        remote = connection.remote
        return connection.is_open and remote[1] != self.store_port and remote not in self.inside

    def is_of_job(self, pid: int) -> bool:
        """True for a rank, for a launcher, and for a parent of a rank that runs the same program as the rank."""
        if pid in self.ranks or pid in self.launchers:
            return True
        child = next((rank for rank in self.ranks if procfs.read_parent(rank, self.proc_root) == pid), None)
        return child is not None and self.program(child) == self.program(pid)

    def program(self, pid: int) -> str | None:
        """Return the path of the program file of a process; None if it is gone or not readable."""
        return pseudo_files.read_link(f"{self.proc_root}/{pid}/exe") or None

    def ancestors(self, pid: int) -> Iterator[int]:
        """Yield the parent of a process, its parent, and so on; only the nearest few."""
        for _ in range(_MOST_ANCESTORS):
            pid = procfs.read_parent(pid, self.proc_root) or 1
            if pid == 1:
                return
            yield pid

    # --- pipes and files ----------------------------------------------------------------------------------------------

    def holds_twice(self, pid: int, link: str) -> bool:
        """True if a process has two descriptors with this target: both ends of a pipe, for example."""
        return list((self._descriptors(pid) or {}).values()).count(link) > 1

    def far_ends(self, links: Iterable[str]) -> frozenset[str]:
        """Return the far ends of these pipes and Unix sockets, as in /proc/PID/fd. A pipe has one name for both."""
        links = set(links)
        pipes = {link for link in links if link.startswith("pipe:")}
        unix = (self.unix.get(int(link[8:-1])) for link in links if link.startswith("socket:["))
        return frozenset(pipes | {f"socket:[{end.peer}]" for end in unix if end is not None and end.peer})

    def has_end(self, pid: int, ways: frozenset[str]) -> bool:
        """True if a process can answer on one of these pipes and Unix sockets: of a pipe it has the end to write."""
        held = ways & self.open_files(pid) if ways else ways
        return any(link.startswith("socket:") or self._writes(pid, link) for link in held)

    def links(self, pid: int, descriptors: Iterable[int]) -> Iterator[str]:
        """Yield the targets of these descriptors of a process. Targets that cannot be read are skipped."""
        return filter(None, (blocked_call.link_of(pid, number, self.proc_root) for number in descriptors))

    def _find_holding(self, link: str, is_written: bool) -> tuple[int, ...]:
        held = (pid for pid in self._every if link in self.open_files(pid))
        return tuple(pid for pid in held if not is_written or self._writes(pid, link))

    # --- the processes at other ends ----------------------------------------------------------------------------------

    def find_other_end(self, pid: int, descriptor: int) -> tuple[str, int] | None:
        """Return the kind and the process at the other end of a pipe, Unix socket or connection to a launcher.

        None if only this process, a device or a file can end the wait. Raises LookupError if another process can, and
        it was not found in time, or the kernel does not show it: anyone may send to a UDP socket or change a watched
        file.
        """
        connection = (self.connections_of(pid) or {}).get(descriptor)
        if connection is not None:
            driver = self._drivers.get(connection.remote)
            return None if driver is None else ("connection", driver)
        link = next(self.links(pid, (descriptor,)), "")
        if not link or link.startswith("/dev/") or link in _OWN_ENDS:
            return None
        if (pid, link) not in self._others:
            self._others[pid, link] = blocked_call.find_other_process(pid, descriptor, self._holders, self.proc_root)
        return self._others[pid, link]

    def find_driver(self, pid: int, connection: Connection) -> int | None:
        """Return the process outside of the job at the other end, if it drives the ranks of the job; else None.

        It runs on this node as the same user, is an ancestor or sibling of the rank, is connected to several ranks, and
        waits for no clients.
        """
        parent, user = procfs.read_parent(pid, self.proc_root) or 1, procfs.read_user_id(pid, self.proc_root)
        siblings = procfs.read_children(parent, self.proc_root) if parent != 1 else ()
        for other in dict.fromkeys((*self.ancestors(pid), *siblings)):
            if (
                other in self._every
                or procfs.read_user_id(other, self.proc_root) != user
                or not self.read_process(other)
            ):
                continue
            held, call = self.connections_of(other) or {}, self.read_call(other)
            is_asked = any((each.local, each.remote) == (connection.remote, connection.local) for each in held.values())
            ranks = {self.rank_at.get(each.remote) for each in held.values()} - {None}
            serves = call is not None and any(held[each].listens for each in call.descriptors if each in held)
            if is_asked and len(ranks) >= _LEAST_RANKS and not serves:
                return other
        return None

    def receives_from_rank(self, pid: int, call: SystemCall | None, rank_pid: int) -> bool:
        """True if a call receives from a rank other than `rank_pid`: on a connection, or from a file that it writes."""
        if call is None or call.kind != "receives":
            return False
        held, others = self.connections_of(pid) or {}, self.ranks - {rank_pid}
        connected = (self._find_ranks(held[number]) for number in call.descriptors if number in held)
        ends = (self.unix_socket(pid, number) for number in call.descriptors)
        peers = ({self._rank_of_socket.get(end.peer)} for end in ends if end is not None)
        if any(ranks & others for ranks in itertools.chain(connected, peers)):
            return True
        ways = set(filter(blocked_call.is_pipe_or_path, self.links(pid, call.descriptors[:MOST_DESCRIPTORS])))
        sharing = (rank for rank in others if ways and ways & self.open_files(rank))
        return any(self._writes(rank, way) for rank in sharing for way in ways & self.open_files(rank))

    def _find_ranks(self, connection: Connection) -> set[int | None]:
        """Return the ranks at the other end of a connection. A listening socket counts before it accepts."""
        host, port = connection.remote
        if not connection.is_open or port == self.store_port:
            return set()
        hosts = (host, *(_ANY_HOST if host == connection.local[0] else ()))
        return {self.rank_at.get(connection.remote), *(self._listens_at.get((each, port)) for each in hosts)}

    def _read_thread_calls(self, pid: int) -> dict[int, SystemCall]:
        threads = main_thread.list_other_threads(pid, self.proc_root, MOST_THREADS)
        calls = ((thread, main_thread.read_call(pid, self.proc_root, thread)) for thread in threads)
        return {thread: call for thread, call in calls if call is not None}
