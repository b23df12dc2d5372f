"""A memory with an ELF module that defines `environ`, and an environment: for cases that no real process shows."""

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.recorder_memory import Memory

PAGE_BYTES = 4096


@contextlib.contextmanager
def within_cpu_seconds(limit_seconds: float) -> Iterator[None]:
    """Fail if the block uses more CPU. No garbage is collected in it: that would visit the whole heap of the tests."""
    gc.disable()
    try:
        began = time.process_time()
        yield
        used_seconds = time.process_time() - began
    finally:
        gc.enable()
    assert used_seconds < limit_seconds


class EnvironMemory(NamedTuple):
    """A memory, the first page of its module, the address of the variable `environ`, and that of its array."""

    memory: Memory
    start: int
    symbol: int
    array: int


def make(
    entries: Sequence[bytes],
    *,
    name: bytes = b"environ",
    start: int = 0x7F0000000000,
    first: int = 0,
    section: int = 26,
) -> EnvironMemory:
    """Return a memory with these entries; addresses in the dynamic section are absolute, as glibc writes them."""
    memory, base = Memory(start), start - first
    memory.new(PAGE_BYTES)
    symbols, strings, table, dynamic = memory.new(72), memory.new(64), memory.new(64), memory.new(64)
    symbol, array = memory.new(8), memory.new(8 * len(entries) + 8)
    memory.put(start, "4sBB10xHHIQQQIHHH", b"\x7fELF", 2, 1, 3, 62, 1, 0, 64, 0, 0, 64, 56, 2)
    memory.put(start + 64, "IIQQQQQQ", 1, 4, 0, first, first, PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
    memory.put(start + 120, "IIQQQQQQ", 2, 6, 0, dynamic - base, 0, 0, 64, 8)
    memory.put(dynamic, "QQQQQQQQ", 5, strings, 6, symbols, 0x6FFFFEF5, table, 0, 0)
    memory.put(strings, "63s", b"\0other\0" + name)
    memory.put(symbols + 24, "IBBHQQ", 1, 1, 0, 26, 99, 8)
    memory.put(symbols + 48, "IBBHQQ", 7, 1, 0, section, symbol - base, 8)
    memory.put(table, "IIIIQIII", 1, 1, 1, 6, 0, 1, _hash(b"other") & ~1, _hash(name) | 1)
    memory.put(symbol, "Q", array)
    for number, entry in enumerate(entries):
        address = memory.new(len(entry) + 1)
        memory.put(address, f"{len(entry)}s", entry)
        memory.put(array + 8 * number, "Q", address)
    return EnvironMemory(memory, start, symbol, array)


def _hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) % (1 << 32)
    return value
