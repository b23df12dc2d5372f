"""Find the static variables of the flight recorders in a library that a job has mapped. A script.

Started as `python -I symbols_child.py ROOT PATH DEVICE INODE OFFSET LIBRARY`: path of /proc/PID/root, path of the
library, its device and inode, offset of its first mapping, its kind. It prints JSON: the checksum of the first page,
and a list of the offset from that mapping of the pointer to the recorder (null if no symbol matches), the torch
version, and the offset of the registry. The file belongs to the job. It may block, be truncated while it is read, or
not be a library. Then only this process ends.
"""

import json
import mmap
import os
import re
import resource
import struct
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from elftools.common.utils import struct_parse
from elftools.elf.elffile import ELFFile

from hangwatch.formats import bounded_read

PAGE = 4096
MOST_TABLE_BYTES = 512 << 20  # 84 MiB in the CPU wheel of torch 2.13; more in builds with debug names
MOST_VERSION_BYTES = 1 << 16
MOST_SECONDS = 2  # of CPU; a real libtorch needs 0.1
# FlightRecorder<Event>::get(), FlightRecorder::get() up to 2.7, and NCCLTraceBuffer::get() of 2.5; from 2.15 on also
# getFlightRecorder(backend).
NAME = re.compile(
    rb"\0(_ZZN4c10d(?:(?:14FlightRecorder(?:I[^\0]{1,200}E)?|15NCCLTraceBuffer)3getEvE8instance"
    rb"|17getFlightRecorderE[^\0]{1,200}E8registry))(?=\0)"
)
OF_REGISTRY = b"E8registry"
OF_GLOO = b"IN3c105EventEE"
SYMBOL = struct.Struct("<IBBHQQ")


def open_below(root: str, path: str) -> BinaryIO:
    """Open a regular file below a folder. No part of its path may be a link. Raises FileError."""
    return bounded_read.open_below(Path(root), Path(root, *Path(path).parts[1:]))


def map_part(file: int, offset: int, size: int) -> tuple[mmap.mmap, int]:
    """Map a part of a file. Return the map and the offset of the part in it."""
    if not 0 < size <= MOST_TABLE_BYTES:
        raise ValueError("a table is too large")
    lead_bytes = offset % mmap.ALLOCATIONGRANULARITY
    return mmap.mmap(file, lead_bytes + size, prot=mmap.PROT_READ, offset=offset - lead_bytes), lead_bytes


def symbol_values(
    file: int, symbols: tuple[int, int], strings: tuple[int, int], library: str
) -> tuple[list[int], list[int]]:
    """Return the values of the symbols of the pointer, and of the registry. Both tables are given as (offset, size)."""
    (names, names_at), (table, table_at) = map_part(file, *strings), map_part(file, *symbols)
    pointers: list[int] = []
    registries: list[int] = []
    for name in NAME.finditer(names, names_at):
        is_registry = name[1].endswith(OF_REGISTRY)
        if not is_registry and (OF_GLOO in name[1]) != (library == "gloo"):
            continue
        number = struct.pack("<I", name.start(1) - names_at)
        at = table.find(number, table_at)
        while at >= 0 and (at - table_at) % SYMBOL.size:
            at = table.find(number, at + 1)
        if at >= 0:
            (registries if is_registry else pointers).append(SYMBOL.unpack_from(table, at)[4])
        if max(len(pointers), len(registries)) > 1:
            break  # two of one kind are as good as none
    return pointers, registries


def headers(elf: ELFFile, form: Any, offset: int, size: int, count: int) -> list[Any]:
    """Return the headers in a table. elftools' own sections would be slow: they read the hash tables of all symbols."""
    return [struct_parse(form, elf.stream, offset + number * size) for number in range(count)]


def places(file: int, library: str, offset: int) -> tuple[int | None, int | None]:
    """Return the offsets of pointer and registry from the mapping of `offset`; None unless one symbol matches."""
    with os.fdopen(os.dup(file), "rb") as stream:
        elf = ELFFile(stream)
        sections = headers(elf, elf.structs.Elf_Shdr, elf["e_shoff"], elf["e_shentsize"], elf.num_sections())
        tables = {section["sh_type"]: section for section in sections}
        table = tables.get("SHT_SYMTAB") or tables.get("SHT_DYNSYM")
        if table is None or elf.elfclass != 64 or not elf.little_endian:
            return None, None
        strings = sections[table["sh_link"]]
        values = symbol_values(
            file, (table["sh_offset"], table["sh_size"]), (strings["sh_offset"], strings["sh_size"]), library
        )
        segments = headers(elf, elf.structs.Elf_Phdr, elf["e_phoff"], elf["e_phentsize"], elf.num_segments())
        loads = [segment for segment in segments if segment["p_type"] == "PT_LOAD"]
    first_loads = [load for load in loads if load["p_offset"] & -PAGE == offset]
    if not first_loads:
        return None, None
    base = int(first_loads[0]["p_vaddr"] - (first_loads[0]["p_offset"] - offset))
    pointer, registry = (of_kind[0] - base if len(of_kind) == 1 else None for of_kind in values)
    return pointer, registry


def version(root: str, path: str) -> str:
    """Return the version in torch/version.py, in the parent of the library's folder; empty if there is none."""
    try:
        with open_below(root, f"{path.rsplit('/', 2)[0]}/version.py") as stream:
            text = stream.read(MOST_VERSION_BYTES)
    except bounded_read.FileError:
        return ""
    match = re.search(rb"^__version__ = '([0-9A-Za-z.+_-]{1,64})'", text, re.MULTILINE)
    return match[1].decode() if match is not None else ""


def main() -> None:
    """Print the answer to the question in the arguments."""
    root, path, device, inode, offset, library = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    stream = open_below(root, path)
    file, status = stream.fileno(), os.fstat(stream.fileno())
    if f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}" != device or status.st_ino != int(inode):
        sys.exit("the file has been replaced by another")
    pointer, registry = places(file, library, int(offset))
    page = blake2b(os.pread(file, PAGE, int(offset)), digest_size=32).hexdigest()
    print(json.dumps([page, [pointer, version(root, path), registry]]), flush=True)  # noqa: T201 - this is the answer to the parent


if __name__ == "__main__":
    main()
