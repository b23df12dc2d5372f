"""The beats of the daemon: calls on a schedule, in pools of their own. The one door to APScheduler.

Whatever can block runs in a pool where it blocks nothing else: power samples, slow beats, captures, checks. A beat that
comes late runs late rather than not at all, and never twice at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler

T = TypeVar("T")
CAPTURES_PER_OWNER = 4
MINUTE_SECONDS = 60.0
_SERVED_KEPT = 256

log = logging.getLogger(__name__)

Pool = Literal["sample", "slow", "capture", "remains", "store", "checks", "hooks"]
_THREADS: dict[Pool, int] = {
    "sample": 1,
    "slow": 3,
    "capture": 8,  # they sleep most of the time; how many py-spys run at once is bounded for all of them together
    "remains": 2,  # a core takes gdb a minute at most
    "store": 1,  # a disk that does not answer must not hold up a capture
    "checks": 8,
    "hooks": 4,  # programs of the site, which may take their time
}


class Turn(NamedTuple, Generic[T]):
    """What an owner wanted, and its turn has come."""

    owner: str
    wanted: T


class Turns(Generic[T]):
    """What waits for a thread of captures: the owner who was served longest ago is next, whoever asks more.

    `most_per_owner` are under way of one owner at a time: the other threads are for those who come next.
    """

    def __init__(self, most_per_owner: int) -> None:
        self._lock = threading.Lock()
        self._most_per_owner = most_per_owner
        self._waiting: list[Turn[T]] = []
        self._under_way = Counter[str]()
        self._served: dict[str, None] = {}  # by when, the latest last

    def add(self, owner: str, wanted: T, most_waiting: int | None = None) -> bool:
        """Let it wait; of one owner in order. False, and it does not, where so many of this owner wait already."""
        with self._lock:
            if most_waiting is not None and sum(turn.owner == owner for turn in self._waiting) >= most_waiting:
                return False
            self._waiting.append(Turn(owner, wanted))
            return True

    def take(self) -> Turn[T] | None:
        """The next, which is under way until `end`; None where nobody waits who may have another one."""
        with self._lock:
            order = {owner: place for place, owner in enumerate(self._served, 1)}
            free = [at for at, turn in enumerate(self._waiting) if self._is_free(turn.owner)]
            if not free:
                return None
            turn = self._waiting.pop(min(free, key=lambda at: order.get(self._waiting[at].owner, 0)))
            self._under_way[turn.owner] += 1
            self._served = dict.fromkeys((*(owner for owner in self._served if owner != turn.owner), turn.owner))
            still = {other.owner for other in self._waiting}
            while len(self._served) > _SERVED_KEPT and (old := next(iter(self._served))) not in still:
                del self._served[old]
            return turn

    def end(self, turn: Turn[T]) -> bool:
        """It is over; whether another one that had to wait for it may be taken now."""
        with self._lock:
            self._under_way[turn.owner] -= 1
            if not self._under_way[turn.owner]:
                del self._under_way[turn.owner]
            return any(self._is_free(other.owner) for other in self._waiting)

    def _is_free(self, owner: str) -> bool:
        return self._under_way[owner] < self._most_per_owner


class Pace:
    """How many may begin within a minute, over all owners and of one, which is what any user can ask for at will.

    Where it `is_shared_out`, an owner who has begun less than an equal part of all is not refused for what others did:
    then somewhat more than `per_minute` may begin.
    """

    def __init__(
        self, per_minute: int, per_minute_of_owner: int, clock: Callable[[], float], *, is_shared_out: bool = False
    ) -> None:
        self._per_minute, self._per_minute_of_owner = per_minute, per_minute_of_owner
        self._is_shared_out = is_shared_out
        self._clock = clock
        self._begun: deque[tuple[float, str]] = deque()

    def begin(self, owner: str) -> Literal["per_minute", "per_minute_of_owner"] | None:
        """Count one of this owner; where there were too many it does not count, and is told of which."""
        now = self._clock()
        while self._begun and now - self._begun[0][0] >= MINUTE_SECONDS:
            self._begun.popleft()
        begun = Counter(one for _, one in self._begun)
        if begun[owner] >= self._per_minute_of_owner:
            return "per_minute_of_owner"
        part = max(1, self._per_minute // len({*begun, owner})) if self._is_shared_out else 0
        if len(self._begun) >= self._per_minute and begun[owner] >= part:
            return "per_minute"
        self._begun.append((now, owner))
        return None


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

    def within(self, seconds: float, name: str) -> None:
        """Let the next turn of this beat come within so many seconds; the ones after it follow at its pace."""
        beat = self._scheduler.get_job(name)
        latest = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        due = getattr(beat, "next_run_time", None)  # none before `start`
        if beat is not None and due is not None and due > latest:
            with contextlib.suppress(JobLookupError):
                beat.modify(next_run_time=latest)

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
