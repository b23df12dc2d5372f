"""Limits that keep one job owner from using up what all owners share: a fair queue, and a rate limit."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
CAPTURES_PER_OWNER = 4
MINUTE_SECONDS = 60.0
_SERVED_KEPT = 256


class FairQueue(Generic[T]):
    """A queue of work for several owners. The next item is from the waiting owner that was served longest ago.

    At most `most_per_owner` items of one owner run at the same time, so threads stay free for other owners. `work` does
    an item. `begin` calls a function in another thread.
    """

    def __init__(
        self, most_per_owner: int, work: Callable[[T], None], begin: Callable[[Callable[[], None]], object]
    ) -> None:
        self._most_per_owner, self._work, self._begin = most_per_owner, work, begin
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, T]] = []
        self._running = Counter[str]()
        self._served: dict[str, None] = {}  # owners, the last served at the end

    def add(self, owner: str, item: T, most_waiting: int | None = None) -> bool:
        """Queue an item. Return False without queueing it if `most_waiting` items of this owner are waiting."""
        with self._lock:
            if most_waiting is not None and sum(other == owner for other, _ in self._waiting) >= most_waiting:
                return False
            self._waiting.append((owner, item))
        self._begin(self.do_next)
        return True

    def do_next(self) -> None:
        """Do the next item; nothing if no waiting owner may run another item.

        If another item may run after it, that one begins in another thread.
        """
        turn = self._take()
        if turn is None:
            return
        owner, item = turn
        try:
            self._work(item)
        finally:
            if self._end(owner):
                self._begin(self.do_next)

    def _take(self) -> tuple[str, T] | None:
        """Return the next item, which counts as running; None if no waiting owner may run another item."""
        with self._lock:
            order = {owner: place for place, owner in enumerate(self._served, 1)}
            eligible = [at for at, (owner, _) in enumerate(self._waiting) if self._may_run(owner)]
            if not eligible:
                return None
            owner, item = self._waiting.pop(min(eligible, key=lambda at: order.get(self._waiting[at][0], 0)))
            self._running[owner] += 1
            self._served.pop(owner, None)
            self._served[owner] = None
            waiting_owners = {other for other, _ in self._waiting}
            while len(self._served) > _SERVED_KEPT and (oldest := next(iter(self._served))) not in waiting_owners:
                del self._served[oldest]
            return owner, item

    def _end(self, owner: str) -> bool:
        """Mark an item of this owner as finished. Return True if one of the waiting items may run now."""
        with self._lock:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]
            return any(self._may_run(other) for other, _ in self._waiting)

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
        """Count a request of this owner and return None. At a limit, count nothing and return the limit's name."""
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
