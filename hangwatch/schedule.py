"""Scheduled tasks of the daemon, and fair queues between job owners. The only importer of APScheduler.

Tasks that can block run in separate thread pools: power samples, slow tasks, captures, checks. A tick that is late
runs late instead of being skipped. A task never runs twice at the same time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Generic, Literal, TypeVar

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler

T = TypeVar("T")
CAPTURES_PER_OWNER = 4
MINUTE_SECONDS = 60.0
_SERVED_KEPT = 256
_LATE = timedelta(seconds=60)  # a job that is later than this and its interval: the clock was set forward

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


class _Threads(futures.ThreadPoolExecutor):
    """Threads of a pool. If the kernel lets no further thread start, the existing threads do the work later."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()  # the work is queued already
        except RuntimeError:
            if not self._threads:
                raise


class _Executor(ThreadPoolExecutor):  # type: ignore[misc]
    """The executor of a pool. Its first thread starts at once, while the kernel lets threads start."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._pool = _Threads(threads)

    def start(self, scheduler: BackgroundScheduler, alias: str) -> None:
        """Start the executor. The scheduler calls this method."""
        super().start(scheduler, alias)
        self._pool.submit(int)


class _Scheduler(BackgroundScheduler):  # type: ignore[misc]  # APScheduler has no types
    def remove_job(self, job_id: str, jobstore: str | None = None) -> None:
        """Remove a job. A job that no longer exists is not an error: a stopped scheduler has no jobs."""
        with contextlib.suppress(JobLookupError):
            super().remove_job(job_id, jobstore)

    def _process_jobs(self) -> float | None:
        """Run the due jobs. Return the seconds until the next one is due; None if there is none.

        APScheduler compares wall clock times. After a step back of the clock by a day, no job would run for a day.
        After a step forward, it would count every run in between.
        """
        now = datetime.now(timezone.utc)
        for job in self.get_jobs():
            due = getattr(job, "next_run_time", None)  # None: added after the scheduler was stopped
            interval = getattr(job.trigger, "interval", timedelta(0))
            if due is not None and not now - interval - _LATE <= due <= now + interval:
                with contextlib.suppress(JobLookupError):
                    job.modify(next_run_time=min(max(due, now), now + interval))
        return super()._process_jobs()  # type: ignore[no-any-return]


class Schedule:
    """A schedule of tasks. It calls `missed` with the name of a task that is due while its last run has not ended."""

    def __init__(self, missed: Callable[[str], None]) -> None:
        self._missed = missed
        logging.getLogger("apscheduler").setLevel(logging.ERROR)  # below this level it logs each run
        self._scheduler = _Scheduler(
            executors={pool: _Executor(threads) for pool, threads in _THREADS.items()},
            job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
            timezone="UTC",
        )
        self._scheduler.add_listener(self._on_trouble, EVENT_JOB_MAX_INSTANCES | EVENT_JOB_ERROR)

    def run_every(self, seconds: float, pool: Pool, name: str, call: Callable[..., None], *arguments: object) -> None:
        """Call a function every `seconds` in a thread of `pool`. The first call is after `seconds`."""
        self._scheduler.add_job(call, "interval", args=arguments, seconds=seconds, id=name, executor=pool)

    def run_once(self, pool: Pool, call: Callable[..., None], *arguments: object) -> None:
        """Call a function as soon as a thread of the pool is free."""
        self._scheduler.add_job(call, args=arguments, executor=pool)

    def run_within(self, seconds: float, name: str) -> None:
        """Run a task at most `seconds` from now, unless it is due earlier. The interval of the task does not change."""
        task = self._scheduler.get_job(name)
        latest = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        due = getattr(task, "next_run_time", None)  # None before `start`
        if task is not None and due is not None and due > latest:
            with contextlib.suppress(JobLookupError):
                task.modify(next_run_time=latest)

    def start(self) -> None:
        """Start the schedule."""
        self._scheduler.start()

    def stop(self) -> None:
        """Stop the schedule without waiting for running tasks."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _on_trouble(self, event: Any) -> None:
        if isinstance(event, JobExecutionEvent) and event.exception is not None:
            log.error("%s failed; please report this: %s\n%s", event.job_id, event.exception, event.traceback)
        else:
            self._missed(str(event.job_id))
