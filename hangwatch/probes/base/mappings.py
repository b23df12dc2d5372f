"""Parser for /proc/PID/maps, see proc_pid_maps(5). Pure."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_ROW = re.compile(
    rb"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) (\S{4}) ([0-9a-f]{1,16}) (\S+) ([0-9]{1,20}) *(.*)$", re.MULTILINE
)


class Mapping(NamedTuple):
    """A part of the memory of a process. `permissions` are as in `r-xp`. Without a file, `path` is empty."""

    start: int
    end: int
    permissions: bytes
    offset: int
    device: bytes
    inode: int
    path: bytes


def parse(maps: bytes) -> Iterator[Mapping]:
    """Yield the mappings in rising order. A row in another form is skipped."""
    for row in _ROW.finditer(maps):
        start, end, permissions, offset, device, inode, path = row.groups()
        yield Mapping(int(start, 16), int(end, 16), permissions, int(offset, 16), device, int(inode), path)
