"""Find the PyTorch libraries that a process has mapped, in /proc/PID/maps (proc_pid_maps(5)). Pure."""

import re
from typing import NamedTuple

from hangwatch.model.flight_records import Library
from hangwatch.probes.base import mappings

# Debian appends a version. libtorch_cpu has gloo's recorder, libtorch_cuda NCCL's.
_NAME = re.compile(rb"/libtorch_(cpu|cuda)\.so[0-9.]*(?: \(deleted\))?$")
_KINDS: dict[bytes, Library] = {b"cpu": "gloo", b"cuda": "nccl"}
MOST_LIBRARIES = 4


class Mapped(NamedTuple):
    """A library as mapped by a process: its first mapping, and its writable data as (first address, end)."""

    library: Library
    path: str
    device: str
    inode: int
    start: int
    offset: int
    data: tuple[tuple[int, int], ...]


class Mappings(NamedTuple):
    """The libraries, and all writable memory as (first address, end) in rising order."""

    libraries: tuple[Mapped, ...]
    writable: tuple[tuple[int, int], ...]


def parse_maps(maps: bytes) -> Mappings:
    """Return at most `MOST_LIBRARIES` libraries, each with its first mapping, and the writable memory of a process."""
    libraries: dict[tuple[bytes, bytes, int], Mapped] = {}
    writable: list[tuple[int, int]] = []
    previous_library, previous_end = None, 0
    for row in mappings.parse(maps):
        name, key = _NAME.search(row.path), (row.path, row.device, row.inode)
        if name is not None and key not in libraries and len(libraries) < MOST_LIBRARIES:
            text, device = (raw.decode("utf-8", "surrogateescape") for raw in (row.path, row.device))
            libraries[key] = Mapped(_KINDS[name[1]], text, device, row.inode, row.start, row.offset, ())
        is_library = name is not None and key in libraries
        # .bss follows the end of the file
        is_bss = not row.path and row.start == previous_end and previous_library is not None
        if row.permissions.startswith(b"rw"):
            writable.append((row.start, row.end))
            owner = key if is_library else previous_library if is_bss else None
            if owner is not None:
                libraries[owner] = libraries[owner]._replace(data=(*libraries[owner].data, writable[-1]))
        previous_library, previous_end = (key if is_library else previous_library if is_bss else None), row.end
    return Mappings(tuple(libraries.values()), tuple(writable))
