"""Read the registry of flight recorders that torch has from 2.15 on: backend name to recorder. Pure.

`c10d::getFlightRecorder` keeps it in libtorch_cpu (FlightRecorder.hpp). Only there are the recorders of backends that
record through hooks, such as nccl2. The form is libstdc++'s `_Hashtable` (bits/hashtable.h): buckets, their number, the
first node, the number of elements. A node holds the next node, the name, the pointer and the hash of the name.
"""

import re
import struct

from hangwatch.model.flight_records import BACKEND_NAME, MOST_BACKENDS
from hangwatch.probes.process.memory_image import Image, Read, UnreadableError, content, require, text_at

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
