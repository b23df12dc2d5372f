"""The native frames of a sleeping thread, read with intact and damaged unwind tables of its process."""

import itertools
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hangwatch.probes.process import native_frames
from hangwatch.probes.process.native_frames import Mapping
from tests.conftest import wait_for
from tests.integration import targets

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64, as the walk itself does")
LOCKED = "import threading\none = threading.Lock()\none.acquire()\none.acquire()"
HIGHEST = 1 << 64


class Sleeping(NamedTuple):
    """The main thread of a process: where it sleeps, the mappings of the process, and its memory."""

    place: int
    stack: int
    mapped: tuple[Mapping, ...]
    memory: Path

    def read(self, address: int, count: int) -> bytes:
        with self.memory.open("rb", 0) as memory:
            try:
                return os.pread(memory.fileno(), count, address)
            except OSError:  # EIO: nothing is mapped at this address
                return b""


@pytest.fixture(scope="module")
def sleeping() -> Iterator[Sleeping]:
    with subprocess.Popen([sys.executable, "-c", LOCKED]) as process:
        folder = Path(f"/proc/{process.pid}")

        try:
            stack, place = wait_for(lambda: targets.futex_call(process.pid), "a thread in its lock")
            mapped = native_frames.mappings((folder / "maps").read_bytes())
            yield Sleeping(place, stack, mapped, folder / "mem")
        finally:
            process.kill()


def test_the_frames_lead_from_the_c_library_through_python_to_its_start(sleeping: Sleeping) -> None:
    found = list(native_frames.walk(sleeping.place, sleeping.stack, sleeping.mapped, sleeping.read))
    assert found.pop() is None  # the outermost frame has no caller
    names = [frame.path.rsplit(b"/", 1)[-1] for frame in found if frame is not None]
    kinds = [kind for kind, _ in itertools.groupby("python" if b"python" in name else "c" for name in names)]
    assert kinds in (["c", "python"], ["c", "python", "c", "python"])
    assert len(names) > 5


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_table_ends_the_walk_and_nothing_else(sleeping: Sleeping, data: st.DataObject) -> None:
    reads = itertools.count()
    damaged = data.draw(st.integers(0, 60), "the read that is damaged")

    def read(address: int, count: int) -> bytes:
        raw = sleeping.read(address, count)
        if next(reads) != damaged:
            return raw
        spoilt = bytearray(raw)
        for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), max_size=4)):
            spoilt[at] = byte
        return bytes(spoilt[: data.draw(st.integers(0, len(spoilt)))])

    found = list(native_frames.walk(sleeping.place, sleeping.stack, sleeping.mapped, read))
    assert len(found) <= native_frames.MOST_FRAMES + 1
    assert found.count(None) <= 1


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_memory_that_says_anything_ends_the_walk(data: st.DataObject) -> None:
    """Read random memory. Some of it begins like a library, so that the first checks pass."""
    head = b"\x7fELF\x02\x01" + bytes(26) + (64).to_bytes(8, "little") + bytes(14) + b"\x38\0\x02\0" + bytes(4)
    load = b"\x01\0\0\0\x05\0\0\0" + bytes(48)
    table = b"\x50\xe5\x74\x64\x04\0\0\0" + bytes(8) + (4096).to_bytes(8, "little") + bytes(32)
    rest = data.draw(st.binary(min_size=1, max_size=512))

    def read(address: int, count: int) -> bytes:
        start = head + load + table
        if address < 8192:
            return start[address - 4096 :][:count].ljust(count, b"\0")
        if address == 8192:
            return (b"\x01\x1b\x03\x3b" + rest * 8)[:count]
        return (rest * (count // len(rest) + 2))[address % len(rest) :][:count]

    mapped = (Mapping(4096, 1 << 20, 0, True, b"/lib/libc.so.6"),)
    place, stack = data.draw(st.integers(4096, 1 << 20)), data.draw(st.integers(0, HIGHEST - 1))
    assert len(list(native_frames.walk(place, stack, mapped, read))) <= native_frames.MOST_FRAMES + 1


BASE, OTHER, STACK = 0x40_0000, 0x50_0000, 0x70_0000
PUSHED = b"\x41\x0e\x10"  # one byte further, def_cfa_offset 16
PROGRAMS = {
    "a register was pushed": (PUSHED, b"zR", True),
    "at the first instruction after it": (b"\x44\x0e\x10", b"zR", True),
    "one instruction before it": (b"\x45\x0e\x10", b"zR", False),
    "a frame pointer by an expression": (PUSHED + b"\x16\x06\x01\x33", b"zR", False),
    "arguments were pushed": (PUSHED + b"\x2e\x10", b"zR", True),  # GNU_args_size 16: the number of RA
    "rules of other registers": (b"\x83\x03\x05\x0c\x04\x10\x0d\x01\x33\xc3" + PUSHED, b"zR", True),
    "an epilogue before": (b"\x41\x0a\x0e\x40\x41\x0b" + PUSHED, b"zR", True),
    "only after this instruction": (PUSHED + b"\x48\x0e\x40", b"zR", True),
    "a personality and data": (PUSHED, b"zPLR", True),
    "another address": (b"\x41\x0e\x18", b"zR", False),
    "an address by an expression": (b"\x41\x0f\x02\x77\x10", b"zR", False),
    "a return address that was computed": (PUSHED + b"\x14\x10\x01", b"zR", False),
    "a signal frame": (PUSHED, b"zRS", False),
    "a program that ends early": (PUSHED + b"\x0e", b"zR", False),
    "an unknown instruction": (PUSHED + b"\x3f", b"zR", False),
    "a state that was never remembered": (b"\x0b" + PUSHED, b"zR", False),
}


@pytest.mark.parametrize(("program", "letters", "is_known"), PROGRAMS.values(), ids=PROGRAMS)
def test_the_caller_is_found_by_the_rules_of_its_instruction(program: bytes, letters: bytes, *, is_known: bool) -> None:
    area = b"\x04\0\0\0\0" if b"L" in letters else b"\0"  # the language-specific data area
    data = {b"zR": b"\x01\x1b", b"zRS": b"\x01\x1b", b"zPLR": b"\x07\x9b\0\0\0\0\x1b\x1b"}[letters]
    common = b"\0\0\0\0\x01" + letters + b"\0\x01\x78\x10" + data + b"\x0c\x07\x08\x90\x01"
    common = struct.pack("<I", len(common)) + common
    entry = BASE + 0x2000 + len(common)
    body = struct.pack("<Iii", len(common) + 4, BASE + 0x3000 - (entry + 8), 64) + area + program
    head = b"\x7fELF\x02\x01".ljust(32, b"\0") + struct.pack("<Q14xHH6x", 64, 56, 2)
    segments = struct.pack("<II6Q", 1, 5, *(0,) * 6) + struct.pack("<II6Q", 0x6474E550, 4, 0, 0x1000, *(0,) * 4)
    table = b"\x01\x1b\x03\x3b" + struct.pack("<iIii", 0, 1, 0x2000, entry - BASE - 0x1000)
    image = {BASE: head + segments, BASE + 0x1000: table, BASE + 0x2000: common + struct.pack("<I", len(body)) + body}
    image[STACK + 8] = struct.pack("<QQ", OTHER + 9, 1)

    def read(address: int, count: int) -> bytes:
        return next((part[address - at :][:count] for at, part in image.items() if at <= address < at + len(part)), b"")

    mapped = (Mapping(BASE, BASE + 0x4000, 0, True, b"/a.so"), Mapping(OTHER, OTHER + 0x1000, 0, True, b"/b.so"))
    assert list(native_frames.walk(BASE + 0x3000 + 4, STACK, mapped, read)) == [*mapped[: 1 + is_known], None]


@given(st.binary(max_size=300))
def test_any_text_of_mappings_is_read(text: bytes) -> None:
    assert len(native_frames.mappings(text)) <= text.count(b"\n") + text.count(b"\r") + 300


def test_the_text_of_the_kernel_is_read() -> None:
    text = b"7f01-7f02 r-xp 00001000 08:01 12 /a b/lib c.so (deleted)\n7f02-7f03 rw-p 00000000 00:00 0 \nnonsense\n"
    assert native_frames.mappings(text) == (Mapping(0x7F01, 0x7F02, 0x1000, True, b"/a b/lib c.so (deleted)"),)
