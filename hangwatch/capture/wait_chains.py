"""Follow the wait of a process to its end, breadth first: through at most four processes, and through none twice.

A call leads to the process at the other end of its pipe, Unix socket or connection, or to a child. That process is in a
call, too. The kernel reports all facts; no process is contacted.
"""

import itertools
import re
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import words
from hangwatch.capture.job_sockets import MOST_DESCRIPTORS, JobSockets
from hangwatch.model import BLOCKED_STATES, STOPPED_STATES, AsksRank, Awaited, FileLock, SystemCall, Thread, WaitEnd
from hangwatch.probes.base import procfs, pseudo_files, system_calls
from hangwatch.probes.network import sockets
from hangwatch.probes.network.sockets import Connection
from hangwatch.probes.process import file_locks, shared_locks
from hangwatch.probes.process.blocked_call import is_pipe_or_path
from hangwatch.stacks import frames as stack_frames

_MOST_STEPS = 4
_MOST_PROCESSES = 64  # of one step
_MOST_CHILDREN = 16  # of one rank; their calls are read
_MOST_SEARCHED = 1024  # children of one rank, for the awaited pid
_STDIN = 0
_EVENTS = "anon_inode:[eventfd]"
_OF_LIBRARIES = re.compile("gloo|pt_|nccl|cuda", re.IGNORECASE)  # names of threads of torch, gloo, NCCL and CUDA
_EVENT_LOOP = "run_forever"  # of asyncio/base_events.py
_TERMINAL = re.compile(r"/dev/(pts/\d+|tty\w*|console)")
_NOT_FOUND = Awaited(name="the process that should wake it (not found)", end="unknown")
_CLIENTS = Awaited(name="clients", end="unknown")
_WEIGHTS: tuple[WaitEnd, ...] = ("held", "unknown", "outside", "sleeps", "lost", "process", "program", "cycle")
"""The order of ends: the wait behind several processes has the end that comes first here."""


class Chain(NamedTuple):
    """The processes behind a wait, and its end.

    `awaited` is None if the end is a rank or another process of the job. `processes` are those that are awaited, except
    workers: their CPU time and bytes count as progress. `workers` are the dumped processes in the chain. `asks_rank` is
    the part that receives from another rank, `file_lock` the awaited lock.
    """

    awaited: Awaited | None = None
    processes: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    asks_rank: AsksRank | None = None
    file_lock: FileLock | None = None


class _Step(NamedTuple):
    """A process of a chain, and its name in a sentence. `may_answer`: it is outside of the job, and may end the wait.

    `is_worker`: it runs the program of the rank, and is dumped itself.
    """

    pid: int
    name: str
    is_worker: bool = False
    may_answer: bool = False


class WaitChains(NamedTuple):
    """The chains of the processes of one job in one capture."""

    job: JobSockets
    first_bytes: dict[int, int | None]  # carried by each connection when it was first awaited, by inode

    def follow(
        self,
        pid: int,
        call: SystemCall,
        threads: Sequence[Thread],
        server: int | None,
        sharing: Set[int],
        *,
        awaits_any: bool = False,
    ) -> Chain:
        """Return the chain behind the call of a main thread.

        `threads` are those of the process with a Python stack. `server` is the process that waits for clients and from
        which this process receives, None without one. `sharing` are the processes that may hold an awaited lock. With
        `awaits_any`, any other thread of the process may end the wait, as of a queue or an event.
        """
        job, rank = self.job, self.job.rank_of.get(pid, pid)
        direct_end, end = self._find_direct_end(pid, call), None
        try:
            steps = self._find_steps(pid, call, server) if direct_end is None else self._find_driver(pid, call)
            if sharing and not sharing & job.ranks:
                steps = [_Step(worker, self._name("its worker", worker), is_worker=True) for worker in sorted(sharing)]
        except LookupError:
            steps, end = [], _NOT_FOUND
        steps = [step for step in steps if job.is_alive(step.pid)]
        readable = [step.pid for step in steps if job.read_process(step.pid) or not step.is_worker]
        others = tuple(step.pid for step in steps if not step.is_worker)
        asks = self._find_asking_part(pid, call, readable)
        if call.kind == "locks":
            lock = file_locks.find_awaited_lock(pid, call.descriptors[0], job.proc_root)
        else:
            lock = self._find_lock([step.pid for step in steps], rank)
        holding = self._find_holding(lock) if call.kind == "locks" else ()
        if asks is not None or lock is not None:
            return Chain(None, (*others, *holding), holding, asks, lock)
        visited = {pid, *(step.pid for step in steps)}
        end = _choose(filter(None, (direct_end, end, self._find_end(steps, pid, visited))))
        if end is None:
            end = self._find_pool(pid, call) or self._find_client(pid, call, threads, awaits_any=awaits_any)
        return Chain(end, others, tuple(visited.intersection(job.dumped) - {pid}))

    def _find_direct_end(self, pid: int, call: SystemCall) -> Awaited | None:
        """Return the person at the terminal from which the call reads, or its peer outside of the job; else None."""
        links = self.job.links(pid, call.descriptors[:MOST_DESCRIPTORS]) if call.kind == "receives" else ()
        if (terminal := next((link for link in links if _TERMINAL.fullmatch(link)), None)) is not None:
            return Awaited(name=f"a person at the terminal {terminal}")
        return _name_peers("", self._find_outside(pid, call))

    def _find_outside(self, pid: int, call: SystemCall) -> list[Connection]:
        held = self.job.connections_of(pid) or {}
        return [held[number] for number in call.descriptors if number in held and self.job.leaves_job(held[number])]

    def _find_steps(self, pid: int, call: SystemCall, server: int | None) -> list[_Step]:
        """Return the processes behind a call: children, workers, or the process at the other end.

        Raises LookupError if another process can end the call, and it was not found.
        """
        children = procfs.read_children(pid, self.job.proc_root)
        if call.kind == "awaits_child":
            if call.child is not None:
                root = self.job.proc_root
                every = procfs.read_children(pid, root, _MOST_SEARCHED)
                named = [child for child in every if procfs.read_inner_pid(child, root) == call.child]
                children = tuple(itertools.chain(named, *(procfs.read_children(child, root) for child in named)))
            return [_Step(child, self._name("its child", child, pid), may_answer=True) for child in children]
        ways = self._find_ways(pid, call) if call.kind == "receives" else frozenset[str]()
        holders = [child for child in children if self.job.has_end(child, ways)]
        # A child that is dumped and runs the program of the rank is a data-loader worker, which was forked from it.
        program, dumped = self.job.program(pid), self.job.dumped
        strangers = [child for child in holders if child not in dumped or self.job.program(child) != program]
        if strangers:
            return [_Step(child, self._name("its child", child, pid), may_answer=True) for child in strangers]
        workers = self._find_workers(pid, ways, {pid})
        if call.kind == "receives" and not system_calls.calls_by_name()[call.name].on:
            raise LookupError(call.name)  # a message queue or a semaphore of System V
        if workers or server is not None or len(call.descriptors) != 1:
            return workers
        kind, other = self.job.find_other_end(pid, call.descriptors[0]) or ("", pid)
        if other in self.job.rank_of or other == pid:
            is_worker = other not in self.job.ranks and self.job.rank_of.get(other) == self.job.rank_of.get(pid)
            return [_Step(other, self._name("its worker", other), is_worker=True)] if is_worker else []
        if kind == "connection" or self.job.is_of_job(other):
            return [_Step(other, self._name("process", other))]
        is_asked = kind == "unix" or call.descriptors[:1] == (_STDIN,)  # a person may answer there
        may_answer = is_asked and self.job.is_alive(other)
        return [
            _Step(each, self._name("process", each), may_answer=may_answer)
            for each in (other, *procfs.read_children(other, self.job.proc_root))
        ]

    def _find_driver(self, pid: int, call: SystemCall) -> list[_Step]:
        """Return the process that drives the ranks, if a call receives from it; no launcher has to start it."""
        driver = next(filter(None, (self.job.find_driver(pid, peer) for peer in self._find_outside(pid, call))), None)
        return [] if driver is None else [_Step(driver, self._name("process", driver))]

    def _find_ways(self, pid: int, call: SystemCall) -> frozenset[str]:
        """Return the far ends of the pipes, FIFOs and Unix sockets of a call. Files count: one may be a FIFO."""
        links = frozenset(self.job.links(pid, call.descriptors[:MOST_DESCRIPTORS]))
        return self.job.far_ends(links) | frozenset(filter(is_pipe_or_path, links))

    def _find_workers(self, pid: int, ways: frozenset[str], visited: set[int]) -> list[_Step]:
        """Return the processes of the same rank that hold one of these ends, and add them to `visited`."""
        rank = self.job.rank_of.get(pid, pid)
        every = [other for other, its in self.job.rank_of.items() if its == rank and other not in visited]
        workers = [worker for worker in every[:_MOST_PROCESSES] if self.job.has_end(worker, ways)]
        visited.update(workers)
        return [_Step(worker, self._name("its worker", worker), is_worker=True) for worker in workers]

    def _name(self, relation: str, pid: int, ancestor: int | None = None) -> str:
        stat = procfs.read_stat(f"{self.job.proc_root}/{pid}")
        is_child = stat is None or ancestor in (None, stat.parent_pid)
        return f"{relation if is_child else 'its descendant'} {pid} ({words.printable(stat.comm) if stat else ''})"

    # --- the end ------------------------------------------------------------------------------------------------------

    def _find_end(self, steps: Sequence[_Step], pid: int, visited: set[int]) -> Awaited | None:
        """Return the end of a wait of `pid` behind these processes; None without any. Further ones join `visited`."""
        ends: list[Awaited] = []
        for _ in range(_MOST_STEPS):
            further: list[_Step] = []
            for step in steps:
                end = self._find_end_of(step)
                ways = self._find_ways_of_worker(step.pid) if step.is_worker and end is None else frozenset[str]()
                behind = self._find_workers(step.pid, ways, visited)
                further += [each._replace(name=f"{step.name}, which waits for {each.name}") for each in behind]
                if end is None and not behind:
                    is_cycle = self.job.has_end(pid, ways)
                    name = f"{step.name}, which waits for this process" if is_cycle else step.name
                    end = Awaited(name=name, end="cycle" if is_cycle else "process")
                ends += [end] if end is not None else []
            steps = further
        return _choose(ends)

    def _find_ways_of_worker(self, worker: int) -> frozenset[str]:
        call = self.job.read_call(worker)
        return frozenset() if call is None or call.kind != "receives" else self._find_ways(worker, call)

    def waits_for(self, worker: int, pid: int) -> bool:
        """True if the main thread of a worker receives only from process `pid`."""
        return self.job.has_end(pid, self._find_ways_of_worker(worker))

    def find_awaited(self, pid: int, workers: Set[int]) -> set[int]:
        """Return the workers, of any rank, for which a thread of process `pid` waits.

        Such a worker holds the lock that the thread needs, or has the other end of its pipe or Unix socket. At the
        other end, workers that wait for orders of their rank, or at a lock for their turn to do so, do not count.
        """
        calls = [*filter(None, (self.job.read_call(pid), *self.job.thread_calls(pid).values()))]
        awaited = [call.descriptors[0] for call in calls if call.kind == "locks"]
        locks = (file_locks.find_awaited_lock(pid, descriptor, self.job.proc_root) for descriptor in awaited)
        ways = frozenset[str]().union(*(self._find_ways(pid, call) for call in calls if call.kind == "receives"))
        ends = (worker for worker in workers if self.job.has_end(worker, ways))
        busy = {
            worker
            for worker in ends
            if not self.waits_for(worker, self.job.rank_of[worker])
            and shared_locks.awaited_address(worker, self.job.proc_root) is None
        }
        return busy | (workers & {lock.holder_pid for lock in locks if lock is not None})

    def _find_end_of(self, step: _Step) -> Awaited | None:
        """Return the end of a chain at this process, if its state, its call or its connections show it; else None."""
        state = procfs.read_state(step.pid, self.job.proc_root)
        if state is None or state[1] in STOPPED_STATES | BLOCKED_STATES:
            does = "has ended" if state is None else "is stopped" if state[1] in STOPPED_STATES else "is in state D"
            return Awaited(name=f"{step.name}, which {does}", end="held")
        call, held = self.job.read_call(step.pid), (self.job.connections_of(step.pid) or {}).values()
        if step.may_answer and (connected := [each for each in held if self.job.leaves_job(each)]):
            return _name_peers(f"{step.name}, connected to ", connected)
        if step.may_answer:
            is_connected = any(connection.is_open for connection in held)
            return Awaited(name=step.name, end="process" if is_connected else "program")
        if call is None or not step.is_worker:
            return None
        if call.kind == "sleeps":
            return Awaited(name=f"{step.name}, which sleeps", end="sleeps")
        peers = self._find_outside(step.pid, call) or self._find_asked(step.pid)
        return _name_peers(f"{step.name}, which waits for ", peers)

    # --- other ranks --------------------------------------------------------------------------------------------------

    def _find_holding(self, lock: FileLock | None) -> tuple[int, ...]:
        """Return the holder of a lock and its children, which may work for it; () if a rank of the job holds it."""
        holder = None if lock is None else lock.holder_pid
        if holder is None or holder in self.job.ranks:
            return ()
        every = (holder, *procfs.read_children(holder, self.job.proc_root, _MOST_CHILDREN))
        return tuple(one for one in every if self.job.read_process(one) or self.job.is_alive(one))

    def _find_lock(self, children: Sequence[int], rank: int) -> FileLock | None:
        """Return a file lock that another rank holds and for which a child waits; None if there is none."""
        calls = ((child, self.job.read_call(child)) for child in children[:_MOST_CHILDREN])
        locks = (
            file_locks.find_awaited_lock(child, call.descriptors[0], self.job.proc_root)
            for child, call in calls
            if call is not None and call.kind == "locks"
        )
        held = (lock for lock in locks if lock is not None and lock.holder_pid in self.job.ranks - {rank})
        return next((replace(lock, by_child=True) for lock in held), None)

    def _find_asking_part(self, pid: int, call: SystemCall, children: Sequence[int]) -> AsksRank | None:
        """Return the part of a process that receives from another rank; None if no part does.

        Of other threads, only a call on a single descriptor counts, because threads of gloo and NCCL watch all their
        connections.
        """
        job, rank = self.job, self.job.rank_of.get(pid, pid)
        if job.receives_from_rank(pid, call, rank):
            return "main"
        if any(job.receives_from_rank(child, job.read_call(child), rank) for child in children[:_MOST_CHILDREN]):
            return "child"
        if call.name != "futex" or pid != rank:
            return None
        single = (other for other in job.thread_calls(pid).values() if len(other.descriptors) == 1)
        return "thread" if any(job.receives_from_rank(pid, other, rank) for other in single) else None

    def _find_client(
        self, pid: int, call: SystemCall, threads: Sequence[Thread], *, awaits_any: bool
    ) -> Awaited | None:
        """Return the peer outside of the job for which another thread of a rank waits; None without one.

        The main thread waits at a lock or an event, as in the clients of object stores and message queues. Threads of
        compiled code count, except those of torch, gloo, NCCL and CUDA, and in a job with ranks on other nodes. Of the
        threads with a Python stack, which are `threads`, only event loops count: others report and poll by themselves.
        With `awaits_any`, those count, too, that wait for clients: a request of theirs may end the wait. Threads of
        compiled code that do so serve a library, as in each process of Ray.
        """
        job, numbers = self.job, call.descriptors[:MOST_DESCRIPTORS]
        is_event = call.kind == "receives" and bool(numbers) and all(self._is_own(pid, number) for number in numbers)
        if not threads or not (call.name == "futex" or is_event) or job.rank_of.get(pid) != pid:
            return None
        python = {thread.thread_id: thread for thread in threads if thread.frames}
        folder = job.proc_root / str(pid) / "task"
        for thread, its_call in job.thread_calls(pid).items():
            stack = python.get(str(procfs.read_inner_pid(thread, folder)))
            serves = awaits_any and stack is not None and self.awaits_clients(pid, its_call)
            if (awaited := _CLIENTS if serves else self._find_peer(pid, its_call, is_event=is_event)) is None:
                continue
            comm = pseudo_files.read_or_empty(f"{folder}/{thread}/comm").strip()
            is_client = stack is None and not (job.has_ranks_on_other_nodes or _OF_LIBRARIES.search(comm))
            is_loop = stack is not None and any(
                stack_frames.plain_name(frame.function) == _EVENT_LOOP for frame in stack.frames
            )
            if serves or is_client or is_loop:
                name = words.printable(comm if stack is None else stack.name or comm)
                return replace(awaited, name=f"its thread {name}, which waits for {awaited.name}")
        return None

    def _find_peer(self, pid: int, call: SystemCall, *, is_event: bool) -> Awaited | None:
        """Return the silent peer outside of the job for which a thread waits; None without one.

        It is asked for an answer. Below an event it may also send unasked, or connect later, as in a message queue.
        """
        peers = [each for each in self._find_outside(pid, call) if self._is_asked(each, may_send=is_event)]
        if peers or not is_event:
            return _name_peers("", peers)
        unix = (number for number in call.descriptors if self.job.unix_socket(pid, number) is not None)
        is_open = self.awaits_clients(pid, call) or not all(self._is_own(pid, number) for number in unix)
        return _NOT_FOUND if is_open else None

    def _is_own(self, pid: int, number: int) -> bool:
        """True if a descriptor is an eventfd, or a Unix socket with both ends in the process: a thread of it writes."""
        unix = self.job.unix_socket(pid, number)
        is_pair = unix is not None and unix.peer in self.job.sockets.get(pid, {}).values()
        return is_pair or next(self.job.links(pid, (number,)), "") == _EVENTS

    def awaits_clients(self, pid: int, call: SystemCall) -> bool:
        """True if a thread waits on a listening socket, and on no TCP connection within the job."""
        held = self.job.connections_of(pid) or {}
        tcp = [held[one] for one in call.descriptors if one in held]
        unix = filter(None, (self.job.unix_socket(pid, one) for one in call.descriptors))
        listens = any(one.listens for one in tcp) or any(one.listens for one in unix)
        is_apart = all(one.listens or self.job.leaves_job(one) for one in tcp)
        return call.kind == "receives" and listens and is_apart

    def _find_pool(self, pid: int, call: SystemCall) -> Awaited | None:
        """Return the peer outside of the job from which a worker awaits an answer, as in a pool of processes.

        The main thread waits at a lock for another thread, which receives from the workers. None without such a peer.
        """
        if call.name != "futex" or self.job.rank_of.get(pid) != pid:
            return None
        received = (its for its in self.job.thread_calls(pid).values() if its.kind == "receives")
        ways = frozenset[str]().union(*(self._find_ways(pid, its) for its in received))
        workers = self._find_workers(pid, ways, {pid})
        ends = (_name_peers(f"{each.name}, which waits for ", self._find_asked(each.pid)) for each in workers)
        return next(filter(None, ends), None)

    def _find_asked(self, pid: int) -> list[Connection]:
        """Return the connections to peers outside of the job from which any thread of a process awaits an answer."""
        held = (self.job.connections_of(pid) or {}).values()
        if not any(each.awaits_answer and self.job.leaves_job(each) for each in held):
            return []  # without reading the calls of all threads
        calls = filter(None, (self.job.read_call(pid), *self.job.thread_calls(pid).values()))
        return [each for its in calls for each in self._find_outside(pid, its) if self._is_asked(each)]

    def _is_asked(self, connection: Connection, *, may_send: bool = False) -> bool:
        """True if a peer outside of the job has not answered since an answer was first seen awaited.

        With `may_send` no question is needed: the peer may send unasked.
        """
        carried = connection.carried_bytes
        is_asked = (may_send or connection.awaits_answer) and self.job.leaves_job(connection)
        return is_asked and self.first_bytes.setdefault(connection.inode, carried) == carried


def _choose(ends: Iterable[Awaited]) -> Awaited | None:
    """Return the end that decides; None if that is a process of the job, or if there are no ends."""
    chosen = min(ends, key=lambda awaited: _WEIGHTS.index(awaited.end), default=None)
    return None if chosen is None or chosen.end == "process" else chosen


def _name_peers(before: str, peers: Sequence[Connection]) -> Awaited | None:
    """Return the first of these peers outside of the job, with the words before its name; None without peers."""
    if not peers:
        return None
    is_lost = all(connection.is_lost for connection in peers)
    return Awaited(name=before + sockets.format_end(peers[0].remote), end="lost" if is_lost else "outside")
