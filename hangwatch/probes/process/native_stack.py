"""In whose code a thread waits, where Python shows no frame of it: `work.wait()` is a method of C++.

Nothing is paused. Its frames are walked by the tables of its libraries (`native_frames`) up to the first that is
PyTorch's or Python's. Where they do not tell (another architecture, a library without tables), its return addresses are
looked for in the first half KiB of its stack; as the memory of a stack is not cleared, that may take a lock of Python's
for a wait of PyTorch's, never the other way round. Tried on torch 2.13.0 with gloo: 264 bytes from the top in a wait
for irecv or for an asynchronous all_reduce; in waits for a lock, after collectives, in a fifth of the jobs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path

from hangwatch.probes import pseudo_files
from hangwatch.probes.process import native_frames, process_memory, system_calls
from hangwatch.probes.process.native_frames import Mapping

_MOST_STACK_BYTES = 512
_MOST_MAPS_BYTES = 8 << 20
_PAGE_BYTES = 4096
_TORCH = re.compile(rb"/lib(?:torch|c10|nccl|cuda)[^/]*\.so[0-9.]*(?: \(deleted\))?$")
_PYTHON = re.compile(rb"/(?:lib)?python[0-9][^/]*$")


def waits_in_torch(pid: int, proc_root: Path) -> bool | None:
    """Whether the main thread sleeps in a futex (futex(2)) of torch, NCCL or CUDA; None where that cannot be seen."""
    folder = proc_root / str(pid)
    text = pseudo_files.read(folder / "task" / str(pid) / "syscall", f"pid {pid}")
    if not isinstance(text, str):
        return None
    fields = text.split()
    if len(fields) != 9 or not fields[0].isdecimal() or system_calls.names().get(int(fields[0])) != "futex":
        return False
    content = process_memory.SHARED.read_pieces(folder / "maps", [(0, _MOST_MAPS_BYTES)])
    if not isinstance(content, tuple):
        return None
    mapped = native_frames.mappings(b"".join(content))
    stack, place = int(fields[7], 16), int(fields[8], 16)
    by_tables = _is_torch(place, stack, mapped, _Pages(folder / "mem"))
    return by_tables if by_tables is not None else _has_torch_on_top(stack, mapped, folder / "mem")


def _is_torch(place: int, stack: int, mapped: Sequence[Mapping], pages: _Pages) -> bool | None:
    """Whether PyTorch is asked by nothing of Python's; None where the frames end before either."""
    for frame in native_frames.walk(place, stack, mapped, pages.read):
        if frame is None:
            break
        if _TORCH.search(frame.path):
            return True
        if _PYTHON.search(frame.path):
            return False
    return None


def _has_torch_on_top(stack: int, mapped: Sequence[Mapping], memory_file: Path) -> bool | None:
    raw = process_memory.SHARED.read(memory_file, stack, _MOST_STACK_BYTES)
    if not raw:
        return None
    torch = [one for one in mapped if one.is_code and _TORCH.search(one.path)]
    words = [word for (word,) in struct.iter_unpack("=Q", raw[: len(raw) // 8 * 8])]
    return any(one.start <= word < one.end for one in torch for word in words)


class _Pages:
    """Memory by whole pages, each read once: a table is searched in a few of them."""

    def __init__(self, memory_file: Path) -> None:
        self._memory_file = memory_file
        self._known: dict[int, bytes] = {}

    def read(self, address: int, count: int) -> bytes:
        """So many bytes, or fewer."""
        first = address // _PAGE_BYTES * _PAGE_BYTES
        raw = b"".join(self._page(at) for at in range(first, address + count, _PAGE_BYTES))
        return raw[address - first : address - first + count]

    def _page(self, address: int) -> bytes:
        if address not in self._known:
            self._known[address] = process_memory.SHARED.read(self._memory_file, address, _PAGE_BYTES)
        return self._known[address]
