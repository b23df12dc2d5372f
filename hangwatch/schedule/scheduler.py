"""Scheduled tasks of the daemon. The only importer of APScheduler.

Tasks that can block run in separate thread pools: power samples, slow tasks, captures, checks. A tick that is late
runs late instead of being skipped. A task never runs twice at the same time.
"""

import contextlib
import logging
from collections.abc import Callable
from concurrent import futures
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler

_LATE = timedelta(seconds=60)  # a job that is later than this and its interval: the clock was set forward

log = logging.getLogger(__name__)

Pool = Literal["sample", "counters", "recorders", "slow", "capture", "crashes", "store", "checks", "hooks"]
_THREADS: dict[Pool, int] = {
    "sample": 1,
    "counters": 1,
    "recorders": 1,  # the first reading of a library takes seconds
    "slow": 3,
    # Mostly sleeping; the number of concurrent py-spy processes has its own limit
    "capture": 8,
    "crashes": 2,  # the file system of an owner may not respond for 10 s
    "store": 1,  # a disk that does not respond must not block a capture
    "checks": 8,
    "hooks": 4,  # programs of the site, which may be slow
}


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
