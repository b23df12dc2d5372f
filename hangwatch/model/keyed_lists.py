"""Lists of values by a key. Pure."""

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def list_by_key(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Return the values of each key, in the order of `pairs`, which are (key, value)."""
    listed: dict[K, list[T]] = {}
    for key, value in pairs:
        listed.setdefault(key, []).append(value)
    return listed
