"""Read environ, cmdline and maps of processes in threads, because the lock of their memory may never be free.

These files take mmap_lock (fs/proc/base.c, fs/proc/task_mmu.c). Any user can hold this lock for ever in its own
process, by a write to its own file system that does not respond. A reader then waits in state D until the process
releases the lock, or until the reader is killed.

So one thread reads process after process. If a process does not respond in time, the thread is abandoned, and another
thread continues. A process is not read again while a thread waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from hangwatch.model import Fault, ProcessId
from hangwatch.probes.base import procfs

DEADLINE_SECONDS = 0.25
MOST = 32
MOST_OF_ONE_OWNER = 4
"""Limit of abandoned threads per owner. Any user can cause abandoned threads. None may use up the total limit."""

Answer = TypeVar("Answer")


class Target(NamedTuple):
    """A process and its owner. If `holds_gpu`, the process is read even if the total limit is reached."""

    id: ProcessId
    owner: str
    holds_gpu: bool = False


class Readers:
    """The reading threads. Abandoned threads are kept by the process that they wait for."""

    def __init__(self, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._stuck: dict[ProcessId, str] = {}

    def read(
        self, targets: Iterable[Target], read: Callable[[ProcessId], Answer], seconds: float | None = None
    ) -> dict[ProcessId, Answer | Fault]:
        """Return the result of `read` for each target, or a fault if the target did not respond. Takes about `seconds`.

        A target that was not read is missing in the result. Either the time was over, or too many threads already wait,
        for this owner or in total. Raises the errors that `read` raises.
        """
        end = time.monotonic() + seconds if seconds is not None else float("inf")
        answers: dict[ProcessId, Answer | Fault] = {}
        late = Counter[str]()  # a process may release its lock and take it again
        remaining = list(targets)
        while remaining := self._askable(remaining, answers, late):
            batch = _Batch(remaining, read, end)
            thread = threading.Thread(target=self._run, args=(batch,), name="memory", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # TasksMax or ulimit -u allows no more threads
                break
            while not batch.ended.wait(self._deadline_seconds) and not self._abandon(batch, thread):
                pass
            if batch.error is not None:
                raise batch.error
            answers.update(batch.answers)
            if not batch.is_abandoned:
                break
            late[batch.target.owner] += 1
            answers[batch.target.id] = _no_answer(batch.target.id)
        return answers

    def read_one(self, target: Target, read: Callable[[ProcessId], Answer]) -> Answer | Fault:
        """Return the result of `read` for one process; a fault if the process was not read."""
        answers = self.read([target], read)
        if target.id in answers:
            return answers[target.id]
        detail = f"too many threads already wait for the memory of processes, of {target.owner} or in total"
        return Fault(subject=f"pid {target.id.pid}", reason="NotAsked", detail=detail)

    def _askable(
        self, targets: list[Target], answers: dict[ProcessId, Answer | Fault], late: Counter[str]
    ) -> list[Target]:
        with self._lock:
            stuck = dict(self._stuck)
        answers.update((target.id, _no_answer(target.id)) for target in targets if target.id in stuck)
        counts = Counter(stuck.values()) | late
        return [
            target
            for target in targets
            if target.id not in answers
            and counts[target.owner] < MOST_OF_ONE_OWNER
            and (len(stuck) < MOST or target.holds_gpu)
        ]

    def _run(self, batch: _Batch[Answer]) -> None:
        try:
            for target in batch.targets:
                now = time.monotonic()
                if now > batch.end:
                    break
                with self._lock:
                    batch.target, batch.began_monotonic_seconds = target, now
                answer = batch.read(target.id)
                with self._lock:
                    if batch.is_abandoned:
                        break
                    batch.answers[target.id] = answer
        except BaseException as error:  # raised in the calling thread
            batch.error = error
        with self._lock:
            if batch.is_abandoned:
                del self._stuck[batch.target.id]
        batch.ended.set()

    def _abandon(self, batch: _Batch[Answer], thread: threading.Thread) -> bool:
        """Abandon the thread if it hangs, and return True then. A thread that waits for a CPU does not hang."""
        with self._lock:
            seconds = time.monotonic() - batch.began_monotonic_seconds
            if seconds >= self._deadline_seconds and not batch.ended.is_set() and not _is_runnable(thread):
                batch.is_abandoned = True
                self._stuck[batch.target.id] = batch.target.owner
            return batch.is_abandoned


class _Batch(Generic[Answer]):
    """The targets of one thread, and its progress."""

    def __init__(self, targets: list[Target], read: Callable[[ProcessId], Answer], end: float) -> None:
        self.targets, self.read, self.end = targets, read, end
        self.answers: dict[ProcessId, Answer] = {}
        self.target = targets[0]
        self.began_monotonic_seconds = time.monotonic()
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.is_abandoned = False


def _is_runnable(thread: threading.Thread) -> bool:
    """True if the thread's state in proc_pid_stat(5) is `R`. Also true if it has just ended."""
    stat = procfs.read_stat(f"/proc/self/task/{thread.native_id}")
    return stat is None or stat.state == "R"


def _no_answer(target: ProcessId) -> Fault:
    return Fault(
        subject=f"pid {target.pid}",
        reason="NoAnswer",
        detail=f"the memory of pid {target.pid} is locked: its environment and maps cannot be read",
        remedy=f"repair the file system that it waits for: see /proc/{target.pid}/stack, /proc/{target.pid}/mountinfo",
    )


SHARED = Readers()
