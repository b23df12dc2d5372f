"""Search for members of a process group that enqueued different operations, or the same ones in another order. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from hangwatch.collectives.process_groups import ProcessGroup
from hangwatch.model import EnqueuedOperation
from hangwatch.model.flight_records import Library

_MOST_ORDERED = 8

Sides: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The different operations that ranks of one group enqueued, as text, each with its ranks; most ranks first."""


def find_other_operation(groups: Sequence[ProcessGroup]) -> Sides:
    """Return the different operations that members enqueued under the same number while a rank waits in it.

    () if they agree. The names of the operations are compared first, then their data types, then their sizes.
    """
    for group in groups:
        numbers = {wait.number for wait in group.waits.values()}
        if len(group.generations) > 1:
            continue
        enqueued: dict[int, dict[int, EnqueuedOperation]] = defaultdict(dict)
        for rank, records in group.records.items():
            for operation in records.operations:
                if operation.number in numbers and not operation.is_p2p and operation.operation != "coalesced":
                    enqueued[operation.number][rank] = operation
        for number in sorted(enqueued):
            for key_of, say in _COMPARED:
                sides: dict[Any, list[int]] = defaultdict(list)
                for rank, operation in enqueued[number].items():
                    if any(key := key_of(operation)):
                        sides[key].append(rank)
                if len(sides) > 1:
                    return _sorted({say(*key): ranks for key, ranks in sides.items()})
    return ()


# The values of an operation that must be equal on all ranks, and their text.
_COMPARED: tuple[tuple[Callable[[EnqueuedOperation], tuple[Any, ...]], Callable[..., str]], ...] = (
    (lambda one: (one.operation,), lambda operation: operation),
    (
        lambda one: (one.operation, one.dtypes) if one.dtypes else (),
        lambda operation, dtypes: f"{operation} of {', '.join(dtypes)}",
    ),
    (
        lambda one: (one.operation, one.sizes) if one.sizes else (),
        lambda operation, sizes: f"{operation} of {' '.join(map(str, sizes))}",
    ),
)


def find_other_order(groups: Sequence[ProcessGroup]) -> Sides:
    """Return the ranks that enqueued the open operations of two groups in opposite orders. () if there are none."""
    open_operations: dict[tuple[int, Library], list[tuple[int, int]]] = defaultdict(list)
    for index, group in enumerate(groups):
        for rank, wait in group.waits.items():
            open_operations[rank, group.library].append((wait.order, index))
    ranks_by_order: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (rank, _), ordered in open_operations.items():
        for (_, first), (_, second) in itertools.combinations(sorted(ordered)[:_MOST_ORDERED], 2):
            ranks_by_order[first, second].append(rank)
    for (first, second), ranks in sorted(ranks_by_order.items()):
        if first < second and (others := ranks_by_order.get((second, first))):
            before, after = groups[first], groups[second]
            return _sorted({f"{before} before {after}": ranks, f"{after} before {before}": others})
    return ()


def _sorted(sides: Mapping[str, Sequence[int]]) -> Sides:
    sorted_ranks = ((text, tuple(sorted(ranks))) for text, ranks in sides.items())
    return tuple(sorted(sorted_ranks, key=lambda side: (-len(side[1]), side)))
