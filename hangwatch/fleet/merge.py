"""Pure: the groups of many nodes as one."""

from __future__ import annotations

from collections.abc import Iterable

from hangwatch.hang.grouping import merge_groups
from hangwatch.model import Grouping


def merge(a: Grouping, b: Grouping) -> Grouping:
    """The grouping of both; associative and commutative, `merge(group(a), group(b)) == group(a + b)`."""
    return merge_all((a, b))


def merge_all(groupings: Iterable[Grouping]) -> Grouping:
    """The grouping of all, in one pass; the largest world size that somebody knows counts."""
    parts = tuple(groupings)
    sizes = [part.world_size for part in parts if part.world_size is not None]
    return merge_groups(
        (group for part in parts for group in part.groups),
        max(sizes, default=None),
        (note for part in parts for note in part.notes),
    )
