"""Find flight recorders in the registry of torch, or without symbols by their shape.

Without symbols it is an object of this shape in the heap, to which the library's data points.

`c10d::getFlightRecorder` keeps the registry in libtorch_cpu from 2.15 on (FlightRecorder.hpp): backend name to
recorder. Only there are the recorders of backends that record through hooks, such as nccl2. The form is libstdc++'s
`_Hashtable` (bits/hashtable.h): buckets, their number, the first node, the number of elements. A node holds the next
node, the name, the pointer and the hash of the name.
"""

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence

from hangwatch.model.flight_records import BACKEND_NAME, MOST_BACKENDS
from hangwatch.probes.process.memory_image import Image, Place, Read, UnreadableError, content, require, text_at
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


_HEAD = struct.Struct("<QQQQ")
_NODE_BYTES, _NAME_OFFSET, _POINTER_OFFSET = 56, 8, 40
_POINTER = struct.Struct("<Q")


def read_registry(read_memory: Read, address: int) -> dict[str, int]:
    """Return the address of the recorder of each backend; empty before the first use. Raises UnreadableError."""
    image = Image(read_memory)
    (head,) = image.take([(address, _HEAD.size)])
    buckets, bucket_count, node, count = _HEAD.unpack(head)
    require(bool(buckets and bucket_count) or not (node or count), "a table has nodes and no buckets")
    if count > MOST_BACKENDS:
        raise UnreadableError("TooLarge", f"{count:,} recorders")
    recorders: dict[str, int] = {}
    for _ in range(count):
        (raw,) = image.take([(node, _NODE_BYTES)])
        part = text_at(raw, _NAME_OFFSET, node)
        name = content(part, image.take_parts([part])).decode("latin-1")
        (recorder,) = _POINTER.unpack_from(raw, _POINTER_OFFSET)
        require(re.fullmatch(BACKEND_NAME, name) is not None, "a backend has an impossible name")
        require(bool(recorder) and not recorder % 8, "a backend has no recorder")
        require(name not in recorders, "a table has a name twice")
        recorders[name] = recorder
        (node,) = _POINTER.unpack_from(raw)
    require(node == 0, "a table has more nodes than its count")
    if image.take([(address, _HEAD.size)])[0] != head:
        raise UnreadableError("ChangedWhileRead", "a backend was added while the registry was read")
    return recorders
