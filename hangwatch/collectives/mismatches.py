"""Search for members of a process group that enqueued different operations, or the same ones in another order. Pure."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from hangwatch.collectives.process_groups import ProcessGroup
from hangwatch.model import EnqueuedOperation, list_by_key

_MOST_ORDERED = 8
_EXCHANGE = "all_to_all"
_NAMES_BY_BYTES = {
    1: "Byte Char Bool Float8_e4m3fn Float8_e4m3fnuz Float8_e5m2 Float8_e5m2fnuz Float8_e8m0fnu",
    2: "Short Half BFloat16 UInt16",
    4: "Int Float UInt32 ComplexHalf",
    8: "Long Double UInt64 ComplexFloat",
    16: "ComplexDouble",
}
_ELEMENT_BYTES = {name: size for size, names in _NAMES_BY_BYTES.items() for name in names.split()}
"""The size of an element by its data type (torch/headeronly/core/ScalarType.h)."""

Sides: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The different operations that ranks of one group enqueued, as text, each with its ranks; most ranks first."""


_Form: TypeAlias = tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...]]
"""The name, data types and sizes of an operation."""


def find_other_operation(group: ProcessGroup) -> Sides:
    """Return the different operations that members enqueued under the same number while a rank waits in it.

    () if they agree. The names of the operations are compared first, then their data types, then their sizes. Tensors
    with equal numbers of bytes count as equal: an operation on them ends, whatever their types and shapes are.
    """
    enqueued = _find_enqueued(group) if group.waits and group.newest else {}
    for number in sorted(enqueued):
        alike: dict[_Form, list[int]] = defaultdict(list)
        is_balanced = _is_balanced(enqueued[number].values(), len(group.members))
        forms: dict[Hashable, EnqueuedOperation] = {}  # one for each number of bytes
        for rank, operation in enqueued[number].items():
            form = forms.setdefault(_count_bytes(operation.dtypes, operation.sizes), operation)
            sizes = () if operation.operation == _EXCHANGE and is_balanced else form.sizes
            alike[operation.operation, form.dtypes, sizes].append(rank)
        for key_of, say in _COMPARED if len(alike) > 1 else ():
            keys = ((key_of(*form), ranks) for form, ranks in alike.items())
            sides = list_by_key((key, rank) for key, ranks in keys if any(key) for rank in ranks)
            if len(sides) > 1:
                return _sorted({say(*key): ranks for key, ranks in sides.items()})
    return ()


@functools.lru_cache(maxsize=1024)  # most ranks enqueue the same
def _count_bytes(dtypes: tuple[str, ...], sizes: tuple[tuple[int, ...], ...]) -> Hashable:
    """Return the bytes of each tensor; the types and numbers of elements if a type or a size is unknown."""
    counts = tuple(map(math.prod, sizes))
    if len(counts) != len(dtypes) or not _ELEMENT_BYTES.keys() >= set(dtypes):
        return dtypes, counts
    return tuple(count * _ELEMENT_BYTES[dtype] for count, dtype in zip(counts, dtypes, strict=True))


def _find_enqueued(group: ProcessGroup) -> dict[int, dict[int, EnqueuedOperation]]:
    """Return what each member enqueued under each number at which a rank waits."""
    numbers = {wait.number for wait in group.waits.values()}
    lowest = min(numbers)
    enqueued: dict[int, dict[int, EnqueuedOperation]] = defaultdict(dict)
    for rank, records in group.records.items():
        for operation in reversed(records.operations):
            if operation.is_p2p or operation.operation == "coalesced":
                continue
            if operation.number < lowest:
                break
            if operation.number in numbers:
                enqueued[operation.number].setdefault(rank, operation)
    return enqueued


def _is_balanced(operations: Collection[EnqueuedOperation], members: int) -> bool:
    """True unless the members send another number of elements in an all_to_all than they receive."""
    sizes = [operation.sizes for operation in operations if operation.operation == _EXCHANGE and operation.sizes]
    return len(sizes) < members or sum(sent[0] for sent, _ in sizes) == sum(taken[0] for _, taken in sizes)


# The values of an operation that must be equal on all ranks, and their text.
_COMPARED: tuple[tuple[Callable[..., tuple[Any, ...]], Callable[..., str]], ...] = (
    (lambda operation, _dtypes, _sizes: (operation,), lambda operation: operation),
    (
        lambda operation, dtypes, _sizes: (operation, dtypes) if dtypes else (),
        lambda operation, dtypes: f"{operation} of {', '.join(dtypes)}",
    ),
    (
        lambda operation, _dtypes, sizes: (operation, sizes) if sizes else (),
        lambda operation, sizes: f"{operation} of {' '.join(map(str, sizes))}",
    ),
)


def find_other_order(groups: Sequence[ProcessGroup]) -> Sides:
    """Return the ranks that enqueued the open operations of two groups in opposite orders. () if there are none."""
    open_operations = list_by_key(
        ((rank, group.library), (wait.order, index))
        for index, group in enumerate(groups)
        for rank, wait in group.waits.items()
    )
    ranks_by_order = list_by_key(
        ((first, second), rank)
        for (rank, _), ordered in open_operations.items()
        for (_, first), (_, second) in itertools.combinations(sorted(ordered)[:_MOST_ORDERED], 2)
    )
    for (first, second), ranks in sorted(ranks_by_order.items()):
        if first < second and (others := ranks_by_order.get((second, first))):
            before, after = groups[first], groups[second]
            return _sorted({f"{before} before {after}": ranks, f"{after} before {before}": others})
    return ()


def _sorted(sides: Mapping[str, Sequence[int]]) -> Sides:
    sorted_ranks = ((text, tuple(sorted(ranks))) for text, ranks in sides.items())
    return tuple(sorted(sorted_ranks, key=lambda side: (-len(side[1]), side)))
