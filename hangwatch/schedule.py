"""Scheduled tasks of the daemon, and fair queues between job owners.

Tasks that can block run in separate thread pools: power samples, slow tasks, captures, checks. A tick that is late
runs late instead of being skipped. A task never runs twice at the same time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures.thread import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
CAPTURES_PER_OWNER = 4
MINUTE_SECONDS = 60.0
_SERVED_KEPT = 256

log = logging.getLogger(__name__)

Pool = Literal["sample", "counters", "recorders", "slow", "capture", "remains", "store", "checks", "hooks"]
_THREADS: dict[Pool, int] = {
    "sample": 1,
    "counters": 1,
    "recorders": 1,  # the first reading of a library takes seconds
    "slow": 3,
    "capture": 8,  # mostly sleeping; the number of concurrent py-spy processes has its own limit
    "remains": 2,  # gdb reads a core for at most a minute
    "store": 1,  # a disk that does not respond must not block a capture
    "checks": 8,
    "hooks": 4,  # programs of the site, which may be slow
}


@dataclass(frozen=True)
class QueuedItem(Generic[T]):
    """A queued item and its owner."""

    owner: str
    item: T


class FairQueue(Generic[T]):
    """A queue of items of several owners. The next item is from the waiting owner that was served longest ago.

    At most `most_per_owner` items of one owner run at the same time, so threads stay free for other owners.
    """

    def __init__(self, most_per_owner: int) -> None:
        self._lock = threading.Lock()
        self._most_per_owner = most_per_owner
        self._waiting: list[QueuedItem[T]] = []
        self._running = Counter[str]()
        self._served: dict[str, None] = {}  # owners, the last served at the end

    def add(self, owner: str, item: T, most_waiting: int | None = None) -> bool:
        """Queue an item. Return False without queueing it if `most_waiting` items of this owner are waiting."""
        with self._lock:
            if most_waiting is not None and sum(turn.owner == owner for turn in self._waiting) >= most_waiting:
                return False
            self._waiting.append(QueuedItem(owner, item))
            return True

    def take(self) -> QueuedItem[T] | None:
        """Return the next item; None if no waiting owner may run another item.

        The item counts as running until `end` is called.
        """
        with self._lock:
            order = {owner: place for place, owner in enumerate(self._served, 1)}
            eligible = [at for at, turn in enumerate(self._waiting) if self._may_run(turn.owner)]
            if not eligible:
                return None
            turn = self._waiting.pop(min(eligible, key=lambda at: order.get(self._waiting[at].owner, 0)))
            self._running[turn.owner] += 1
            self._served.pop(turn.owner, None)
            self._served[turn.owner] = None
            waiting_owners = {other.owner for other in self._waiting}
            while len(self._served) > _SERVED_KEPT and (oldest := next(iter(self._served))) not in waiting_owners:
                del self._served[oldest]
            return turn

    def end(self, queued: QueuedItem[T]) -> bool:
        """Mark an item as finished. Return True if one of the waiting items may run now."""
        with self._lock:
            self._running[queued.owner] -= 1
            if not self._running[queued.owner]:
                del self._running[queued.owner]
            return any(self._may_run(other.owner) for other in self._waiting)

    def _may_run(self, owner: str) -> bool:
        return self._running[owner] < self._most_per_owner


class RateLimit:
    """A limit on requests per minute: of all owners together, and of each owner.

    With `is_shared_out`, every owner may make an equal part of `per_minute` requests, even if the limit for all
    owners is reached. The total may then be slightly above `per_minute`.
    """

    def __init__(
        self, per_minute: int, per_minute_of_owner: int, clock: Callable[[], float], *, is_shared_out: bool = False
    ) -> None:
        self._per_minute, self._per_minute_of_owner = per_minute, per_minute_of_owner
        self._is_shared_out = is_shared_out
        self._clock = clock
        self._begun: deque[tuple[float, str]] = deque()

    def begin(self, owner: str) -> Literal["per_minute", "per_minute_of_owner"] | None:
        """Count a request of this owner and return None.

        If a limit is reached, count nothing and return the limit's name.
        """
        now = self._clock()
        while self._begun and now - self._begun[0][0] >= MINUTE_SECONDS:
            self._begun.popleft()
        begun = Counter(begun_owner for _, begun_owner in self._begun)
        if begun[owner] >= self._per_minute_of_owner:
            return "per_minute_of_owner"
        part = max(1, self._per_minute // len({*begun, owner})) if self._is_shared_out else 0
        if len(self._begun) >= self._per_minute and begun[owner] >= part:
            return "per_minute"
        self._begun.append((now, owner))
        return None


class _Threads(ThreadPoolExecutor):
    """Threads of a pool. If the kernel lets no further thread start, the existing threads do the work later."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()  # the work is queued already
        except RuntimeError:
            if not self._threads:
                raise


@dataclass
class _Task:
    """A task that runs every `seconds`; `due_at` is its next run. See `_now`."""

    name: str
    pool: Pool
    run: Callable[[], None]
    seconds: float
    due_at: float
    is_running: bool = False


def _now() -> float:
    """Return the time in seconds. A step of the wall clock must neither delay a task nor repeat it."""
    return time.monotonic()


class Schedule:
    """A schedule of tasks. It calls `missed` with the name of a task that is due while its last run has not ended."""

    def __init__(self, missed: Callable[[str], None]) -> None:
        self._missed = missed
        self._changed = threading.Condition()
        self._tasks: dict[str, _Task] = {}
        self._first: list[tuple[Pool, Callable[[], None]]] = []  # what to run once at the start
        self._threads: dict[Pool, _Threads] = {}  # empty while the schedule does not run

    def run_every(self, seconds: float, pool: Pool, name: str, call: Callable[..., None], *arguments: object) -> None:
        """Call a function every `seconds` in a thread of `pool`. The first call is after `seconds`."""
        with self._changed:
            self._tasks[name] = _Task(name, pool, partial(call, *arguments), seconds, _now() + seconds)
            self._changed.notify()

    def run_once(self, pool: Pool, call: Callable[..., None], *arguments: object) -> None:
        """Call a function as soon as a thread of the pool is free. Do nothing if the schedule was stopped."""
        run = partial(self._run, getattr(call, "__name__", pool), partial(call, *arguments))
        with self._changed:
            if self._threads:
                self._threads[pool].submit(run)
            else:
                self._first.append((pool, run))

    def run_within(self, seconds: float, name: str) -> None:
        """Run a task at most `seconds` from now, unless it is due earlier. The interval of the task does not change."""
        with self._changed:
            if self._threads and name in self._tasks:
                task = self._tasks[name]
                task.due_at = min(task.due_at, _now() + seconds)
                self._changed.notify()

    def start(self) -> None:
        """Start the schedule. The first thread of each pool starts at once, while the kernel lets threads start."""
        with self._changed:
            for pool, threads in _THREADS.items():
                self._threads[pool] = _Threads(threads, pool)
                self._threads[pool].submit(int)
            for pool, run in self._first:
                self._threads[pool].submit(run)
        threading.Thread(target=self._start_tasks, name="schedule", daemon=True).start()

    def stop(self) -> None:
        """Stop the schedule without waiting for running tasks."""
        with self._changed:
            for pool in self._threads.values():
                pool.shutdown(wait=False)
            self._threads = {}
            self._changed.notify()

    def _start_tasks(self) -> None:
        """Start each task when it is due, until the schedule is stopped."""
        while (missed := self._start_due_tasks()) is not None:
            for name in missed:
                self._run(name, partial(self._missed, name))

    def _start_due_tasks(self) -> list[str] | None:
        """Wait until tasks are due, and start them. Return the names of those that still run; None after `stop`."""
        with self._changed:
            while self._threads:
                now = _now()
                due = [task for task in self._tasks.values() if task.due_at <= now]
                missed = [task.name for task in due if task.is_running]
                for task in due:
                    task.due_at += task.seconds * ((now - task.due_at) // task.seconds + 1)
                    if not task.is_running:
                        task.is_running = True
                        self._threads[task.pool].submit(self._run_task, task)
                if missed:
                    return missed
                next_at = min((task.due_at for task in self._tasks.values()), default=now + MINUTE_SECONDS)
                self._changed.wait(next_at - now)
        return None

    def _run_task(self, task: _Task) -> None:
        self._run(task.name, task.run)
        task.is_running = False

    def _run(self, name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException:
            log.exception("%s failed; please report this", name)
