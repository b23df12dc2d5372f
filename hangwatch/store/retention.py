"""The choice of incidents to remove when the store is full. Pure.

The oldest incidents of the owner with the most incidents are removed first. Open incidents are never removed. So
many hangs of one owner do not displace the few incidents of another. A single owner can use the whole store.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from hangwatch.model import list_by_key

_CRASHES_OF_ALL = 2  # all crashes may use 1/2 of the store
_CRASHES_OF_ONE = 8  # the crashes of one owner: 1/8
_OPEN_OF_ONE = 2  # the open incidents of one owner may displace others from 1/2 of the store


class Stored(NamedTuple):
    """An incident in the store, and its owner. `crash_of` is the owner of a crash; None for a hang."""

    name: str
    owner: str
    size_bytes: int
    is_open: bool = False
    crash_of: str | None = None


def surplus(newest_first: Sequence[Stored], max_incidents: int, max_bytes: int) -> tuple[str, ...]:
    """Return the names of the incidents to remove, newest first.

    Crashes have lower limits, because any user can make ranks die: an eighth of the limits for one owner, and half
    of them for all owners together. Crashes over these limits are removed first. Open incidents count fully against
    the other incidents of their owner. Against incidents of other owners they count up to half of either limit.

    If no incident is open, the newest incident stays if it is smaller than half of the byte limit, or if there is
    only one owner.
    """
    gone = _surplus_crashes([stored for stored in newest_first if not stored.is_open], max_incidents, max_bytes)
    by_owner = list_by_key((stored.owner, stored) for stored in newest_first if stored.name not in gone)
    newest = None if not newest_first or any(stored.is_open for stored in newest_first) else newest_first[0]
    is_small = newest is not None and newest.size_bytes <= max_bytes // _OPEN_OF_ONE
    spared = newest.name if newest is not None and (is_small or len(by_owner) == 1) else None
    owned = [_Owned(of_owner, spared) for of_owner in by_owner.values()]
    for kept in owned:
        while kept.closed and (kept.count > max_incidents or kept.size_bytes > max_bytes):
            gone.add(kept.drop_oldest())
    places = {stored.name: place for place, stored in enumerate(newest_first)}
    most_count, most_bytes = max(1, max_incidents // _OPEN_OF_ONE), max_bytes // _OPEN_OF_ONE
    while True:
        used = [kept.count - max(0, kept.open_count - most_count) for kept in owned]
        if sum(used) <= max_incidents:
            used = [kept.size_bytes - max(0, kept.open_bytes - most_bytes) for kept in owned]
            if sum(used) <= max_bytes:
                break
        # the owner that uses most; of equal owners, the one with the oldest incident
        candidates = [
            (size, places[kept.closed[-1].name], kept) for size, kept in zip(used, owned, strict=True) if kept.closed
        ]
        if not candidates:
            break
        gone.add(max(candidates, key=lambda candidate: candidate[:2])[2].drop_oldest())
    return tuple(stored.name for stored in newest_first if stored.name in gone)


class _Owned:
    """The incidents of one owner that are kept so far. `closed` are those that may be removed, newest first."""

    def __init__(self, newest_first: Collection[Stored], spared: str | None) -> None:
        self.closed = [stored for stored in newest_first if not stored.is_open and stored.name != spared]
        self.open_count = sum(stored.is_open for stored in newest_first)
        self.open_bytes = sum(stored.size_bytes for stored in newest_first if stored.is_open)
        self.count = len(newest_first)
        self.size_bytes = sum(stored.size_bytes for stored in newest_first)

    def drop_oldest(self) -> str:
        oldest = self.closed.pop()
        self.count -= 1
        self.size_bytes -= oldest.size_bytes
        return oldest.name


def _surplus_crashes(newest_first: Iterable[Stored], max_incidents: int, max_bytes: int) -> set[str]:
    """Return the names of the crashes over the limits of one owner or of all owners."""
    surplus_names: set[str] = set()
    kept, kept_bytes = Counter[str](), Counter[str]()
    for stored in newest_first:
        if stored.crash_of is None:
            continue
        limits = ((f"of {stored.crash_of}", _CRASHES_OF_ONE), ("all", _CRASHES_OF_ALL))
        if any(
            kept[key] >= max(1, max_incidents // part)
            or (kept[key] and kept_bytes[key] + stored.size_bytes > max_bytes // part)
            for key, part in limits
        ):
            surplus_names.add(stored.name)
            continue
        for key, _ in limits:
            kept[key] += 1
            kept_bytes[key] += stored.size_bytes
    return surplus_names
