"""Reading what stands in the memory of other processes: in a thread, since the lock of that memory may never be free.

/proc/PID/environ, cmdline and maps take mmap_lock (fs/proc/base.c, fs/proc/task_mmu.c). Any user can hold that of his
own process for good, in a write to a file system of his own that does not answer; who reads then waits in state D
until the process lets go, or until the reader itself is killed. So one thread reads process after process, and is left
behind where one does not answer in time; another one goes on. A process is not asked again while a thread waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from hangwatch.model import Fault, ProcessId

DEADLINE_SECONDS = 0.25
MOST = 32
MOST_OF_ONE_OWNER = 4
"""Threads left behind. Any user can make a process that does not answer, and must not use up what all share."""

Answer = TypeVar("Answer")


class Target(NamedTuple):
    """A process, and whose it is by the kernel's word; who `holds_gpu` is asked whoever else lets threads wait."""

    id: ProcessId
    owner: str
    holds_gpu: bool = False


class Readers:
    """The threads that read, and those that were left behind, by the process that they wait for."""

    def __init__(self, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._stuck: dict[ProcessId, str] = {}

    def left_behind(self) -> int:
        """How many threads wait for a process now."""
        with self._lock:
            return len(self._stuck)

    def read(
        self, targets: Iterable[Target], read: Callable[[ProcessId], Answer], seconds: float | None = None
    ) -> dict[ProcessId, Answer | Fault]:
        """What `read` returns of each target, or the fault that it gave no answer; for about so many seconds.

        Those that are missing in the answer were not asked: the time was over, or too many threads wait already, of
        this owner or of all. Raises what `read` raises.
        """
        end = time.monotonic() + seconds if seconds is not None else float("inf")
        answers: dict[ProcessId, Answer | Fault] = {}
        late = Counter[str]()  # a process may let go and lock again
        left = list(targets)
        while left := self._askable(left, answers, late):
            turn = _Turn(left, read, end)
            thread = threading.Thread(target=self._run, args=(turn,), name="memory", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # as many as TasksMax or ulimit -u allow
                break
            while not turn.ended.wait(self._deadline_seconds) and not self._leave_behind(turn, thread):
                pass
            if turn.error is not None:
                raise turn.error
            answers.update(turn.answers)
            if not turn.is_left_behind:
                break
            late[turn.target.owner] += 1
            answers[turn.target.id] = _no_answer(turn.target.id)
        return answers

    def read_one(self, target: Target, read: Callable[[ProcessId], Answer]) -> Answer | Fault:
        """As `read`, of one process; not to be asked is a fault, too."""
        answers = self.read([target], read)
        return answers[target.id] if target.id in answers else _not_asked(target)

    def _askable(
        self, targets: list[Target], answers: dict[ProcessId, Answer | Fault], late: Counter[str]
    ) -> list[Target]:
        with self._lock:
            stuck = dict(self._stuck)
        answers.update((target.id, _no_answer(target.id)) for target in targets if target.id in stuck)
        most = Counter(stuck.values()) | late
        return [
            target
            for target in targets
            if target.id not in answers
            and most[target.owner] < MOST_OF_ONE_OWNER
            and (len(stuck) < MOST or target.holds_gpu)
        ]

    def _run(self, turn: _Turn[Answer]) -> None:
        try:
            for target in turn.targets:
                now = time.monotonic()
                if now > turn.end:
                    break
                with self._lock:
                    turn.target, turn.began_monotonic_seconds = target, now
                answer = turn.read(target.id)
                with self._lock:
                    if turn.is_left_behind:
                        break
                    turn.answers[target.id] = answer
        except BaseException as error:  # told in the thread that asked
            turn.error = error
        with self._lock:
            if turn.is_left_behind:
                del self._stuck[turn.target.id]
        turn.ended.set()

    def _leave_behind(self, turn: _Turn[Answer], thread: threading.Thread) -> bool:
        """Give up on the process that this thread reads, if it hangs there; who waits for a core does not hang."""
        with self._lock:
            seconds = time.monotonic() - turn.began_monotonic_seconds
            if seconds >= self._deadline_seconds and not turn.ended.is_set() and not _is_runnable(thread):
                turn.is_left_behind = True
                self._stuck[turn.target.id] = turn.target.owner
            return turn.is_left_behind


class _Turn(Generic[Answer]):
    """What one thread works through."""

    def __init__(self, targets: list[Target], read: Callable[[ProcessId], Answer], end: float) -> None:
        self.targets, self.read, self.end = targets, read, end
        self.answers: dict[ProcessId, Answer] = {}
        self.target = targets[0]
        self.began_monotonic_seconds = time.monotonic()
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.is_left_behind = False


def _is_runnable(thread: threading.Thread) -> bool:
    """By its state in proc_pid_stat(5); so is one that has just ended."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_bytes()
    except OSError:
        return True
    return stat.rpartition(b")")[2].split()[:1] == [b"R"]


def _no_answer(target: ProcessId) -> Fault:
    return Fault(
        subject=f"pid {target.pid}",
        reason="NoAnswer",
        detail=f"the memory of pid {target.pid} is locked: who reads its environment or maps waits for good",
        remedy=f"mend the file system that it waits for: /proc/{target.pid}/stack, /proc/{target.pid}/mountinfo",
    )


def _not_asked(target: Target) -> Fault:
    detail = f"too many threads wait for processes of {target.owner}, or of all, whose memory is locked"
    return Fault(subject=f"pid {target.id.pid}", reason="NotAsked", detail=detail)


SHARED = Readers()
