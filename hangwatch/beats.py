"""The beats of the daemon: calls on a schedule, in pools of their own. The one door to APScheduler.

Whatever can block runs in a pool where it blocks nothing else: power samples, slow beats, captures, checks. A beat that
comes late runs late rather than not at all, and never twice at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler

T = TypeVar("T")
_SERVED_KEPT = 256

log = logging.getLogger(__name__)

Pool = Literal["sample", "slow", "capture", "store", "checks"]
_THREADS: dict[Pool, int] = {
    "sample": 1,
    "slow": 3,
    "capture": 1,  # never two captures at a time: they would compete for the same cores
    "store": 1,  # a disk that does not answer must not hold up a capture
    "checks": 8,
}


class Turns(Generic[T]):
    """What waits for the one thread of captures: the owner who was served longest ago is next, whoever asks more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, T]] = []
        self._served: dict[str, None] = {}  # by when, the latest last

    def add(self, owner: str, wanted: T) -> None:
        """Let it wait; of one owner in order."""
        with self._lock:
            self._waiting.append((owner, wanted))

    def take(self) -> T:
        """The next. Raises ValueError where nothing waits."""
        with self._lock:
            order = {owner: place for place, owner in enumerate(self._served, 1)}
            place = min(range(len(self._waiting)), key=lambda place: order.get(self._waiting[place][0], 0))
            owner, wanted = self._waiting.pop(place)
            self._served = dict.fromkeys((*(o for o in self._served if o != owner), owner))
            still = {name for name, _ in self._waiting}
            while len(self._served) > _SERVED_KEPT and (old := next(iter(self._served))) not in still:
                del self._served[old]
            return wanted


class _Scheduler(BackgroundScheduler):  # type: ignore[misc]  # APScheduler has no types
    def remove_job(self, job_id: str, jobstore: str | None = None) -> None:
        """Remove it where it still is: a scheduler that is stopped meanwhile knows no job any more, and raises."""
        with contextlib.suppress(JobLookupError):
            super().remove_job(job_id, jobstore)


class Beats:
    """A schedule that begins with `start`. `missed` is called with the name of a beat whose last turn is not over."""

    def __init__(self, missed: Callable[[str], None]) -> None:
        self._missed = missed
        logging.getLogger("apscheduler").setLevel(logging.ERROR)  # it logs each run, and what we report ourselves
        self._scheduler = _Scheduler(
            executors={pool: ThreadPoolExecutor(threads) for pool, threads in _THREADS.items()},
            job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
            timezone="UTC",
        )
        self._scheduler.add_listener(self._on_trouble, EVENT_JOB_MAX_INSTANCES | EVENT_JOB_ERROR)

    def every(self, seconds: float, pool: Pool, name: str, call: Callable[..., None], *arguments: object) -> None:
        """Call this every so many seconds, the first time after as many."""
        self._scheduler.add_job(call, "interval", args=arguments, seconds=seconds, id=name, executor=pool)

    def once(self, pool: Pool, call: Callable[..., None], *arguments: object) -> None:
        """Call this as soon as a thread of the pool is free."""
        self._scheduler.add_job(call, args=arguments, executor=pool)

    def start(self) -> None:
        """Begin."""
        self._scheduler.start()

    def stop(self) -> None:
        """Begin no more; what runs is not waited for."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _on_trouble(self, event: Any) -> None:
        if isinstance(event, JobExecutionEvent) and event.exception is not None:
            log.error("%s failed; please report this: %s\n%s", event.job_id, event.exception, event.traceback)
        else:
            self._missed(str(event.job_id))
