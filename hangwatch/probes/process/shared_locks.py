"""Find processes that wait for a lock in shared memory: a semaphore of multiprocessing, or a shared mutex.

A lock between threads is a private futex, which only its own process releases. A lock in shared memory is not private
(futex(2), FUTEX_PRIVATE_FLAG). The kernel does not record its holder.
"""

import re
from collections import deque
from pathlib import Path

from hangwatch.model import list_by_key
from hangwatch.probes.base import system_calls
from hangwatch.probes.process import process_memory
from hangwatch.probes.process.process_memory import MOST_MAPS_BYTES

MOST_REGIONS = 8192
_PRIVATE_FLAG = 128
_SHARED = re.compile(rb"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) [r-][w-][x-]s [0-9a-f]+ ([0-9a-f:]+ [1-9]\d*)", re.MULTILINE)

Regions = dict[bytes, tuple[tuple[int, int], ...]]
"""Shared memory of a process: address ranges by device and inode, which are equal in all processes that map it."""


def awaited_address(pid: int, proc_root: Path, thread: int | None = None) -> int | None:
    """Return the address of the shared futex that the main thread (or `thread`) waits for; None without one."""
    call = system_calls.read(pid, proc_root, thread)
    is_shared = call is not None and call.name == "futex" and not call.arguments[1] & _PRIVATE_FLAG
    return call.arguments[0] if call is not None and is_shared else None


def regions(pid: int, proc_root: Path, most: int = MOST_REGIONS) -> Regions:
    """Return the shared memory of a process; empty if it may not be read or does not respond.

    A process may have 65,530 mappings (vm.max_map_count). At most `most` shared mappings are returned: the mappings at
    the highest addresses, which the kernel assigned first.
    """
    content = process_memory.SHARED.read_pieces(proc_root / str(pid) / "maps", [(0, MOST_MAPS_BYTES)])
    lines = _SHARED.finditer(b"".join(content) if isinstance(content, tuple) else b"")
    kept = deque((line.groups() for line in lines), maxlen=most)
    by_file = list_by_key((file, (int(start, 16), int(end, 16))) for start, end, file in kept)
    return {file: tuple(spans) for file, spans in by_file.items()}


def region_at(address: int, mapped: Regions) -> bytes | None:
    """Return device and inode of the shared memory at an address; None if the memory there is not shared."""
    return next((file for file, spans in mapped.items() if any(start <= address < end for start, end in spans)), None)
