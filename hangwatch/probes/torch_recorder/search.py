"""Find a flight recorder without symbols: an object of its shape in the heap, to which the library's data points."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence

from hangwatch.probes.process.memory_image import Place, Read, UnreadableError
from hangwatch.probes.torch_recorder import decode
from hangwatch.probes.torch_recorder.layouts import Layout

MOST_DATA_BYTES = 32 << 20
MOST_OBJECTS = 1 << 16
_PART_BYTES = 1 << 20
_ALIGNED = 16  # malloc(3)


def search(
    read: Read, data: Sequence[Place], writable: Sequence[Place], layouts: Sequence[Layout]
) -> list[tuple[int, Layout]]:
    """Return every (address, layout) that could be an active recorder. Raises UnreadableError.

    `data` and `writable` hold pairs (first address, end).
    """
    if sum(end - first for first, end in data) > MOST_DATA_BYTES:
        raise UnreadableError("TooLarge", f"the library has more than {MOST_DATA_BYTES >> 20} MiB of data")
    places = [(at, min(_PART_BYTES, end - at)) for first, end in data for at in range(first, end, _PART_BYTES)]
    objects = sorted({word for raw in read(places) for word in _pointers(raw, data, writable)})
    if len(objects) > MOST_OBJECTS:
        raise UnreadableError("TooLarge", f"the library's data points to more than {MOST_OBJECTS:,} objects")
    size = max(layout.recorder_bytes for layout in layouts)
    return [
        (address, layout)
        for address, raw in zip(objects, read([(address, size) for address in objects]), strict=True)
        for layout in layouts
        if len(raw) >= layout.recorder_bytes and decode.could_be(raw[: layout.recorder_bytes], address, layout)
    ]


def _pointers(raw: bytes, data: Sequence[Place], writable: Sequence[Place]) -> set[int]:
    """Return the words of `raw` that can be the address of an object in the heap."""
    words = array("Q", raw[: len(raw) & -8])
    starts = [first for first, _ in writable]
    lowest, highest = (writable[0][0], writable[-1][1]) if writable else (0, 0)
    in_range = {word for word in words if lowest <= word < highest and not word % _ALIGNED}
    in_heap = {word for word in in_range if word < writable[bisect_right(starts, word) - 1][1]}
    return {word for word in in_heap if not any(first <= word < end for first, end in data)}
