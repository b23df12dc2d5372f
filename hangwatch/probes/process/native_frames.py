"""Walk the stack of a sleeping thread frame by frame, with the unwind tables of its libraries.

The tables are .eh_frame_hdr and .eh_frame (Linux Standard Base, Core 5.0, chapter 10; DWARF 5, 6.4). They are read
where the process has mapped them. Nothing is paused.

The tables are memory of the job, and not trusted. All reads are limited, and any content that compilers do not write
ends the walk. Only x86-64 is supported, where the return address is the word below the canonical frame address. On
other machines the walk ends at once.
"""

import platform
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hangwatch.probes.base.mappings import Mapping

MOST_FRAMES = 24
_MOST_FDES = 1 << 20
_MOST_ENTRY_BYTES = 4096
_MOST_SEGMENTS = 64
_HIGHEST = 1 << 56
_EH_FRAME, _LOAD = 0x6474E550, 1
# Version 1; pcrel sdata4, udata4, datarel sdata4: the encodings that linkers write
_TABLE = b"\x01\x1b\x03\x3b"
_RBP, _RSP, _RETURN = 6, 7, 16
_ARCHITECTURE = platform.machine()

Read = Callable[[int, int], bytes]
"""Function that returns up to a number of bytes at an address."""


def walk(address: int, stack: int, mapped: Sequence[Mapping], read: Read) -> Iterator[Mapping | None]:
    """Yield the mapping with the code of each frame, innermost first; None at the end if the rest is unknown."""
    registers = {_RSP: stack}
    for depth in range(MOST_FRAMES):
        code = next((each for each in mapped if b"x" in each.permissions and each.start <= address < each.end), None)
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
    (common_offset,) = struct.unpack_from("<I", body)
    common = _body(entry + 4 - common_offset, read)
    if common_offset == 0 or common[:5] != b"\0\0\0\0\x01":
        raise _UnknownFrameError
    letters, at = common[5 : common.index(0, 5)], common.index(0, 5) + 1
    code_factor, at = _unsigned(common, at)
    data_factor, at = _signed(common, at)
    column, at = _unsigned(common, at)
    size, at = _unsigned(common, at) if letters[:1] == b"z" else (0, at)
    if column != _RETURN or b"S" in letters or _encoding(letters, common[at : at + size]) != 0x1B:
        raise _UnknownFrameError  # a signal frame, or another address encoding
    offset, length = struct.unpack_from("<iI", body, 4)
    first = entry + 8 + offset
    if not first <= address < first + length:
        raise _UnknownFrameError
    data, after = _unsigned(body, 12)
    factors = (code_factor, data_factor)
    start = _run(common[at + size :], factors, address - first, _Rules((-1, 0), {}), None)
    return _run(body[after + data :], factors, address - first, start, start)


def _encoding(letters: bytes, data: bytes) -> int:
    """Return the address encoding of a common entry with the augmentation `zR`, `zPLR` or similar."""
    at = 0
    for letter in letters[1:]:
        match letter:
            case 0x52:  # R
                return data[at]
            case 0x50:  # P: an encoding, and a pointer of 4 or 8 bytes
                at += {0x0B: 5, 0x03: 5}.get(data[at] & 0x0F, 9)
            case 0x4C:  # L
                at += 1
    raise _UnknownFrameError


def _body(address: int, read: Read) -> bytes:
    (length,) = struct.unpack("<I", _bytes(read, address, 4))
    if not 4 <= length <= _MOST_ENTRY_BYTES:
        raise _UnknownFrameError
    return _bytes(read, address + 4, length)


def _run(program: bytes, factors: tuple[int, int], distance: int, rules: _Rules, initial: _Rules | None) -> _Rules:
    """Run call frame instructions up to the instruction at `distance` bytes from the first (DWARF 5, 6.4.2)."""
    code_factor, data_factor = factors
    frame, saved = rules.frame, dict(rules.saved)
    remembered: list[_Rules] = []
    at, position = 0, 0
    while at < len(program) and position <= distance:
        code, at = program[at], at + 1
        high, low = code & 0xC0, code & 0x3F
        if high == 0x40:
            position += low * code_factor
        elif high == 0x80:
            value, at = _unsigned(program, at)
            saved[low] = value * data_factor
        elif high == 0xC0:
            saved = _restored(saved, low, initial)
        elif code in (0x02, 0x03, 0x04):  # advance_loc1, 2, 4
            width = {2: 1, 3: 2, 4: 4}[code]
            position, at = position + int.from_bytes(program[at : at + width], "little") * code_factor, at + width
        elif code == 0x0A:
            remembered.append(_Rules(frame, dict(saved)))
        elif code == 0x0B and remembered:
            frame, saved = remembered.pop()
        elif code in (0x0C, 0x0D, 0x0E):  # def_cfa, def_cfa_register, def_cfa_offset
            register, at = _unsigned(program, at) if code != 0x0E else (frame[0], at)
            offset, at = _unsigned(program, at) if code != 0x0D else (frame[1], at)
            frame = (register, offset)
        elif code == 0x2E:
            _, at = _unsigned(program, at)  # GNU_args_size
        elif code in (0x07, 0x08):  # undefined, same_value
            register, at = _unsigned(program, at)
            saved.pop(register, None)
        elif code:
            raise _UnknownFrameError
    return _Rules(frame, saved)


def _restored(saved: dict[int, int], register: int, initial: _Rules | None) -> dict[int, int]:
    if initial is None:
        raise _UnknownFrameError
    rest = {number: at for number, at in saved.items() if number != register}
    return {**rest, register: initial.saved[register]} if register in initial.saved else rest


def _unsigned(raw: bytes, at: int) -> tuple[int, int]:
    """Return an unsigned LEB128 number (DWARF 5, 7.6) and the position after it."""
    value = shift = 0
    while shift < 64:
        byte, at = raw[at], at + 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
    raise _UnknownFrameError


def _signed(raw: bytes, at: int) -> tuple[int, int]:
    value, end = _unsigned(raw, at)
    bits = 7 * (end - at)
    return (value - (1 << bits) if value >> (bits - 1) else value), end
