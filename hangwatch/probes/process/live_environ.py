"""Read a process's environment as it is now, from its memory.

`/proc/PID/environ` shows the environment at the start. Ray, verl, notebooks and workers of mp.spawn set their rank
later, with `os.environ`. This changes the array to which the C library's variable `environ` points, see environ(7).

That variable is found as ld.so(8) finds it: in the symbols of the program, else in those of the C library. A program
that is not position-independent has a copy of the variable (R_X86_64_COPY), and the library's own one is dead. All is
read in the memory of the process, so a container makes no difference. Nothing is paused. The owner of the process can
forge everything, as in its initial environment.
"""

import contextlib
import re
import struct
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hangwatch import words
from hangwatch.model import ProcessId
from hangwatch.probes.base import procfs
from hangwatch.probes.base.pseudo_files import PAGE_BYTES
from hangwatch.probes.process import environment, process_memory
from hangwatch.probes.process.environment import Environment
from hangwatch.probes.process.memory_image import NOWHERE, Image, Read, UnreadableError, require
from hangwatch.probes.process.process_memory import FilePlaces
from hangwatch.tables import launchers

MOST_SECONDS = 0.5  # of one reading; it costs at most 50 ms of CPU, but may wait for a core
MOST_MAPS_BYTES = 4 << 20
MOST_VARIABLES = 4096
MOST_CHOSEN = 256  # the tables have fewer names
MOST_KNOWN = 256
NAMES = (b"environ", b"__environ", b"_environ")  # aliases in glibc and musl
_PROCESSES_PER_QUESTION = 256
_TRIES = 3  # each putenv(3) may move the array
_NAME_BYTES = 64  # longer names are in no table
_HASH_VALUES = 64  # of one chain of a hash table
_MAPPED_FILE = re.compile(rb"^([0-9a-f]+)-\S+ \S+ 0+ (\S+) (\d+) +(/.*)$", re.MULTILINE)
_C_LIBRARY = re.compile(rb"/(?:libc[.-][^/]*so[^/]*|ld-musl-[^/]*)$")
_LIBRARIES = {"torch": re.compile(rb"/libtorch(?:_\w+)?\.so"), "jax": re.compile(rb"/jaxlib/[^\n]*\.so")}

_ELF_HEADER = struct.Struct("<4sBB10xHHIQQQIHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<QQ")
_HASH_TABLE = struct.Struct("<IIII")
_SYMBOL = struct.Struct("<IBBHQQ")
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 5, 6, 0x6FFFFEF5


class Module(NamedTuple):
    """A program or library in the memory of a process: its file, and the address of its first page."""

    device: bytes
    inode: bytes
    start: int


class Modules(NamedTuple):
    """The modules that may define `environ`, in the order of ld.so(8), and the known libraries ("torch", "jax")."""

    searched: tuple[Module, ...]
    libraries: tuple[str, ...]


class Place(NamedTuple):
    """The address of the variable `environ`, and the array as last read: its address and content."""

    symbol: int
    array: int = 0
    pointers: bytes = b""


class LiveEnvironments:
    """The present environments of processes. The places of symbols are cached by file, first page and owner.

    The first page holds the build id. The owner can change the symbols in the memory of its processes, so nothing is
    taken from a process of another owner.
    """

    def __init__(self, proc_root: Path = procfs.PROC) -> None:
        self._proc_root = proc_root
        self._offsets: dict[tuple[str, bytes, bytes, str], int | None] = {}

    def find_modules(self, process: ProcessId) -> Modules | None:
        """Read /proc/PID/maps, see proc_pid_maps(5). Return None if it cannot be read."""
        try:
            program = bytes((self._proc_root / str(process.pid) / "exe").readlink())
            (maps,) = self._reader(process, "maps")([(0, MOST_MAPS_BYTES)])
        except (OSError, UnreadableError):
            return None
        return parse_maps(maps, program)

    def find_libraries(self, process: ProcessId) -> tuple[str, ...] | None:
        """Return the libraries ("torch", "jax") that a process maps; () if it maps little, None if not readable."""
        if procfs.read_mapped_bytes(process.pid, self._proc_root) < procfs.FRAMEWORK_MAPPED_BYTES:
            return ()
        modules = self.find_modules(process)
        return None if modules is None else modules.libraries

    def find_place(self, process: ProcessId, modules: Modules, owner: str) -> Place | None:
        """Return the place of `environ`; None if it cannot be read. A static program has none."""
        image = Image(self._reader(process, "mem"))
        with contextlib.suppress(UnreadableError):
            for module in modules.searched:
                (page,) = image.take([(module.start, PAGE_BYTES)])
                key = (owner, module.device, module.inode, words.checksum(page, 32))
                if key not in self._offsets:
                    if len(self._offsets) >= MOST_KNOWN:
                        self._offsets.clear()
                    self._offsets[key] = find_symbol(image, module.start, page)
                offset = self._offsets[key]
                if offset is not None:
                    return Place(module.start + offset)
        return None

    def find_unchanged(self, places: Mapping[ProcessId, Place]) -> frozenset[ProcessId]:
        """Return the processes which still have the array of this place. One question asks for many processes."""
        known = [(process, place) for process, place in places.items() if place.array]
        unchanged: list[ProcessId] = []
        for first in range(0, len(known), _PROCESSES_PER_QUESTION):
            part = known[first : first + _PROCESSES_PER_QUESTION]
            files = [
                FilePlaces(self._proc_root / str(process.pid) / "mem", _array_places(place)) for process, place in part
            ]
            for (process, place), pieces in zip(part, process_memory.SHARED.read_files(files), strict=True):
                if not isinstance(pieces, int) and _has_array(place, *pieces):
                    unchanged.append(process)
        return frozenset(unchanged)

    def read(
        self, process: ProcessId, place: Place, wanted: Container[str], shown: Container[str] = ()
    ) -> tuple[Place, Environment] | None:
        """Return the variables in `wanted` and `shown`, and the place for the next call.

        None if nothing has changed, or if they cannot be read. The limits are those of `environment.read`.
        """
        with contextlib.suppress(UnreadableError):
            return read_environ(self._reader(process, "mem"), place, wanted, shown)
        return None

    def read_variables(self, process: ProcessId, owner: str) -> dict[str, str]:
        """Return the variables of launchers that a process has now; empty if they cannot be read."""
        modules = self.find_modules(process)
        place = self.find_place(process, modules, owner) if modules else None
        answer = self.read(process, place, launchers.VARIABLES, launchers.SHOWN) if place else None
        return answer[1].variables if answer else {}

    def _reader(self, process: ProcessId, name: str) -> Read:
        return process_memory.reader(self._proc_root / str(process.pid) / name, MOST_SECONDS)


def parse_maps(maps: bytes, program: bytes) -> Modules:
    """Return the program and the C library among the mapped files, and the names of known libraries."""
    found: dict[bool, Module] = {}
    for start, device, inode, path in _MAPPED_FILE.findall(maps):
        is_program = path == program
        if is_program or _C_LIBRARY.search(path.removesuffix(b" (deleted)")):
            found.setdefault(is_program, Module(device, inode, int(start, 16)))
    libraries = tuple(name for name, pattern in _LIBRARIES.items() if pattern.search(maps))
    return Modules(tuple(found[is_program] for is_program in (True, False) if is_program in found), libraries)


def find_symbol(image: Image, start: int, page: bytes) -> int | None:
    """Return the offset of `environ` from the first page of an ELF module; None if the module does not define it."""
    magic, is_64_bit, order, *_, segments_at, _, _, _, segment_bytes, segments = _ELF_HEADER.unpack_from(page)
    is_known = (magic, is_64_bit, order, segment_bytes) == (b"\x7fELF", 2, 1, _SEGMENT.size)
    require(is_known, "a module is not an ELF file of 64 bits")
    end = segments_at + segments * _SEGMENT.size
    require(end <= PAGE_BYTES, "the program headers are not in the first page")
    headers = list(_SEGMENT.iter_unpack(page[segments_at:end]))
    first = next((header[3] for header in headers if header[0] == _PT_LOAD and header[2] == 0), None)
    dynamic = next(((header[3], header[6]) for header in headers if header[0] == _PT_DYNAMIC), None)
    if first is None or dynamic is None:
        return None
    base = start - int(first)
    require(dynamic[1] <= PAGE_BYTES and dynamic[1] % _DYNAMIC.size == 0, "its dynamic section is too large")
    (raw,) = image.take([(base + dynamic[0], dynamic[1])])
    # glibc has added the base to these addresses, musl has not.
    tags = {tag: value if value >= base else base + value for tag, value in _DYNAMIC.iter_unpack(raw)}
    if not tags.keys() >= {_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH}:
        return None
    for name in NAMES:
        value = _look_up(image, name, tags[_DT_GNU_HASH], tags[_DT_SYMTAB], tags[_DT_STRTAB])
        if value is not None:
            return base + value - start
    return None


def _look_up(image: Image, name: bytes, table: int, symbols: int, strings: int) -> int | None:
    """Return the value of a defined symbol by the table DT_GNU_HASH, as `do_lookup_x` of glibc (elf/dl-lookup.c)."""
    wanted = 5381
    for byte in name:
        wanted = (wanted * 33 + byte) & 0xFFFFFFFF
    (raw,) = image.take([(table, _HASH_TABLE.size)])
    buckets, first_symbol, words, _ = _HASH_TABLE.unpack(raw)
    require(buckets > 0, "its hash table is empty")
    buckets_at = table + _HASH_TABLE.size + 8 * words
    (raw,) = image.take([(buckets_at + 4 * (wanted % buckets), 4)])
    number = int.from_bytes(raw, "little")
    if number < first_symbol:
        return None
    (chain,) = image.take_mapped([buckets_at + 4 * (buckets + number - first_symbol)], 4 * _HASH_VALUES)
    for (value,) in struct.iter_unpack("<I", chain[: len(chain) & -4]):
        if value | 1 == wanted | 1:
            (raw,) = image.take([(symbols + _SYMBOL.size * number, _SYMBOL.size)])
            name_at, _, _, section, address, _ = _SYMBOL.unpack(raw)
            (text,) = image.take([(strings + name_at, len(name) + 1)])
            if text == name + b"\0" and section:
                return int(address)
        if value & 1:  # the last one of the chain
            break
        number += 1
    return None


def read_environ(
    read: Read, place: Place, wanted: Container[str], shown: Container[str] = ()
) -> tuple[Place, Environment] | None:
    """Return the variables to which `place.symbol` leads, and the new place; None if the array is that of `place`.

    The place is read again together with the texts, because all of it may move meanwhile. Raises UnreadableError.
    """
    image = Image(read)
    if place.array and _take_unchanged(read, place, ()) is not None:
        return None
    error = UnreadableError("ChangedWhileRead", f"the environment changed during {_TRIES} readings")
    for _ in range(_TRIES):
        try:
            new = Place(place.symbol, *_read_array(image, place.symbol))
            texts = _take_unchanged(read, new, _choose(image, new.pointers, wanted, shown))
            if texts is not None:
                selected = environment.select([b"".join(text + b"\0" for text in texts)], wanted, shown, whole=True)
                return new, selected._replace(is_empty=not new.pointers)
        except UnreadableError as unreadable:
            if unreadable.reason != "UnknownLayout":  # an old array, which is no longer mapped
                raise
            error = unreadable
    raise error


def _read_array(image: Image, symbol: int) -> tuple[int, bytes]:
    """Return the address of the array, and its pointers without the final null. clearenv(3) removes the array."""
    (raw,) = image.take([(symbol, 8)])
    array = int.from_bytes(raw, "little")
    if not array:
        return 0, b""
    (raw,) = image.take_mapped([array], 8 * (MOST_VARIABLES + 1))
    for at in range(0, len(raw) - 7, 8):
        if raw[at : at + 8] == bytes(8):
            return array, raw[:at]
    if len(raw) == 8 * (MOST_VARIABLES + 1):
        raise UnreadableError("TooLarge", f"it has more than {MOST_VARIABLES:,} variables")
    raise UnreadableError("UnknownLayout", "its array leads to unmapped memory")


def _choose(image: Image, pointers: bytes, wanted: Container[str], shown: Container[str]) -> list[int]:
    """Return the addresses of the variables in `wanted` and `shown`. A text without "=" is skipped."""
    addresses = [address for (address,) in struct.iter_unpack("<Q", pointers)]
    chosen = []
    for address, head in zip(addresses, image.take_mapped(addresses, _NAME_BYTES), strict=True):
        name, equals, _ = head.partition(b"\0")[0].decode("utf-8", "replace").partition("=")
        if equals and (name in wanted or name in shown):
            chosen.append(address)
    if len(chosen) > MOST_CHOSEN:
        raise UnreadableError("TooLarge", f"more than {MOST_CHOSEN} variables have the wanted names")
    return chosen


def _take_unchanged(read: Read, place: Place, addresses: Sequence[int]) -> list[bytes] | None:
    """Return the texts at `addresses`, or None if the array is not that of `place` or a text changes.

    The texts are read before the array and again after it. All is one question, because each answer waits for a core.
    """
    texts = [(address, _NAME_BYTES + environment.VALUE_CHARACTERS) for address in addresses]
    pieces = read([*texts, *_array_places(place), *texts])
    if not _has_array(place, *pieces[len(texts) : len(texts) + 2]):
        return None
    # What follows a text belongs to others, and may change.
    first, second = (
        [text.partition(b"\0")[0] for text in part] for part in (pieces[: len(texts)], pieces[len(texts) + 2 :])
    )
    return first if first == second else None


def _array_places(place: Place) -> list[tuple[int, int]]:
    """Return where the variable `environ` is, and its array with the final null."""
    return [(place.symbol, 8), (place.array, len(place.pointers) + 8) if place.array else NOWHERE]


def _has_array(place: Place, symbol: bytes, pointers: bytes) -> bool:
    expected = place.pointers + bytes(8) if place.array else b""
    return int.from_bytes(symbol, "little") == place.array and pointers == expected
