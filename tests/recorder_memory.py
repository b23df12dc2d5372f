"""Synthetic memory with a flight recorder of any torch version, for cases that a job without GPUs cannot produce.

`Memory` is an address space made of pieces. `recorder` writes a recorder with any number of records into it, as the
table of layouts says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hangwatch.probes.torch_recorder import layouts
from hangwatch.probes.torch_recorder.layouts import Layout

CREATED_UNIX_NS = 1_795_000_000 * 10**9
FLOAT = layouts.dtypes().index("Float")


class Memory:
    """Pieces of memory by address. `new` adds zeroed pieces one after the other, as malloc(3) does."""

    def __init__(self, first: int = 0x7F0000000000) -> None:
        self._first, self._bytes = first, bytearray()

    @property
    def range(self) -> tuple[int, int]:
        """Return the first address and the end address."""
        return self._first, self._first + len(self._bytes)

    def new(self, size: int) -> int:
        """Return the address of `size` zeroed bytes, aligned as by malloc(3)."""
        address = self._first + len(self._bytes)
        self._bytes += bytes(-(-max(size, 1) // 16) * 16)
        return address

    def put(self, address: int, code: str, *values: object) -> None:
        """Write values at an address, in the format `code` of struct.pack_into."""
        struct.pack_into(f"<{code}", self._bytes, address - self._first, *values)

    def bytes_at(self, address: int, size: int) -> bytes:
        start = address - self._first
        return bytes(self._bytes[start : start + size]) if 0 <= start < len(self._bytes) else b""

    def flip(self, address: int, value: int) -> None:
        """Replace the byte at an address by `value`."""
        self._bytes[address - self._first] = value

    def copy(self) -> Memory:
        other = Memory(self._first)
        other._bytes = bytearray(self._bytes)
        return other

    def read(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each place, given as (address, size), as a reader of /proc/PID/mem would."""
        return [self.bytes_at(address, size) for address, size in places]


class Operation(NamedTuple):
    """A record to write. `sizes` are the shapes of its inputs and outputs."""

    group: int = 0
    name: str = "nccl:all_reduce"
    collective: int = 1
    p2p: int = 0
    op: int = 1
    is_p2p: bool = False
    is_started: bool = False
    is_completed: bool = False
    is_retired: bool = False
    inputs: tuple[tuple[int, ...], ...] = ((4,),)
    outputs: tuple[tuple[int, ...], ...] = ((4,),)
    timeout_ms: int = 600_000
    completed_unix_ns: int = 0


class Group(NamedTuple):
    """A process group: its id in the process, its name, description, ranks, and the numbers in its status."""

    id: int = 0
    name: str = "0"
    description: str = "default_pg"
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    counts: tuple[int, int, int] = (1, -1, 0)


def as_process(folder: Path, memory: Memory, address: int, library: str = "cuda") -> None:
    """Write `maps` and `mem` of a process into its /proc folder. The library holds the recorder at `address`."""
    first, end = memory.range
    data = first - 0x2000
    folder.joinpath("maps").write_text(
        f"{data:08x}-{data + 0x1000:08x} rw-p 00000000 08:01 7    /torch/lib/libtorch_{library}.so\n"
        f"{first:08x}-{end:08x} rw-p 00000000 00:00 0\n"
    )
    with folder.joinpath("mem").open("wb") as mem:
        mem.seek(data)
        mem.write(struct.pack("<Q", address))
        mem.seek(first)
        mem.write(memory.bytes_at(first, end - first))


def text(memory: Memory, address: int, value: str) -> None:
    """Write a std::string at this address."""
    raw = value.encode()
    where = address + 16 if len(raw) < 16 else memory.new(len(raw))
    memory.put(address, "QQ", where, len(raw))
    memory.put(where, f"{len(raw)}s", raw)


def vector(memory: Memory, address: int, raw: bytes) -> None:
    """Write a std::vector at this address."""
    where = memory.new(len(raw)) if raw else 0
    memory.put(address, "QQQ", where, where + len(raw), where + len(raw))
    if raw:
        memory.put(where, f"{len(raw)}s", raw)


def small(memory: Memory, address: int, numbers: Sequence[int], code: str, inline: int) -> None:
    """Write a c10::SmallVector at this address."""
    raw = struct.pack(f"<{len(numbers)}{code}", *numbers)
    where = address + 16 if len(numbers) <= inline else memory.new(len(raw))
    memory.put(address, "QII", where, len(numbers), max(inline, len(numbers)))
    memory.put(where, f"{len(raw)}s", raw)


def tree(memory: Memory, address: int, value_bytes: int, count: int) -> list[int]:
    """Write a balanced std::map with `count` nodes at an address. Return the addresses of the values, in order."""
    header, nodes = address + 8, [memory.new(32 + value_bytes) for _ in range(count)]

    def link(first: int, end: int, parent: int) -> int:
        if first >= end:
            return 0
        middle = (first + end) // 2
        node = nodes[middle]
        memory.put(node, "QQQQ", 1, parent, link(first, middle, node), link(middle + 1, end, node))
        return node

    root = link(0, count, header)
    memory.put(header, "QQQQQ", 0, root, nodes[0] if nodes else header, nodes[-1] if nodes else header, count)
    return [node + 32 for node in nodes]


def recorder(
    memory: Memory,
    layout: Layout,
    operations: Iterable[Operation],
    groups: Sequence[Group] = (Group(),),
    *,
    capacity: int = 2000,
    epoch: int = 0,
    lead: int = 0,
) -> int:
    """Write a recorder that has recorded these operations. Return its address.

    It keeps the last `capacity` operations. In an `epoch` after the first, the buffer also holds `lead` records of
    the previous epoch.
    """
    seen = list(operations)
    address = memory.new(layout.recorder_bytes)
    written = [(epoch - 1, number, Operation()) for number in range(lead)] if epoch else []
    written += [(epoch, number, operation) for number, operation in enumerate(seen)]
    held = min(len(written), capacity)
    size = layout.record_bytes
    begin = memory.new(size * held) if held else 0
    memory.put(address + layout.enabled, "??", capacity > 0, False)
    memory.put(address + layout.entries, "QQQ", begin, begin + size * held, begin + size * held)
    following = len(written) % capacity if capacity and (held == capacity or layout.moves_while_filling) else 0
    memory.put(address + layout.capacity, "QQQ", capacity, following, len(seen))
    if layout.reset_epoch >= 0:
        memory.put(address + layout.reset_epoch, "Q", epoch)
    if layout.library_version >= 0:
        text(memory, address + layout.library_version, "2.28.9")
    names = {group.id: group for group in groups}
    for place, (in_epoch, number, operation) in enumerate(written):
        if place >= len(written) - held:
            entry = begin + place % capacity * size
            _record(memory, entry, layout, names[operation.group], operation, number, in_epoch)
    for group, value in zip(groups, tree(memory, address + layout.statuses, 24, len(groups)), strict=True):
        status = memory.new(layout.status_completed + 8)
        memory.put(value, "QQQ", group.id, status, 0)
        for offset, count in zip(
            (layout.enqueued, layout.status_started, layout.status_completed), group.counts, strict=True
        ):
            memory.put(status + offset, "q", count)
    for group, value in zip(groups, tree(memory, address + layout.members, 88, len(groups)), strict=True):
        text(memory, value, group.description)
        text(memory, value + 32, group.name)
        vector(memory, value + 64, struct.pack(f"<{len(group.ranks)}Q", *group.ranks))
    return address


def _record(
    memory: Memory, entry: int, layout: Layout, group: Group, operation: Operation, number: int, epoch: int
) -> None:
    memory.put(entry + layout.record_id, "Q", number)
    if layout.record_epoch >= 0:
        memory.put(entry + layout.record_epoch, "Q", epoch)
    memory.put(entry + layout.group_id, "Q", group.id)
    text(memory, entry + layout.group_names, group.description)
    text(memory, entry + layout.group_names + 32, group.name)
    for offset, value in (
        (layout.collective_seq, operation.collective),
        (layout.p2p_seq, operation.p2p),
        (layout.op_id, operation.op),
        (layout.created, CREATED_UNIX_NS + number),
        (layout.completed, operation.completed_unix_ns),
        (layout.timeout, operation.timeout_ms),
    ):
        memory.put(entry + offset, "q", value)
    text(memory, entry + layout.operation, operation.name)
    for offset, flag in (
        (layout.is_p2p, operation.is_p2p),
        (layout.started + 8, operation.is_started),
        (layout.completed + 8, operation.is_completed),
        (layout.retired, operation.is_retired),
    ):
        memory.put(entry + offset, "?", flag)
    code = "i" if layout.dim_bytes == 4 else "q"
    small(memory, entry + layout.input_dims, [len(size) for size in operation.inputs], code, 4)
    small(memory, entry + layout.output_dims, [len(size) for size in operation.outputs], code, 4)
    small(memory, entry + layout.sizes, [n for size in (*operation.inputs, *operation.outputs) for n in size], "q", 8)
    vector(memory, entry + layout.input_dtypes, bytes([FLOAT] * len(operation.inputs)))
    vector(memory, entry + layout.output_dtypes, bytes([FLOAT] * len(operation.outputs)))
    if layout.thread_id >= 0:
        memory.put(entry + layout.thread_id, "Q", 0x7F1234)
    if layout.thread_name >= 0:
        text(memory, entry + layout.thread_name, "pt_main_thread")


def registry(memory: Memory, recorders: Mapping[str, int]) -> tuple[int, list[int]]:
    """Write the recorders by backend as libstdc++ does, in torch from 2.15 on. Return the addresses of map and nodes."""
    address, nodes = memory.new(56), [memory.new(56) for _ in recorders]
    memory.put(address, "QQQQ", memory.new(8 * 13), 13, nodes[0] if nodes else 0, len(nodes))
    for node, following, (name, found) in zip(nodes, [*nodes[1:], 0], recorders.items(), strict=False):
        memory.put(node, "Q", following)
        text(memory, node + 8, name)
        memory.put(node + 40, "QQ", found, hash(name) & (1 << 64) - 1)
    return address, nodes
