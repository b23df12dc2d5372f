"""The return addresses of a sleeping thread, frame by frame, by the tables that its libraries were built with.

The tables are .eh_frame_hdr and .eh_frame (Linux Standard Base, Core 5.0, chapter 10; DWARF 5, 6.4), read where the
process has them mapped; nothing is paused. They are the job's memory and may say what it likes: all reads are bounded,
and whatever the tables do not tell in the plain ways of a compiler ends the walk. x86-64 only, where the return address
is the word below the canonical frame address; elsewhere the walk ends at once.
"""

from __future__ import annotations

import platform
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

MOST_FRAMES = 24
_MOST_FDES = 1 << 20
_MOST_ENTRY_BYTES = 4096
_MOST_SEGMENTS = 64
_HIGHEST = 1 << 56
_EH_FRAME, _LOAD = 0x6474E550, 1
_TABLE = b"\x01\x1b\x03\x3b"  # version 1; pcrel sdata4, udata4, datarel sdata4: what linkers write
_RBP, _RSP, _RETURN = 6, 7, 16
_ARCHITECTURE = platform.machine()

Read = Callable[[int, int], bytes]
"""So many bytes at an address, or fewer."""


class Mapping(NamedTuple):
    """A mapping of a file, see proc_pid_maps(5)."""

    start: int
    end: int
    offset: int
    is_code: bool
    path: bytes


def mappings(maps: bytes) -> tuple[Mapping, ...]:
    """Those of files, as the text has them; lines that are none are left out."""
    found = []
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and re.fullmatch(rb"[0-9a-f]{1,16}-[0-9a-f]{1,16}", fields[0]):
            start, _, end = fields[0].partition(b"-")
            found.append(Mapping(int(start, 16), int(end, 16), int(fields[2], 16), b"x" in fields[1], fields[5]))
    return tuple(found)


def walk(place: int, stack: int, mapped: Sequence[Mapping], read: Read) -> Iterator[Mapping | None]:
    """In whose code each frame stands, innermost first; None: it ends untold."""
    known = {_RSP: stack}
    for depth in range(MOST_FRAMES):
        here = next((one for one in mapped if one.is_code and one.start <= place < one.end), None)
        yield here
        if here is None:
            return
        caller = _caller(place - (depth > 0), here, known, mapped, read) if _ARCHITECTURE == "x86_64" else None
        if caller is None or caller[1][_RSP] <= known[_RSP]:
            break
        place, known = caller
    yield None


def _caller(
    place: int, here: Mapping, known: dict[int, int], mapped: Sequence[Mapping], read: Read
) -> tuple[int, dict[int, int]] | None:
    """The return address of a frame and what its caller has in those registers that are known; None: not told."""
    try:
        base = next(one.start for one in mapped if one.path == here.path and one.offset == 0)
        rules = _rules(place, _entry(place, base, read), read)
        register, offset = rules.frame
        frame = known[register] + offset
        saved = {number: _word(read, frame + at) for number, at in rules.saved.items() if number in (_RBP, _RETURN)}
    except (_UntoldError, StopIteration, KeyError, ValueError, struct.error, IndexError):  # or it is cut off
        return None
    if rules.saved.get(_RETURN) != -8:
        return None
    before = {_RBP: known[_RBP]} if _RBP in known else {}
    return saved.pop(_RETURN), {**before, **saved, _RSP: frame}


class _UntoldError(Exception):
    """The tables do not say it, or not in a way that is known here."""


class _Rules(NamedTuple):
    """The canonical frame address as (register, offset), and where registers are saved, relative to it."""

    frame: tuple[int, int]
    saved: dict[int, int]


def _word(read: Read, address: int) -> int:
    return int(struct.unpack("<Q", _bytes(read, address, 8))[0])


def _bytes(read: Read, address: int, count: int) -> bytes:
    raw = read(address, count) if 0 < address < _HIGHEST else b""
    if len(raw) != count:
        raise _UntoldError
    return raw


def _entry(place: int, base: int, read: Read) -> int:
    """The address of the entry of .eh_frame whose range may hold an instruction, by the sorted table of the header."""
    head = _bytes(read, base, 64)
    if head[:6] != b"\x7fELF\x02\x01":
        raise _UntoldError
    at, size, count = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
    if size != 56 or not 0 < count <= _MOST_SEGMENTS:
        raise _UntoldError
    segments = [struct.unpack("<IIQQQQQQ", row) for row in _cut(_bytes(read, base + at, size * count), size)]
    first = next(one[3] for one in segments if one[0] == _LOAD)
    header = next(one[3] for one in segments if one[0] == _EH_FRAME) + base - (first & -4096)
    start = _bytes(read, header, 12)
    if start[:4] != _TABLE:
        raise _UntoldError
    low, high = 0, struct.unpack_from("<I", start, 8)[0]
    if not 0 < high <= _MOST_FDES:
        raise _UntoldError
    while high - low > 1:  # the last whose first instruction is not behind the place
        middle = (low + high) // 2
        is_before = header + struct.unpack("<i", _bytes(read, header + 12 + 8 * middle, 4))[0] <= place
        low, high = (middle, high) if is_before else (low, middle)
    return int(header + struct.unpack("<i", _bytes(read, header + 16 + 8 * low, 4))[0])


def _cut(raw: bytes, size: int) -> Iterator[bytes]:
    return (raw[at : at + size] for at in range(0, len(raw), size))


def _rules(place: int, entry: int, read: Read) -> _Rules:
    """What an entry of .eh_frame and its common part say of an instruction."""
    body = _body(entry, read)
    (back,) = struct.unpack_from("<I", body)
    common = _body(entry + 4 - back, read)
    if back == 0 or common[:5] != b"\0\0\0\0\x01":
        raise _UntoldError
    letters, at = common[5 : common.index(0, 5)], common.index(0, 5) + 1
    code_factor, at = _unsigned(common, at)
    data_factor, at = _signed(common, at)
    column, at = _unsigned(common, at)
    size, at = _unsigned(common, at) if letters[:1] == b"z" else (0, at)
    if column != _RETURN or b"S" in letters or _encoding(letters, common[at : at + size]) != 0x1B:
        raise _UntoldError  # a signal's frame; addresses in another form
    offset, length = struct.unpack_from("<iI", body, 4)
    first = entry + 8 + offset
    if not first <= place < first + length:
        raise _UntoldError
    data, after = _unsigned(body, 12)
    factors = (code_factor, data_factor)
    start = _run(common[at + size :], factors, place - first, _Rules((-1, 0), {}), None)
    return _run(body[after + data :], factors, place - first, start, start)


def _encoding(letters: bytes, data: bytes) -> int:
    """How addresses of the entry stand, of an augmentation `zR`, `zPLR` and alike."""
    at = 0
    for letter in letters[1:]:
        match letter:
            case 0x52:  # R
                return data[at]
            case 0x50:  # P: an encoding, and a pointer of 4 or 8 bytes
                at += {0x0B: 5, 0x03: 5}.get(data[at] & 0x0F, 9)
            case 0x4C:  # L
                at += 1
    raise _UntoldError


def _body(address: int, read: Read) -> bytes:
    (length,) = struct.unpack("<I", _bytes(read, address, 4))
    if not 4 <= length <= _MOST_ENTRY_BYTES:
        raise _UntoldError
    return _bytes(read, address + 4, length)


def _run(program: bytes, factors: tuple[int, int], distance: int, rules: _Rules, initial: _Rules | None) -> _Rules:
    """Call frame instructions up to an instruction so many bytes behind the first (DWARF 5, 6.4.2)."""
    code_factor, data_factor = factors
    frame, saved = rules.frame, dict(rules.saved)
    kept: list[_Rules] = []
    at, reached = 0, 0
    while at < len(program) and reached <= distance:
        code, at = program[at], at + 1
        high, low = code & 0xC0, code & 0x3F
        if high == 0x40:
            reached += low * code_factor
        elif high == 0x80:
            value, at = _unsigned(program, at)
            saved[low] = value * data_factor
        elif high == 0xC0:
            saved = _restored(saved, low, initial)
        elif code in (0x02, 0x03, 0x04):  # advance_loc1, 2, 4
            width = {2: 1, 3: 2, 4: 4}[code]
            reached, at = reached + int.from_bytes(program[at : at + width], "little") * code_factor, at + width
        elif code == 0x0A:
            kept.append(_Rules(frame, dict(saved)))
        elif code == 0x0B and kept:
            frame, saved = kept.pop()
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
            raise _UntoldError
    return _Rules(frame, saved)


def _restored(saved: dict[int, int], register: int, initial: _Rules | None) -> dict[int, int]:
    if initial is None:
        raise _UntoldError
    rest = {number: at for number, at in saved.items() if number != register}
    return {**rest, register: initial.saved[register]} if register in initial.saved else rest


def _unsigned(raw: bytes, at: int) -> tuple[int, int]:
    """An unsigned LEB128 (DWARF 5, 7.6), and where it ends."""
    value = shift = 0
    while shift < 64:
        byte, at = raw[at], at + 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
    raise _UntoldError


def _signed(raw: bytes, at: int) -> tuple[int, int]:
    value, end = _unsigned(raw, at)
    bits = 7 * (end - at)
    return (value - (1 << bits) if value >> (bits - 1) else value), end
