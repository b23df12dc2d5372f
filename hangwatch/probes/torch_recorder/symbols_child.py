"""Finds the flight recorder's static pointer in a library that a job has mapped. Runs by itself.

Started as `python -I symbols_child.py JSON`, [path of /proc/PID/root, path of the library, device, inode, offset of its
first mapping, library]; prints JSON: how far behind that mapping the pointer lies (null: no symbol tells), the version
of the installation, and the checksum of the first page. The file is the job's: it may block, be cut off while it is
read, or be no library; then this process ends, and nobody else.
"""

import hashlib
import json
import mmap
import os
import re
import resource
import stat
import struct
import sys

from elftools.elf.elffile import ELFFile

PAGE = 4096
MOST_TABLE_BYTES = 1 << 30
MOST_VERSION_BYTES = 1 << 16
MOST_SECONDS = 20
# Of FlightRecorder<Event>::get(), FlightRecorder::get() of up to 2.7, and NCCLTraceBuffer::get() of 2.5.
NAME = re.compile(rb"\0(_ZZN4c10d(?:14FlightRecorder(?:I[^\0]{1,200}E)?|15NCCLTraceBuffer)3getEvE8instance)(?=\0)")
OF_GLOO = b"IN3c105EventEE"
SYMBOL = struct.Struct("<IBBHQQ")


def opened(root: str, path: str) -> int:
    """A file below a folder, of which no part is a link. Raises OSError."""
    *folders, name = [step for step in path.split("/") if step]
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for step in folders:
            inner = os.open(step, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = inner
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
    finally:
        os.close(here)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError("is no file")
    return file


def mapped(file: int, offset: int, size: int) -> tuple[mmap.mmap, int]:
    """A part of a file, and how many bytes of its first page lie before it."""
    if not 0 < size <= MOST_TABLE_BYTES:
        raise ValueError("a table is too large")
    before = offset % mmap.ALLOCATIONGRANULARITY
    return mmap.mmap(file, before + size, prot=mmap.PROT_READ, offset=offset - before), before


def values(file: int, symbols: tuple[int, int], strings: tuple[int, int], library: str) -> list[int]:
    """The values of the symbols that are the static pointer, by the offsets and sizes of both tables."""
    (names, names_at), (table, table_at) = mapped(file, *strings), mapped(file, *symbols)
    found = []
    for name in NAME.finditer(names, names_at):
        if (OF_GLOO in name[1]) != (library == "gloo"):
            continue
        number = struct.pack("<I", name.start(1) - names_at)
        at = table.find(number, table_at)
        while at >= 0 and (at - table_at) % SYMBOL.size:
            at = table.find(number, at + 1)
        if at >= 0:
            found.append(SYMBOL.unpack_from(table, at)[4])
    return found


def pointer(file: int, library: str, offset: int) -> int | None:
    """How far behind the mapping of `offset` the static pointer lies; None where not exactly one symbol tells."""
    with os.fdopen(os.dup(file), "rb") as stream:
        elf = ELFFile(stream)
        table = elf.get_section_by_name(".symtab") or elf.get_section_by_name(".dynsym")
        if table is None or elf.elfclass != 64 or not elf.little_endian:
            return None
        strings = elf.get_section(table["sh_link"])
        found = values(
            file, (table["sh_offset"], table["sh_size"]), (strings["sh_offset"], strings["sh_size"]), library
        )
        loads = [segment.header for segment in elf.iter_segments("PT_LOAD")]
    first = [load for load in loads if load["p_offset"] & -PAGE == offset]
    if len(found) != 1 or not first:
        return None
    return int(found[0] - (first[0]["p_vaddr"] - (first[0]["p_offset"] - offset)))


def version(root: str, path: str) -> str:
    """What torch/version.py, two folders up, says of itself; nothing where there is none."""
    try:
        file = opened(root, f"{path.rsplit('/', 2)[0]}/version.py")
    except OSError:
        return ""
    with os.fdopen(file, "rb") as stream:
        found = re.search(rb"^__version__ = '([0-9A-Za-z.+_-]{1,64})'", stream.read(MOST_VERSION_BYTES), re.MULTILINE)
    return found[1].decode() if found is not None else ""


def main() -> None:
    """Answer the one question."""
    root, path, device, inode, offset, library = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    file = opened(root, path)
    status = os.fstat(file)
    if f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}" != device or status.st_ino != inode:
        sys.exit("another file lies there")
    answer = {
        "page": hashlib.sha256(os.pread(file, PAGE, offset)).hexdigest(),
        "version": version(root, path),
        "pointer": pointer(file, library, offset),
    }
    print(json.dumps(answer), flush=True)  # noqa: T201 - this is the answer to the parent


if __name__ == "__main__":
    main()
