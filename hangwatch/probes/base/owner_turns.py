"""The order in which a shared thread works for the owners of jobs: they take turns, and pause between attempts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from hangwatch.model import list_by_key

T = TypeVar("T")


def order_by_turns(
    owned: Iterable[tuple[str, T]],
    is_first: Callable[[T], bool] = lambda _: False,
    counts: Mapping[str, int] = MappingProxyType({}),
    late: Collection[str] = (),
) -> list[tuple[str, T]]:
    """Return items, given with their owners: those that are `is_first`, then those of all owners in turn.

    `counts` are the items that an owner has had: owners with many come later. Owners in `late` come last.
    """
    turns, seen = [], Counter(counts)
    for owner, item in owned:
        turns.append(((not is_first(item), owner in late, seen[owner]), owner, item))
        seen[owner] += 1
    return [(owner, item) for _, owner, item in sorted(turns, key=itemgetter(0))]


class OwnerTurns:
    """The time that one thread has spent for each owner. The next item is from the owner with the least time.

    So an owner waits for at most one item of each other owner, even if all items of that owner are slow. Time that an
    owner did not use is not saved: an owner without an item begins anew, level with the others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    def take(self, items: Iterable[tuple[str, T]], end: float) -> Iterator[T]:
        """Yield items, given with their owners, until `end`. The order of the items of one owner is kept.

        The time until the next item is asked for counts for the owner.
        """
        waiting = list_by_key(items)
        level = min((seconds for owner, seconds in self._seconds.items() if owner in waiting), default=0.0)
        self._seconds = {owner: self._seconds.get(owner, level) for owner in waiting}
        while waiting and (began := self._clock()) < end:
            owner = min(waiting, key=self._seconds.__getitem__)
            item = waiting[owner].pop(0)
            if not waiting[owner]:
                del waiting[owner]
            try:
                yield item
            finally:
                self._seconds[owner] += self._clock() - began


_FIRST_SECONDS, _LAST_SECONDS, _GROWTH = 5.0, 15.0, 1.5


class GrowingPause(NamedTuple):
    """The time of the next attempt at a fact that appears after the start of a process, and the pause after it."""

    due_monotonic_seconds: float = 0.0
    seconds: float = _FIRST_SECONDS

    def begin(self, now: float) -> GrowingPause:
        """Return the pause after an attempt at the time `now`."""
        return GrowingPause(now + self.seconds, min(self.seconds * _GROWTH, _LAST_SECONDS))
