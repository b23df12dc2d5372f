"""In whose code a thread waits, where Python shows no frame of it: `work.wait()` is a method of C++.

The return addresses of a wait stand in the first half KiB of its stack: those of the C library, then of who called it.
Nothing is paused and nothing is unwound; what stands there from before (the memory of a stack is not cleared) may add a
library, never take one away. Tried on torch 2.13.0 with gloo: libtorch_cpu is 264 bytes from the top in a wait for
irecv or for an asynchronous all_reduce, and nowhere in 4 KiB where a lock, a queue or a thread is waited for, after
collectives and after backward.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

from hangwatch.probes import memory, pseudofiles, system_calls

_MOST_STACK_BYTES = 512
_MOST_MAPS_BYTES = 8 << 20
_LIBRARY = re.compile(rb"/lib(?:torch|c10|nccl|cuda)[^/]*\.so[0-9.]*(?: \(deleted\))?$")


def waits_in_torch(pid: int, proc_root: Path) -> bool:
    """Whether the main thread sleeps in a futex (futex(2)) of torch, NCCL or CUDA; False also where nobody may look."""
    folder = proc_root / str(pid)
    text = pseudofiles.read(folder / "task" / str(pid) / "syscall", f"pid {pid}")
    fields = text.split() if isinstance(text, str) else []
    if len(fields) != 9 or not fields[0].isdecimal() or system_calls.names().get(int(fields[0])) != "futex":
        return False
    raw = memory.SHARED.read(folder / "mem", int(fields[7], 16), _MOST_STACK_BYTES)
    words = [word for (word,) in struct.iter_unpack("=Q", raw[: len(raw) // 8 * 8])]
    maps = memory.SHARED.read_pieces(folder / "maps", [(0, _MOST_MAPS_BYTES)]) if words else ()
    return isinstance(maps, tuple) and any(
        first <= word < end for content in maps for first, end in _code(content) for word in words
    )


def _code(maps: bytes) -> Iterator[tuple[int, int]]:
    """The executable mappings of these libraries, see proc_pid_maps(5)."""
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and b"x" in fields[1] and _LIBRARY.search(fields[5]):
            first, _, end = fields[0].partition(b"-")
            yield int(first, 16), int(end, 16)
