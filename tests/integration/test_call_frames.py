"""The native frames of a sleeping thread, read with intact and damaged unwind tables of its process."""

import itertools
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hangwatch.probes.base import mappings
from hangwatch.probes.base.mappings import Mapping
from hangwatch.probes.process import native_frames
from tests.commands import spawn
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
    with spawn(sys.executable, "-c", LOCKED) as process:
        folder = Path(f"/proc/{process.pid}")
        stack, place = wait_for(lambda: targets.futex_call(process.pid), "a thread in its lock")
        mapped = tuple(mappings.parse((folder / "maps").read_bytes()))
        yield Sleeping(place, stack, mapped, folder / "mem")


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

    mapped = (Mapping(4096, 1 << 20, b"r-xp", 0, b"08:01", 12, b"/lib/libc.so.6"),)
    place, stack = data.draw(st.integers(4096, 1 << 20)), data.draw(st.integers(0, HIGHEST - 1))
    assert len(list(native_frames.walk(place, stack, mapped, read))) <= native_frames.MOST_FRAMES + 1


@given(st.binary(max_size=300))
def test_any_text_of_mappings_is_read(text: bytes) -> None:
    assert len(list(mappings.parse(text))) <= text.count(b"\n") + 1


def test_the_text_of_the_kernel_is_read() -> None:
    text = b"7f01-7f02 r-xp 00001000 08:01 12 /a b/lib c.so (deleted)\n7f02-7f03 rw-p 00000000 00:00 0 \nnonsense\n"
    assert list(mappings.parse(text)) == [
        Mapping(0x7F01, 0x7F02, b"r-xp", 0x1000, b"08:01", 12, b"/a b/lib c.so (deleted)"),
        Mapping(0x7F02, 0x7F03, b"rw-p", 0, b"00:00", 0, b""),
    ]
