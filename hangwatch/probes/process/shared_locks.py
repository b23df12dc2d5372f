"""Whether a process waits for a lock in memory that others map, too: a semaphore of multiprocessing, a shared mutex.

A lock between threads is a private futex, and only a thread of the same process gives it back; one in shared memory is
none (futex(2), FUTEX_PRIVATE_FLAG). Who holds it the kernel does not know.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

from hangwatch.probes import pseudo_files
from hangwatch.probes.process import process_memory, system_calls

MOST_REGIONS = 8192
_PRIVATE_FLAG = 128
_MOST_MAPS_BYTES = 8 << 20
_SHARED = re.compile(rb"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) [r-][w-][x-]s [0-9a-f]+ ([0-9a-f:]+ [1-9]\d*)", re.MULTILINE)

Regions = dict[bytes, tuple[tuple[int, int], ...]]
"""Where a process has mapped shared memory: device and inode, which are equal in all that map it, to addresses."""


def awaited_address(pid: int, proc_root: Path) -> int | None:
    """Where the futex lies for which the main thread waits; None where it is of its own process alone, or none."""
    text = pseudo_files.read(proc_root / str(pid) / "task" / str(pid) / "syscall", f"pid {pid}")
    fields = text.split() if isinstance(text, str) else []
    if len(fields) < 7 or not fields[0].isdecimal() or system_calls.names().get(int(fields[0])) != "futex":
        return None
    return None if int(fields[2], 16) & _PRIVATE_FLAG else int(fields[1], 16)


def regions(pid: int, proc_root: Path, most: int = MOST_REGIONS) -> Regions:
    """The shared memory of a process; nothing where that may not be read, or gives no answer.

    A process may have 65,530 mappings (vm.max_map_count): of more than `most` those at the highest addresses count,
    which the kernel gave out first.
    """
    content = process_memory.SHARED.read_pieces(proc_root / str(pid) / "maps", [(0, _MOST_MAPS_BYTES)])
    lines = _SHARED.finditer(b"".join(content) if isinstance(content, tuple) else b"")
    found: dict[bytes, list[tuple[int, int]]] = {}
    for start, end, file in deque((line.groups() for line in lines), maxlen=most):
        found.setdefault(file, []).append((int(start, 16), int(end, 16)))
    return {file: tuple(spans) for file, spans in found.items()}


def at(address: int, mapped: Regions) -> bytes | None:
    """Device and inode of the shared memory at an address; None where it is not shared."""
    return next((file for file, spans in mapped.items() if any(start <= address < end for start, end in spans)), None)
