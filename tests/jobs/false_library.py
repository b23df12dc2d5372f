"""A process of a hostile user, with a file of its own that looks like libtorch and is slow to search. A script.

usage: python false_library.py FOLDER COUNT      as root

Start this number of processes, as user nobody. The table of symbols needs more CPU time than is allowed, and the data
points to as many objects as are searched. Each prints its pid when it is ready, and they end with the first of them.
"""

import ctypes
import mmap
import os
import signal
import struct
import sys
from pathlib import Path

SYMBOL = b"\0_ZZN4c10d14FlightRecorder3getEvE8instance"
SECTION_NAMES = b"\0.symtab\0.strtab\0.shstrtab\0"
TABLE_BYTES, DATA_BYTES, HEAP_BYTES = 240 << 20, 1 << 20, 400 << 20
POINTERS, NOBODY = 65_000, 65534


def section(name: int, kind: int, offset: int, size: int, link: int = 0, entry_bytes: int = 0) -> bytes:
    """Return an Elf64_Shdr, see elf(5)."""
    return struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, link, 0, 8, entry_bytes)


def write_library(path: Path) -> int:
    """Write a sparse file with many names of recorders, none of which is in its table. Return the offset of its data."""
    strings = SYMBOL * 2000 + b"\0"
    names_at = 4096 + len(strings)
    sections_at = (names_at + len(SECTION_NAMES) + 63) & -64
    data_at = (sections_at + 4 * 64 + 4095) & -4096
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, 62, 1, 0, 64, sections_at, 0, 64, 56, 1, 64, 4, 3)
    sections = [
        section(0, 0, 0, 0),
        section(1, 2, data_at + DATA_BYTES, TABLE_BYTES, 2, 24),
        section(9, 3, 4096, len(strings)),
        section(17, 3, names_at, len(SECTION_NAMES)),
    ]
    with path.open("wb") as library:
        library.write(head + struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 4096, 4096, 4096))
        for offset, content in ((4096, strings), (names_at, SECTION_NAMES), (sections_at, b"".join(sections))):
            library.seek(offset)
            library.write(content)
        library.truncate(data_at + DATA_BYTES + TABLE_BYTES)
    return data_at


def main() -> None:
    """Start the processes. Each maps its own library until it is killed."""
    folder, count = sys.argv[1], int(sys.argv[2])
    prctl = ctypes.CDLL(None).prctl
    for rank in range(1, count):
        if os.fork() == 0:
            os.environ["RANK"] = str(rank)
            break
    library = Path(folder) / str(os.getpid()) / "libtorch_cpu.so"
    library.parent.mkdir()
    data_at = write_library(library)
    file = os.open(library, os.O_RDWR)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(4, 1)  # PR_SET_DUMPABLE: the user's own processes are
    prctl(1, signal.SIGKILL if "RANK" in os.environ else 0)  # PR_SET_PDEATHSIG
    code = mmap.mmap(file, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
    data = mmap.mmap(file, DATA_BYTES, flags=mmap.MAP_PRIVATE, offset=data_at)
    heap = mmap.mmap(-1, HEAP_BYTES)
    first = ctypes.addressof(ctypes.c_char.from_buffer(heap)) & -16
    data[: POINTERS * 8] = struct.pack(f"<{POINTERS}Q", *range(first, first + 6144 * POINTERS, 6144))
    os.write(1, b"%d\n" % os.getpid())
    signal.pause()
    del code


main()
