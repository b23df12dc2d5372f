"""Walk the stack of a sleeping thread frame by frame, with the unwind tables of its libraries.

The tables are .eh_frame_hdr and .eh_frame (Linux Standard Base, Core 5.0, chapter 10; DWARF 5, 6.4). They are read
where the process has mapped them. Nothing is paused.

The tables are memory of the job, and not trusted. All reads are limited, and any content that compilers do not write
ends the walk. Only x86-64 is supported, where the return address is the word below the canonical frame address. On
other machines the walk ends at once.
"""

import io
import platform
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

MOST_FRAMES = 24
_MOST_FDES = 1 << 20
_MOST_ENTRY_BYTES = 2048  # those of libtorch_cpu have 1632 at most
_MOST_SEGMENTS = 64
_HIGHEST = 1 << 56
_EH_FRAME, _LOAD = 0x6474E550, 1
_TABLE = b"\x01\x1b\x03\x3b"  # version 1; pcrel sdata4, udata4, datarel sdata4: the encodings that linkers write
_RBP, _RSP, _RETURN = 6, 7, 16
_ARGS_SIZE = 0x2E  # DW_CFA_GNU_args_size, which elftools 0.33 reads, but does not decode; it changes no rule
_REGISTER_RULES = frozenset({0x80, 0xC0, *range(0x05, 0x0A), 0x10, 0x11, *range(0x14, 0x17)})
"""Call frame instructions that change the rule of a register, their first argument (DWARF 5, 7.24)."""
_ARCHITECTURE = platform.machine()

Read = Callable[[int, int], bytes]
"""Function that returns up to a number of bytes at an address."""


class Mapping(NamedTuple):
    """A mapping of a file, see proc_pid_maps(5)."""

    start: int
    end: int
    offset: int
    is_code: bool
    path: bytes


def mappings(maps: bytes) -> tuple[Mapping, ...]:
    """Return the mappings of files in a maps text."""
    parsed = []
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and re.fullmatch(rb"[0-9a-f]{1,16}-[0-9a-f]{1,16}", fields[0]):
            start, _, end = fields[0].partition(b"-")
            parsed.append(Mapping(int(start, 16), int(end, 16), int(fields[2], 16), b"x" in fields[1], fields[5]))
    return tuple(parsed)


def walk(address: int, stack: int, mapped: Sequence[Mapping], read: Read) -> Iterator[Mapping | None]:
    """Yield the mapping with the code of each frame, innermost first.

    None at the end means that the rest is unknown.
    """
    registers = {_RSP: stack}
    for depth in range(MOST_FRAMES):
        code = next((each for each in mapped if each.is_code and each.start <= address < each.end), None)
        yield code
        if code is None:
            return
        caller = _caller(address - (depth > 0), code, registers, mapped, read) if _ARCHITECTURE == "x86_64" else None
        if caller is None or caller[1][_RSP] <= registers[_RSP]:
            break
        address, registers = caller
    yield None


def _caller(
    address: int, code: Mapping, registers: dict[int, int], mapped: Sequence[Mapping], read: Read
) -> tuple[int, dict[int, int]] | None:
    """Return the return address of a frame and the known registers of its caller; None if unknown."""
    try:
        base = next(each.start for each in mapped if each.path == code.path and each.offset == 0)
        rules = _rules(address, _entry(address, base, read), read)
        register, offset = rules.frame
        frame = registers[register] + offset
        places = {number: frame + at for number, at in rules.saved.items() if number in (_RBP, _RETURN)}
        saved = {number: int.from_bytes(_bytes(read, place, 8), "little") for number, place in places.items()}
    except (_UnknownFrameError, StopIteration, KeyError, ValueError, struct.error, IndexError):  # or truncated
        return None
    if rules.saved.get(_RETURN) != -8:
        return None
    inherited = {_RBP: registers[_RBP]} if _RBP in registers else {}
    return saved.pop(_RETURN), {**inherited, **saved, _RSP: frame}


class _UnknownFrameError(Exception):
    """The error for a frame that the tables do not describe, or that they describe in an unsupported form."""


class _Rules(NamedTuple):
    """The rules of a frame: its canonical frame address as (register, offset), and the saved registers.

    `saved` maps registers to their offsets from the canonical frame address.
    """

    frame: tuple[int, int]
    saved: dict[int, int]


def _bytes(read: Read, address: int, count: int) -> bytes:
    raw = read(address, count) if 0 < address < _HIGHEST else b""
    if len(raw) != count:
        raise _UnknownFrameError
    return raw


def _entry(address: int, base: int, read: Read) -> int:
    """Return the address of the entry of .eh_frame for an instruction, from the sorted table in .eh_frame_hdr."""
    head = _bytes(read, base, 64)
    if head[:6] != b"\x7fELF\x02\x01":
        raise _UnknownFrameError
    at, size, count = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
    if size != 56 or not 0 < count <= _MOST_SEGMENTS:
        raise _UnknownFrameError
    segments = list(struct.iter_unpack("<IIQQQQQQ", _bytes(read, base + at, size * count)))
    first = next(segment[3] for segment in segments if segment[0] == _LOAD)
    header = next(segment[3] for segment in segments if segment[0] == _EH_FRAME) + base - (first & -4096)
    start = _bytes(read, header, 12)
    if start[:4] != _TABLE:
        raise _UnknownFrameError
    low, high = 0, struct.unpack_from("<I", start, 8)[0]
    if not 0 < high <= _MOST_FDES:
        raise _UnknownFrameError
    while high - low > 1:  # find the last entry that begins at or before the address
        middle = (low + high) // 2
        is_before = header + struct.unpack("<i", _bytes(read, header + 12 + 8 * middle, 4))[0] <= address
        low, high = (middle, high) if is_before else (low, middle)
    return int(header + struct.unpack("<i", _bytes(read, header + 16 + 8 * low, 4))[0])


def _rules(address: int, entry: int, read: Read) -> _Rules:
    """Return the rules for an instruction, from an entry of .eh_frame and its common entry."""
    body = _body(entry, read)
    common = _body(entry + 4 - struct.unpack_from("<I", body, 4)[0], read)
    rules = [rules for distance, rules in _rows(common, body) if distance <= address - entry]
    if not rules or rules[-1] is None:
        raise _UnknownFrameError
    return rules[-1]


@lru_cache(maxsize=64)  # ranks of a job have the same libraries
def _rows(common: bytes, body: bytes) -> tuple[tuple[int, _Rules | None], ...]:
    """Return the rules from each instruction on, by its distance from the entry; None if they are not supported."""
    if common[4:8] != bytes(4):
        raise _UnknownFrameError
    from elftools.common.exceptions import DWARFError, ELFError  # few captures need them
    from elftools.dwarf.callframe import CallFrameInfo
    from elftools.dwarf.structs import DWARFStructs

    # A section with these two alone. The second is at address 0.
    section = common + body[:4] + struct.pack("<I", len(common) + 4) + body[8:]
    structs = DWARFStructs(little_endian=True, dwarf_format=32, address_size=8)
    try:
        info = CallFrameInfo(io.BytesIO(section), len(section), -len(common), structs, for_eh_frame=True)
        entry: Any = info.get_entries()[1]
        for part in (entry.cie, entry):
            part.instructions = [each for each in part.instructions if _is_needed(each.opcode, each.args)]
        rows, cie, end = entry.get_decoded().table, entry.cie, entry["initial_location"] + entry["address_range"]
    except (ELFError, DWARFError, AssertionError, AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
        raise _UnknownFrameError from None
    if b"S" in cie["augmentation"] or cie["return_address_register"] != _RETURN:  # S: a signal frame
        raise _UnknownFrameError
    return (*((row["pc"], _supported(row)) for row in rows), (end, None))


def _is_needed(opcode: int, arguments: Sequence[Any]) -> bool:
    """True if an instruction concerns the walk. Rules of other registers would cost time: each row is a copy of all."""
    return opcode != _ARGS_SIZE and (opcode not in _REGISTER_RULES or arguments[0] in (_RBP, _RETURN))


def _supported(row: dict[Any, Any]) -> _Rules | None:
    saved = {number: row[number] for number in (_RBP, _RETURN) if number in row}
    if row["cfa"].reg is None or not all(rule.type in ("OFFSET", "UNDEFINED", "SAME_VALUE") for rule in saved.values()):
        return None
    offsets = {number: rule.arg for number, rule in saved.items() if rule.type == "OFFSET"}
    return _Rules((row["cfa"].reg, row["cfa"].offset), offsets)


def _body(address: int, read: Read) -> bytes:
    """Return an entry with the length before it."""
    raw = _bytes(read, address, 4)
    length = int.from_bytes(raw, "little")
    if not 4 <= length <= _MOST_ENTRY_BYTES:
        raise _UnknownFrameError
    return raw + _bytes(read, address + 4, length)
