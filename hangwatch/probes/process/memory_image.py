"""Read pieces of another process's memory within limits, and parse the containers of libstdc++ and c10 in it.

All of it is untrusted. Each pointer, length and count is checked before use, and an impossible value ends the reading.
The forms are libstdc++'s `basic_string`, `vector` and `_Rb_tree` (bits/basic_string.h, stl_vector.h, stl_tree.h) with
the C++11 ABI, and c10/util/SmallVector.h.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

MOST_BYTES = 8 << 20  # of one reading: 4,096 records of 512 bytes, and the memory they point to
MOST_STRING_BYTES = 4096
MOST_DEPTH = 64  # of a balanced tree in an address space
# Less than a page: all bytes between two mapped bytes this close are mapped
_GAP_BYTES = 2048
_SPAN_BYTES = 1 << 16
_NODE = struct.Struct("<I4xQQQ")  # color, parent, left, right
_STRING = struct.Struct("<QQ16s")  # address of its bytes, their number, and the bytes of a short string
INLINE_STRING_BYTES = 15

Place: TypeAlias = tuple[int, int]
"""An address and a number of bytes."""

NOWHERE: Place = (0, 0)

Read: TypeAlias = Callable[[Sequence[Place]], Sequence[bytes]]
"""Function that reads each place as far as possible. It raises UnreadableError if nothing can be read."""


class UnreadableError(Exception):
    """The error for memory that cannot be read or decoded: a word for machines, and a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def require(condition: bool, what: str) -> None:
    """Raise UnreadableError with the sentence `what` unless `condition` is true.

    The condition is true for every flight recorder of a known layout.
    """
    if not condition:
        raise UnreadableError("UnknownLayout", what)


class Image:
    """The memory of a process, for one reading of a limited number of bytes."""

    def __init__(self, read: Read, most_bytes: int = MOST_BYTES) -> None:
        self._read = read
        self._budget_bytes = most_bytes

    def take(self, places: Sequence[Place]) -> Sequence[bytes]:
        """Return all bytes of each place. Raises UnreadableError if some are missing or the limit is exceeded."""
        self._spend(sum(count for _, count in places))
        require(all(0 < address < 1 << 48 for address, count in places if count), "a pointer is not a valid address")
        pieces = self._read(places) if places else ()
        require(
            [len(piece) for piece in pieces] == [count for _, count in places], "a pointer leads to unmapped memory"
        )
        return pieces

    def take_mapped(self, addresses: Sequence[int], count: int) -> Sequence[bytes]:
        """Return the bytes from each address up to the first unmapped page, `count` at most of each."""
        self._spend(len(addresses) * count)
        require(all(0 < address < 1 << 48 for address in addresses), "a pointer is not a valid address")
        return self._read([(address, count) for address in addresses]) if addresses else ()

    def _spend(self, count: int) -> None:
        self._budget_bytes -= count
        if self._budget_bytes < 0:
            raise UnreadableError("TooLarge", f"it needs more than {MOST_BYTES >> 20} MiB")

    def take_parts(self, parts: Iterable[Part]) -> dict[Place, bytes]:
        """Return the memory that `content` needs for many small parts. Neighbouring parts are read together."""
        wanted = sorted({place for place, _ in parts if place[1]})
        runs: list[list[int]] = []  # first address, end
        for address, count in wanted:
            end = address + count
            if runs and address - runs[-1][1] < _GAP_BYTES and end - runs[-1][0] < _SPAN_BYTES:
                runs[-1][1] = max(runs[-1][1], end)
            else:
                runs.append([address, end])
        pieces = self.take([(first, end - first) for first, end in runs])
        contents: dict[Place, bytes] = {}
        run = 0
        for address, count in wanted:
            while address + count > runs[run][1] or address < runs[run][0]:
                run += 1
            start = address - runs[run][0]
            contents[address, count] = pieces[run][start : start + count]
        return contents


Part: TypeAlias = tuple[Place, bytes]
"""The content of a string or list: its place, or an empty place and the bytes if they are stored inline."""


def content(part: Part, contents: dict[Place, bytes]) -> bytes:
    """Return the content of a part. `contents` is the result of `take_parts`."""
    place, inline = part
    return contents[place] if place[1] else inline


def text(members: tuple[int, int, bytes], address: int) -> Part:
    """Return the std::string at `address` with this pointer, size and inline bytes. Raises UnreadableError."""
    pointer, size, inline = members
    if pointer == address + 16:
        require(size <= INLINE_STRING_BYTES, "a string is longer than its capacity")
        return NOWHERE, inline[:size]
    require(size <= MOST_STRING_BYTES, "a string is too long")
    return (pointer, size), b""


def text_at(raw: bytes, offset: int, address: int) -> Part:
    """Return the std::string at `offset` in the bytes `raw`, which begin at `address`."""
    pointer, size, inline = _STRING.unpack_from(raw, offset)
    return text((pointer, size, inline), address + offset)


def small_vector(members: tuple[int, int, int, bytes], address: int, element_bytes: int) -> Part:
    """Return the c10::SmallVector at `address` with this pointer, size, capacity and inline elements."""
    pointer, size, capacity, inline = members
    size_bytes = size * element_bytes
    require(size <= capacity, "a list is longer than its capacity")
    if pointer != address + 16:
        return (pointer, size_bytes), b""
    require(size_bytes <= len(inline), "a list is longer than its capacity")
    return NOWHERE, inline[:size_bytes]


def vector(members: tuple[int, int, int]) -> Part:
    """Return the std::vector with this begin, end and end of its capacity."""
    begin, end, reserved = members
    require(begin <= end <= reserved, "a list ends before it begins")
    return (begin, end - begin), b""


class Node(NamedTuple):
    """A node of a std::map: its address, and the bytes of its key and value."""

    address: int
    value: bytes


VALUE_OFFSET = _NODE.size


def map_nodes(image: Image, address: int, raw: bytes, value_bytes: int, most: int) -> list[Node]:
    """Return the nodes of the std::map at `address` with the bytes `raw`, in no order. Raises UnreadableError."""
    root, leftmost, rightmost, count = struct.unpack_from("<QQQQ", raw, 16)
    header = address + 8
    if count == 0:
        require(root == 0 and leftmost == rightmost == header, "an empty map has nodes")
        return []
    if count > most:
        raise UnreadableError("TooLarge", f"{count:,} groups")
    nodes: list[Node] = []
    visited: set[int] = set()
    level = [(root, header)]
    for _ in range(MOST_DEPTH):
        require(len(visited) + len(level) <= count, "a map has more nodes than its count")
        next_level: list[tuple[int, int]] = []
        for (node, parent), piece in zip(
            level, image.take([(node, _NODE.size + value_bytes) for node, _ in level]), strict=True
        ):
            color, parent_pointer, left_child, right_child = _NODE.unpack_from(piece)
            require(
                color < 2 and parent_pointer == parent and node not in visited and not node % 8, "a map is not a tree"
            )
            visited.add(node)
            nodes.append(Node(node, piece[_NODE.size :]))
            next_level += [(child, node) for child in (left_child, right_child) if child]
        level = next_level
        if not level:
            break
    require(len(nodes) == count, "a map has fewer nodes than its count")
    return nodes
