"""Follow the wait of a rank beyond its own call: to its worker, to a native thread, or to the driver of its job.

A chain has at most four steps and visits no process twice. The kernel reports all facts; no process is contacted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import words
from hangwatch.model import ENDED_STATES, STOPPED_STATES, Awaited, SystemCall, Thread
from hangwatch.probes import pseudo_files
from hangwatch.probes.network import sockets
from hangwatch.probes.network.sockets import Connection
from hangwatch.probes.process import blocked_call, main_thread, procfs

_MOST_STEPS = 4
_MOST_WORKERS = 64  # of one step
_MOST_THREADS = 64
_MOST_DESCRIPTORS = 16  # of one call
_EVENTS = "anon_inode:[eventfd]"
_HELD = STOPPED_STATES | ENDED_STATES
_OF_LIBRARIES = re.compile("gloo|pt_|nccl|cuda", re.IGNORECASE)  # names of threads of torch, gloo, NCCL and CUDA


class Chains(NamedTuple):
    """The processes of a job on this node, as the chains of one capture see them.

    `rank_of` has the pid of the rank of each rank and worker. The functions take a pid: `connections_of` returns its
    connections by descriptor, `links_of` the targets of all its descriptors. `leaves_job` is true for an open
    connection to a peer outside of the job.
    """

    rank_of: Mapping[int, int]
    connections_of: Callable[[int], Mapping[int, Connection] | None]
    links_of: Callable[[int], Collection[str]]
    leaves_job: Callable[[Connection], bool]
    proc_root: Path

    def find_end(self, pid: int, pipes: Collection[str]) -> Awaited | None:
        """Return the peer outside of the job, or the sleep, for which a worker at the other end of a pipe waits.

        None if no worker waits for one, or if one of these workers is stopped or has ended.
        """
        return self._find_end(pid, pipes, {pid})

    def _find_end(self, pid: int, pipes: Collection[str], visited: set[int]) -> Awaited | None:
        workers = list(self._find_workers(pid, pipes, visited))
        visited |= set(workers)
        states = [procfs.read_state(worker, self.proc_root) for worker in workers]
        if len(visited) > _MOST_STEPS * _MOST_WORKERS or any(state is None or state[1] in _HELD for state in states):
            return None
        ends = (self._find_end_of_worker(worker, visited) for worker in workers)
        return next(filter(None, ends), None)

    def _find_workers(self, pid: int, pipes: Collection[str], visited: Collection[int]) -> Iterator[int]:
        """Yield the processes of the same rank that hold one of these pipes."""
        rank = self.rank_of.get(pid, pid)
        workers = [other for other, its in self.rank_of.items() if its == rank and other not in visited]
        return (worker for worker in workers[:_MOST_WORKERS] if any(link in pipes for link in self.links_of(worker)))

    def _find_end_of_worker(self, worker: int, visited: set[int]) -> Awaited | None:
        call = main_thread.read_call(worker, self.proc_root)
        if call is None:
            return None
        stat = procfs.read_stat(f"{self.proc_root}/{worker}")
        name = f"its worker {worker} ({'' if stat is None else words.printable(stat.comm)})"
        if call.kind == "sleeps":
            return Awaited(name=f"{name}, which sleeps")
        if call.kind != "receives":
            return None
        held = self.connections_of(worker) or {}
        outside = [held[number] for number in call.descriptors if number in held and self.leaves_job(held[number])]
        if outside:
            lost = all(peer.is_lost for peer in outside)
            return Awaited(name=f"{name}, which waits for {sockets.format_end(outside[0].remote)}", is_lost=lost)
        links = (
            blocked_call.link_of(worker, number, self.proc_root) for number in call.descriptors[:_MOST_DESCRIPTORS]
        )
        pipes = frozenset(link for link in links if link and link.startswith("pipe:"))
        end = self._find_end(worker, pipes, visited) if pipes else None
        return None if end is None else replace(end, name=f"{name}, which waits for {end.name}")

    def find_client(self, pid: int, call: SystemCall, threads: Sequence[Thread]) -> Awaited | None:
        """Return the peer outside of the job from which a native thread of a rank awaits an answer; None without one.

        The main thread waits at a lock or an eventfd, as in the clients of object stores and message queues. A thread
        with a Python stack does not count, nor do the threads of torch, gloo, NCCL and CUDA. `threads` are those with a
        Python stack.
        """
        is_event = call.kind == "receives" and any(
            blocked_call.link_of(pid, number, self.proc_root) == _EVENTS
            for number in call.descriptors[:_MOST_DESCRIPTORS]
        )
        if not threads or not (call.name == "futex" or is_event) or self.rank_of.get(pid) != pid:
            return None
        questions = {
            descriptor: connection
            for descriptor, connection in (self.connections_of(pid) or {}).items()
            if connection.awaits_answer and self.leaves_job(connection)
        }
        python = {thread.thread_id for thread in threads if thread.frames}
        for thread in main_thread.other_threads(pid, self.proc_root, _MOST_THREADS) if questions else ():
            folder = self.proc_root / str(pid) / "task"
            its_call = main_thread.read_call(pid, self.proc_root, thread)
            if its_call is None or its_call.kind != "receives" or questions.keys().isdisjoint(its_call.descriptors):
                continue
            name = words.printable(pseudo_files.read_or_empty(f"{folder}/{thread}/comm").strip())
            if not _OF_LIBRARIES.search(name) and str(procfs.read_inner_pid(thread, folder)) not in python:
                peers = [questions[number] for number in its_call.descriptors if number in questions]
                peer = sockets.format_end(peers[0].remote)
                is_lost = all(connection.is_lost for connection in peers)
                return Awaited(name=f"its thread {name}, which waits for {peer}", is_lost=is_lost)
        return None
