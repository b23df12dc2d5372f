"""Which libraries of PyTorch a process has mapped, and where: pure, from /proc/PID/maps (proc_pid_maps(5))."""

from __future__ import annotations

import re
from typing import NamedTuple

from hangwatch.model.flight_records import Library

# Debian's has a number behind it. In libtorch_cpu is gloo's recorder, in libtorch_cuda NCCL's.
_NAME = re.compile(rb"/libtorch_(cpu|cuda)\.so[0-9.]*(?: \(deleted\))?$")
_KINDS: dict[bytes, Library] = {b"cpu": "gloo", b"cuda": "nccl"}
MOST_LIBRARIES = 4


class Mapped(NamedTuple):
    """A library as a process has mapped it: its first mapping, and its writable data as (first address, end)."""

    library: Library
    path: str
    device: str
    inode: int
    start: int
    offset: int
    data: tuple[tuple[int, int], ...]


class Mappings(NamedTuple):
    """The libraries, and everything writable, as (first address, end) in rising order."""

    libraries: tuple[Mapped, ...]
    writable: tuple[tuple[int, int], ...]


def mapped(maps: bytes) -> Mappings:
    """What the text says: of a library that is mapped twice the first mapping, and so many libraries at most."""
    found: dict[tuple[bytes, bytes, bytes], Mapped] = {}
    writable: list[tuple[int, int]] = []
    before, before_end = None, 0
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) < 5:
            continue
        first, _, last = fields[0].partition(b"-")
        try:
            start, end, offset, inode = int(first, 16), int(last, 16), int(fields[2], 16), int(fields[4])
        except ValueError:
            continue
        path = fields[5] if len(fields) > 5 else b""
        name, key = _NAME.search(path), (path, fields[3], fields[4])
        if name is not None and key not in found and len(found) < MOST_LIBRARIES:
            shown = path.decode("utf-8", "surrogateescape")
            found[key] = Mapped(_KINDS[name[1]], shown, fields[3].decode(), inode, start, offset, ())
        is_its_own = name is not None and key in found
        is_zeroed = not path and start == before_end and before is not None  # .bss goes on where the file ends
        if fields[1].startswith(b"rw"):
            writable.append((start, end))
            owner = key if is_its_own else before if is_zeroed else None
            if owner is not None:
                found[owner] = found[owner]._replace(data=(*found[owner].data, (start, end)))
        before, before_end = (key if is_its_own else before if is_zeroed else None), end
    return Mappings(tuple(found.values()), tuple(writable))
