"""Pure: find the PyTorch libraries that a process has mapped, in /proc/PID/maps (proc_pid_maps(5))."""

import re
from typing import NamedTuple

from hangwatch.model.flight_records import Library

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
    """Return at most `MOST_LIBRARIES` libraries and the writable memory of a maps text.

    A library that is mapped twice is returned with its first mapping.
    """
    libraries: dict[tuple[bytes, bytes, bytes], Mapped] = {}
    writable: list[tuple[int, int]] = []
    previous_library, previous_end = None, 0
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
        if name is not None and key not in libraries and len(libraries) < MOST_LIBRARIES:
            text, device = (raw.decode("utf-8", "surrogateescape") for raw in (path, fields[3]))
            libraries[key] = Mapped(_KINDS[name[1]], text, device, inode, start, offset, ())
        is_library = name is not None and key in libraries
        is_bss = not path and start == previous_end and previous_library is not None  # .bss follows the end of the file
        if fields[1].startswith(b"rw"):
            writable.append((start, end))
            owner = key if is_library else previous_library if is_bss else None
            if owner is not None:
                libraries[owner] = libraries[owner]._replace(data=(*libraries[owner].data, (start, end)))
        previous_library, previous_end = (key if is_library else previous_library if is_bss else None), end
    return Mappings(tuple(libraries.values()), tuple(writable))
