"""Pure: which incidents go where all do not fit: of the owner of most the oldest, and never one that is open.

So nobody's hangs push out what others have less of, and a node of one owner keeps as many as ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

_CRASHES_OF_ALL = 2  # what crashes may take of the store: one part of so many
_CRASHES_OF_ONE = 8  # and those of one owner
_OPEN_OF_ONE = 2  # and what the open incidents of one owner may take from others


class Stored(NamedTuple):
    """One incident of a store, and whose it is by the kernel's word; `crash_of`: whose crash, None where it is none."""

    name: str
    owner: str
    size_bytes: int
    is_open: bool = False
    crash_of: str | None = None


def surplus(newest_first: Sequence[Stored], max_incidents: int, max_bytes: int) -> tuple[str, ...]:
    """The names of what goes, newest first.

    Crashes go before that which are more than an eighth of either bound for one owner, or than half for all: ranks
    that die cost nothing. What is open counts whole against the rest of its owner's, and against that of others up to
    half of either bound. The newest stays where nothing is open, if it takes no more than that, too, or there is no
    other owner.
    """
    gone = _crowding([one for one in newest_first if not one.is_open], max_incidents, max_bytes)
    by_owner: dict[str, list[Stored]] = {}
    for one in newest_first:
        if one.name not in gone:
            by_owner.setdefault(one.owner, []).append(one)
    newest = None if not newest_first or any(one.is_open for one in newest_first) else newest_first[0]
    is_small = newest is not None and newest.size_bytes <= max_bytes // _OPEN_OF_ONE
    spared = newest.name if newest is not None and (is_small or len(by_owner) == 1) else None
    owned = [_Owned(of_owner, spared) for of_owner in by_owner.values()]
    for kept in owned:
        while kept.closed and (kept.count > max_incidents or kept.size_bytes > max_bytes):
            gone.add(kept.drop_oldest())
    places = {stored.name: place for place, stored in enumerate(newest_first)}
    most_count, most_bytes = max(1, max_incidents // _OPEN_OF_ONE), max_bytes // _OPEN_OF_ONE
    while True:
        counts = [kept.counted(most_count) for kept in owned]
        sizes = [kept.counted_bytes(most_bytes) for kept in owned]
        if sum(counts) > max_incidents:
            taken = counts
        elif sum(sizes) > max_bytes:
            taken = sizes
        else:
            break
        # Of owners that keep as much, the one whose oldest is the oldest of all.
        found = [
            (size, places[kept.closed[-1].name], kept) for size, kept in zip(taken, owned, strict=True) if kept.closed
        ]
        if not found:
            break
        gone.add(max(found, key=lambda candidate: candidate[:2])[2].drop_oldest())
    return tuple(one.name for one in newest_first if one.name in gone)


def in_turn(owners: Iterable[str]) -> list[int]:
    """The places of these, each owner's first before any owner's second, and so on."""
    turns, seen = [], Counter[str]()
    for place, owner in enumerate(owners):
        turns.append((seen[owner], place))
        seen[owner] += 1
    return [place for _, place in sorted(turns)]


class _Owned:
    """What one owner keeps, while it shrinks; `closed` are those that may go, newest first."""

    def __init__(self, newest_first: Collection[Stored], spared: str | None) -> None:
        self.closed = [one for one in newest_first if not one.is_open and one.name != spared]
        self._open = sum(one.is_open for one in newest_first)
        self._open_bytes = sum(one.size_bytes for one in newest_first if one.is_open)
        self.count = len(newest_first)
        self.size_bytes = sum(one.size_bytes for one in newest_first)

    def counted(self, most_open: int) -> int:
        return self.count - max(0, self._open - most_open)

    def counted_bytes(self, most_open: int) -> int:
        return self.size_bytes - max(0, self._open_bytes - most_open)

    def drop_oldest(self) -> str:
        oldest = self.closed.pop()
        self.count -= 1
        self.size_bytes -= oldest.size_bytes
        return oldest.name


def _crowding(newest_first: Iterable[Stored], max_incidents: int, max_bytes: int) -> set[str]:
    """The crashes that are too many or too big, of one owner or of all."""
    crowding: set[str] = set()
    kept, kept_bytes = Counter[str](), Counter[str]()
    for one in newest_first:
        if one.crash_of is None:
            continue
        bounds = ((f"of {one.crash_of}", _CRASHES_OF_ONE), ("all", _CRASHES_OF_ALL))
        for whose, part in bounds:
            is_full = kept[whose] >= max(1, max_incidents // part)
            if is_full or (kept[whose] and kept_bytes[whose] + one.size_bytes > max_bytes // part):
                crowding.add(one.name)
                break
        else:
            for whose, _ in bounds:
                kept[whose] += 1
                kept_bytes[whose] += one.size_bytes
    return crowding
