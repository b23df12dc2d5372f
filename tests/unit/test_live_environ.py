"""The environment in the memory of a process: its symbol, its limits, and memories that its owner has written."""

import contextlib
import struct
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hangwatch.probes.process import live_environ
from hangwatch.probes.process.environment import Environment
from hangwatch.probes.process.live_environ import Module, Place, read_environ
from hangwatch.probes.process.memory_image import Image, UnreadableError
from tests.environ_memory import PAGE_BYTES, EnvironMemory, make, within_cpu_seconds
from tests.fuzz_environ import WANTED, changed, read_all

ENTRIES = (b"HOME=/root", b"RANK=3", b"TOKEN=secret", b"no equals sign", b"MASTER_ADDR=10.0.0.7")


def variables(memory: EnvironMemory) -> dict[str, str]:
    answer = read_environ(memory.memory.read, Place(memory.symbol), WANTED)
    return answer[1].variables


def symbol(memory: EnvironMemory) -> int | None:
    page = memory.memory.bytes_at(memory.start, PAGE_BYTES)
    offset = live_environ.find_symbol(Image(memory.memory.read), memory.start, page)
    return None if offset is None else memory.start + offset


def test_only_variables_of_the_table_are_kept() -> None:
    assert variables(make(ENTRIES)) == {"RANK": "3", "MASTER_ADDR": "10.0.0.7"}


@pytest.mark.parametrize("name", live_environ.NAMES)
@pytest.mark.parametrize(("start", "first"), [(0x7F0000000000, 0), (0x400000, 0x400000)], ids=["dyn", "exec"])
def test_symbol_is_found_under_each_alias_in_dyn_and_exec(name: bytes, start: int, first: int) -> None:
    memory = make(ENTRIES, name=name, start=start, first=first)
    assert symbol(memory) == memory.symbol


def test_symbol_that_is_not_defined_in_the_module_is_not_taken() -> None:
    assert symbol(make(ENTRIES, section=0)) is None
    assert symbol(make(ENTRIES, name=b"environs")) is None


def test_program_comes_before_the_c_library_and_known_libraries_are_seen() -> None:
    maps = (
        b"00400000-00401000 r--p 00000000 fe:00 11 /usr/bin/python3.11\n"
        b"00401000-00402000 r-xp 00001000 fe:00 11 /usr/bin/python3.11\n"
        b"7f0000000000-7f0000001000 r--p 00000000 fe:00 22 /usr/lib/libc.so.6 (deleted)\n"
        b"7f0000009000-7f000000a000 r--p 00000000 fe:00 33 /venv/torch/lib/libtorch_cpu.so\n"
    )
    modules = live_environ.parse_maps(maps, b"/usr/bin/python3.11")
    assert modules.searched == (Module(b"fe:00", b"11", 0x400000), Module(b"fe:00", b"22", 0x7F0000000000))
    assert modules.libraries == ("torch",)


def test_array_that_moves_while_it_is_read_is_read_again() -> None:
    memory, other = make(ENTRIES), make((*ENTRIES, b"WORLD_SIZE=4"))
    questions = 0

    def read(places: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        nonlocal questions
        questions += 1
        return (memory if questions < 3 else other).memory.read(places)

    answer = read_environ(read, Place(memory.symbol), WANTED)
    assert answer is not None and answer[1].variables["WORLD_SIZE"] == "4"


def test_array_that_moves_at_each_reading_is_a_fault() -> None:
    memories = [make(ENTRIES), make(ENTRIES[::-1]), make(ENTRIES[1:])]

    def read(places: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        memories.append(memories.pop(0))
        return memories[0].memory.read([(address, count) for address, count in places])

    with pytest.raises(UnreadableError, match="ChangedWhileRead"):
        read_environ(read, Place(memories[0].symbol), WANTED)


def read_while_changing(offset: int) -> dict[str, str]:
    """Read an environment of which the byte at `offset` after the begin of the text changes before each piece."""
    memory, changes = make((b"RANK=3",)), 0
    (address,) = struct.unpack("<Q", memory.memory.bytes_at(memory.array, 8))

    def read(places: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        nonlocal changes
        pieces = []
        for place in places:
            changes += 1
            memory.memory.put(address + offset, "B", 48 + changes % 10)
            pieces += memory.memory.read([place])
        return pieces

    answer = read_environ(read, Place(memory.symbol), WANTED)
    return answer[1].variables


def test_text_that_changes_while_it_is_read_is_a_fault() -> None:
    with pytest.raises(UnreadableError, match="ChangedWhileRead"):
        read_while_changing(len("RANK="))


def test_memory_after_a_text_may_change_while_it_is_read() -> None:
    assert read_while_changing(len("RANK=3") + 1) == {"RANK": "3"}


def test_unchanged_array_is_one_short_reading() -> None:
    memory = make(ENTRIES)
    place, _ = read_environ(memory.memory.read, Place(memory.symbol), WANTED) or pytest.fail("no environment")
    assert read_environ(memory.memory.read, place, WANTED) is None
    memory.memory.put(memory.array + 8, "Q", memory.array)
    assert read_environ(memory.memory.read, place, WANTED) is not None


def test_environment_that_was_cleared_is_empty() -> None:
    memory = make(ENTRIES)
    memory.memory.put(memory.symbol, "Q", 0)
    assert read_environ(memory.memory.read, Place(memory.symbol), WANTED) == (
        Place(memory.symbol),
        Environment({}, is_empty=True, complete=True),
    )


@pytest.mark.parametrize("count", [4097, 1_000_000], ids=str)
def test_environment_with_too_many_variables_is_a_fault(count: int) -> None:
    memory = make((b"RANK=1",))
    (address,) = struct.unpack("<Q", memory.memory.bytes_at(memory.array, 8))
    array = memory.memory.new(8 * count + 8)
    memory.memory.put(array, f"{count}Q", *[address] * count)
    memory.memory.put(memory.symbol, "Q", array)
    with within_cpu_seconds(0.05), pytest.raises(UnreadableError, match="TooLarge"):
        variables(memory)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
@example(1 << 47, 0)
@settings(max_examples=200, deadline=None)
def test_memory_with_any_change_is_read_within_limits_or_refused(value: int, seed: int) -> None:
    """A cycle, an endless array, unmapped memory: a pointer or a count with any value."""
    memory = changed(make(ENTRIES), value, seed)
    with within_cpu_seconds(0.05), contextlib.suppress(UnreadableError):
        read_all(memory)
