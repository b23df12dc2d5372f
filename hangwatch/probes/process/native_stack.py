"""Find threads that wait in torch's C++ code when Python shows no frame: `work.wait()` is a C++ method.

Nothing is paused. `native_frames` walks the frames up to the first frame of PyTorch or Python. The tables may not
suffice: another architecture, or a library without tables. Then return addresses are searched in the first 512 bytes of
the stack. Old stack content may make a wait for a Python lock look like a wait in PyTorch, never the reverse.
"""

import os
import re
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hangwatch.formats import python_files
from hangwatch.probes.base import mappings, pseudo_files, system_calls
from hangwatch.probes.base.mappings import Mapping
from hangwatch.probes.base.pseudo_files import PAGE_BYTES
from hangwatch.probes.process import native_frames, process_memory
from hangwatch.probes.process.process_memory import MOST_MAPS_BYTES

_MOST_STACK_BYTES = 512
_SLEEPS = frozenset({"futex", "nanosleep", "clock_nanosleep"})
_TORCH = re.compile(rb"/lib(?:torch|c10|nccl|cuda)[^/]*\.so[0-9.]*(?: \(deleted\))?$")
_OPENMP = re.compile(rb"/lib(?:gomp|iomp5|omp)\b[^/]*\.so")
_DEVICE = re.compile(rb"/dev/(?!shm/|zero|hugepages)|.*/libcuda\.so")  # CUDA of WSL maps no device


def read(pid: int, proc_root: Path, thread: int | None = None) -> tuple[bool | None, bool | None]:
    """Return two facts about a process: its main thread (or `thread`) sleeps in torch, NCCL or CUDA; it maps a device.

    Each is None if unknown. A device is for example a GPU.
    """
    folder = proc_root / str(pid)
    content = process_memory.SHARED.read_pieces(folder / "maps", [(0, MOST_MAPS_BYTES)])
    raw = b"".join(content) if isinstance(content, tuple) else b""
    mapped = [each for each in mappings.parse(raw) if each.path] if 0 < len(raw) < MOST_MAPS_BYTES else None
    has_device = None if mapped is None else any(_DEVICE.match(each.path) for each in mapped)
    return _waits_in_torch(folder, thread or pid, mapped), has_device


def _waits_in_torch(folder: Path, thread: int, mapped: Sequence[Mapping] | None) -> bool | None:
    """True if a thread is in futex(2) or nanosleep(2), called by torch. NCCL's blocking wait polls with nanosleep."""
    text = pseudo_files.read(folder / "task" / str(thread) / "syscall", f"thread {thread}")
    if not isinstance(text, str):
        return None
    call = system_calls.parse(text)
    if call is None or call.name not in _SLEEPS or len(call.arguments) < 8:
        return False
    if mapped is None:
        return None
    stack, address = call.arguments[6:8]
    by_tables = _is_torch(address, stack, mapped, _read_by_pages(folder / "mem"))
    return by_tables if by_tables is not None else _has_torch_on_top(stack, mapped, folder / "mem")


def _is_torch(address: int, stack: int, mapped: Sequence[Mapping], read: native_frames.Read) -> bool | None:
    """True if the first frame of PyTorch, OpenMP or Python is one of PyTorch; None if the walk reaches none.

    A thread in OpenMP waits for the other threads of its process.
    """
    for frame in native_frames.walk(address, stack, mapped, read):
        if frame is None:
            break
        if _TORCH.search(frame.path):
            return True
        path = os.fsdecode(frame.path)
        if _OPENMP.search(frame.path) or python_files.is_interpreter(path) or python_files.is_library(path):
            return False
    return None


def _has_torch_on_top(stack: int, mapped: Sequence[Mapping], memory_file: Path) -> bool | None:
    raw = process_memory.SHARED.read(memory_file, stack, _MOST_STACK_BYTES)
    if not raw:
        return None
    torch = [each for each in mapped if b"x" in each.permissions and _TORCH.search(each.path)]
    words = [word for (word,) in struct.iter_unpack("=Q", raw[: len(raw) // 8 * 8])]
    return any(each.start <= word < each.end for each in torch for word in words)


def _read_by_pages(memory_file: Path) -> native_frames.Read:
    """Return a function that reads whole pages, each once: the search of a table reads only a few of them."""
    read_page = cache(lambda address: process_memory.SHARED.read(memory_file, address, PAGE_BYTES))

    def read(address: int, count: int) -> bytes:
        first = address // PAGE_BYTES * PAGE_BYTES
        raw = b"".join(map(read_page, range(first, address + count, PAGE_BYTES)))
        return raw[address - first : address - first + count]

    return read
