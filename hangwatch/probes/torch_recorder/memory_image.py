"""Reading pieces of somebody's memory within bounds, and the containers of libstdc++ and c10 that lie in it.

Everything read is hostile: each pointer, length and count is checked before it is used, and what does not fit ends the
reading. The layouts are those of libstdc++'s `basic_string`, `vector` and `_Rb_tree` (bits/basic_string.h,
stl_vector.h, stl_tree.h) with the ABI of C++11, and of c10/util/SmallVector.h.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

MOST_BYTES = 8 << 20  # of one reading: 4,096 records of 512 bytes, and what they point to
MOST_STRING_BYTES = 4096
MOST_DEPTH = 64  # of a balanced tree of what fits into an address space
_GAP_BYTES = 2048  # less than a page: between two mapped bytes that are so near, all are mapped
_SPAN_BYTES = 1 << 16
_NODE = struct.Struct("<I4xQQQ")  # color, parent, left, right
_STRING = struct.Struct("<QQ16s")  # where its bytes lie, how many, and those of a short one
INLINE_STRING_BYTES = 15

Place: TypeAlias = tuple[int, int]
"""An address, and how many bytes."""

NOWHERE: Place = (0, 0)

Read: TypeAlias = Callable[[Sequence[Place]], Sequence[bytes]]
"""Reads each place, as far as it can be read. Raises UnreadableError where nothing can."""


class UnreadableError(Exception):
    """Why there is no answer: a word for machines, and a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def fits(condition: bool, what: str) -> None:
    """Raises UnreadableError where something that holds of every flight recorder does not."""
    if not condition:
        raise UnreadableError("UnknownLayout", what)


class Image:
    """The memory of one process for one reading, which ends after so many bytes."""

    def __init__(self, read: Read, most_bytes: int = MOST_BYTES) -> None:
        self._read = read
        self._left_bytes = most_bytes

    def take(self, places: Sequence[Place]) -> Sequence[bytes]:
        """All bytes of each place. Raises UnreadableError where some are missing, or too many were asked for."""
        self._left_bytes -= sum(count for _, count in places)
        if self._left_bytes < 0:
            raise UnreadableError("TooLarge", f"more than {MOST_BYTES >> 20} MiB would have to be read")
        fits(all(0 < address < 1 << 48 for address, count in places if count), "a pointer leads nowhere")
        pieces = self._read(places) if places else ()
        fits([len(piece) for piece in pieces] == [count for _, count in places], "a pointer leads to no memory")
        return pieces

    def take_parts(self, parts: Iterable[Part]) -> dict[Place, bytes]:
        """What `content` needs of these: as `take`, of many small places, of which neighbours are read together."""
        wanted = sorted({place for place, _ in parts if place[1]})
        runs: list[list[int]] = []  # first address, end
        for address, count in wanted:
            end = address + count
            if runs and address - runs[-1][1] < _GAP_BYTES and end - runs[-1][0] < _SPAN_BYTES:
                runs[-1][1] = max(runs[-1][1], end)
            else:
                runs.append([address, end])
        pieces = self.take([(first, end - first) for first, end in runs])
        found: dict[Place, bytes] = {}
        at = 0
        for address, count in wanted:
            while address + count > runs[at][1] or address < runs[at][0]:
                at += 1
            start = address - runs[at][0]
            found[address, count] = pieces[at][start : start + count]
        return found


Part: TypeAlias = tuple[Place, bytes]
"""Where a string or a list has its content, or, with an empty place, its content: short ones lie in themselves."""


def content(part: Part, found: dict[Place, bytes]) -> bytes:
    """What it holds, where what lies elsewhere has been read."""
    place, inline = part
    return found[place] if place[1] else inline


def text(members: tuple[int, int, bytes], address: int) -> Part:
    """The std::string with this pointer, size and own bytes, which lies at `address`. Raises UnreadableError."""
    pointer, size, inline = members
    if pointer == address + 16:
        fits(size <= INLINE_STRING_BYTES, "a string is longer than its place")
        return NOWHERE, inline[:size]
    fits(size <= MOST_STRING_BYTES, "a string is too long")
    return (pointer, size), b""


def text_at(raw: bytes, offset: int, address: int) -> Part:
    """The std::string that lies so far behind the beginning of these bytes, which lie at `address`."""
    pointer, size, inline = _STRING.unpack_from(raw, offset)
    return text((pointer, size, inline), address + offset)


def small_vector(members: tuple[int, int, int, bytes], address: int, element_bytes: int) -> Part:
    """The c10::SmallVector with this pointer, size, room and own elements, which lies at `address`."""
    pointer, size, room, inline = members
    size_bytes = size * element_bytes
    fits(size <= room, "a list is longer than its place")
    if pointer != address + 16:
        return (pointer, size_bytes), b""
    fits(size_bytes <= len(inline), "a list is longer than its place")
    return NOWHERE, inline[:size_bytes]


def vector(members: tuple[int, int, int]) -> Part:
    """The std::vector with this begin, end and end of what is reserved."""
    begin, end, reserved = members
    fits(begin <= end <= reserved, "a list ends before it begins")
    return (begin, end - begin), b""


class Node(NamedTuple):
    """A node of a std::map: where it lies, and the bytes of its key and value."""

    address: int
    value: bytes


VALUE_OFFSET = _NODE.size


def tree(image: Image, address: int, raw: bytes, value_bytes: int, most: int) -> list[Node]:
    """The nodes of the std::map that lies at `address` with the bytes `raw`; in no order. Raises UnreadableError."""
    root, left, right, count = struct.unpack_from("<QQQQ", raw, 16)
    header = address + 8
    if count == 0:
        fits(root == 0 and left == right == header, "an empty map is not empty")
        return []
    if count > most:
        raise UnreadableError("TooLarge", f"{count:,} groups")
    nodes: list[Node] = []
    seen: set[int] = set()
    level = [(root, header)]
    for _ in range(MOST_DEPTH):
        fits(len(seen) + len(level) <= count, "a map holds more than it counts")
        below: list[tuple[int, int]] = []
        for (node, parent), piece in zip(
            level, image.take([(node, _NODE.size + value_bytes) for node, _ in level]), strict=True
        ):
            color, above, left, right = _NODE.unpack_from(piece)
            fits(color < 2 and above == parent and node not in seen and not node % 8, "a map is no tree")
            seen.add(node)
            nodes.append(Node(node, piece[_NODE.size :]))
            below += [(child, node) for child in (left, right) if child]
        level = below
        if not level:
            break
    fits(len(nodes) == count, "a map holds less than it counts")
    return nodes


def spans(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Rising numbers as [first, last] of each range."""
    if not numbers:
        return ()
    starts = [numbers[0], *(after for before, after in pairwise(numbers) if after != before + 1)]
    ends = [*(before for before, after in pairwise(numbers) if after != before + 1), numbers[-1]]
    return tuple(zip(starts, ends, strict=True))
