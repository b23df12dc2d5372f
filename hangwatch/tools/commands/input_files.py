"""The files that a command reads: opened, unpacked, recognised by their first bytes, and read line by line."""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from hangwatch.cli.progress_line import Step
from hangwatch.cli.usage_errors import InputError
from hangwatch.formats import bounded_read, incident_file
from hangwatch.tools.explain.flight_dumps import recorder_dump

_LONGEST_LINE_BYTES = 16 << 20  # `py-spy dump --json` may print one line
_MOST_BYTES = 4 << 30  # of one file or of standard input
_SNIFFED_BYTES = 8 << 10
_UNPACKERS: dict[bytes, Callable[[BinaryIO], Any]] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ": lzma.open, b"BZh": bz2.open}
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)  # or cut, or a file that cannot be read
_ZSTD, _ZIP = b"\x28\xb5\x2f\xfd", b"PK\x03\x04"  # a zip is also the beginning of a checkpoint of torch
_TAR, _TAR_AT = b"ustar", 257  # tar(5)
_HTML, _OF_REPORT = b"<!doctype html>", b'<meta name="generator" content="hangwatch">'
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Kind = Literal["recorder", "dumped", "text", "empty", "compressed", "report", "other", "closed"]
# A path, and the folder argument that contains it; None: the path is an argument
FileBelow = tuple[Path, Path | None]


def kind_of(path: Path, folder: Path | None) -> Kind:
    """Return the kind of a file by its first bytes. In a folder, a file with a NUL byte is not text, as in grep(1).

    A file given as an argument, a pipe and standard input are text unless their first bytes show another kind.
    """
    is_stdin = path == Path("-")
    if folder is None and not is_stdin and not path.is_file():
        return "text"
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if is_stdin else opened(path, folder) as file:
            head = _peek(file)
    except (InputError, OSError) as error:  # a file of /proc can be opened and not be read
        if folder is None:
            raise error if isinstance(error, InputError) else InputError(f"{path}: {error.strerror or error}") from None
        return "closed"
    if recorder_dump.begins_so(head):
        return "recorder"
    if incident_file.is_answer(head):
        return "dumped"
    if head.startswith(_HTML) and _OF_REPORT in head:
        return "report"
    is_archive = head.startswith(_ZIP) and (folder is None or path.suffix == ".zip")
    if is_archive or head.startswith(_ZSTD) or head.startswith(_TAR, _TAR_AT):
        return "compressed"
    if not head and not is_stdin:
        return "empty"
    return "text" if folder is None or b"\0" not in head or head.startswith(_UTF_16) else "other"


def read_lines(path: Path, folder: Path | None, now: Step, doing: str, notes: list[str]) -> Iterator[str]:
    """Yield the lines of a file. Invalid bytes become replacement characters. Raises InputError.

    The encoding is UTF-8, or UTF-16 with a byte order mark, as PowerShell's `>` writes it. A very long line, such
    as that of a progress bar, is split at a carriage return. A note tells where a damaged or cut archive ends.
    """
    name = "standard input" if path == Path("-") else str(path)
    now.say(f"{doing}{name}")
    remaining_bytes, number = _MOST_BYTES, 0
    with opened(path, folder) as stream:
        if _is_endless(stream.fileno()):
            raise InputError(f"{name}: is a device, not a stack dump")
        rest = b""
        read_line = _line_reader(stream)
        while line := _read_packed(read_line, name, number, notes):
            number += 1
            remaining_bytes -= len(line)
            now.bytes_read += len(line)
            line, rest = rest + line, b""
            if not line.endswith(b"\n"):
                line, _, rest = line.rpartition(b"\r") if len(line) > _LONGEST_LINE_BYTES else (line, b"", b"")
            if len(rest or line) > _LONGEST_LINE_BYTES:
                raise InputError(
                    f"{name}:{number}: this line is longer than {_LONGEST_LINE_BYTES >> 20} MiB: not a stack dump"
                )
            if remaining_bytes < 0:
                raise InputError(f"{name}:{number}: has more than {_MOST_BYTES >> 30} GiB; give only the relevant part")
            yield line.decode("utf-8", errors="replace")
        if rest:
            yield rest.decode("utf-8", errors="replace")


def _read_packed(read_line: Callable[[int], bytes], name: str, number: int, notes: list[str]) -> bytes:
    """Return the next line; b"" at the end. A note tells that the end of a packed file is cut or damaged."""
    try:
        return read_line(_LONGEST_LINE_BYTES + 1)
    except DAMAGED as error:
        notes.append(f"{name}:{number}: the rest cannot be read: {error}")
        return b""


def _line_reader(stream: BinaryIO) -> Callable[[int], bytes]:
    """Return a function that reads the next line as UTF-8. Its argument is the maximum number of bytes.

    A byte order mark at the start of the stream is skipped.
    """
    head = _peek(stream)
    if head.startswith(_UTF_16):
        wide = io.TextIOWrapper(stream, encoding="utf-16", errors="replace", newline="\n")
        return lambda most: wide.readline(most).encode("utf-8", "replace")
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    return stream.readline


def _peek(stream: BinaryIO) -> bytes:
    """Return the first bytes of a stream without consuming them; b"" if this is not possible."""
    with contextlib.suppress(EOFError, zlib.error, lzma.LZMAError):
        return bytes(stream.peek(_SNIFFED_BYTES)) if hasattr(stream, "peek") else b""
    return b""


@contextlib.contextmanager
def opened(path: Path, folder: Path | None) -> Iterator[BinaryIO]:
    """Open a file, standard input (`-`), or a pipe that the shell made for `<(command)`.

    What gzip, xz or bzip2 packed is unpacked. Raises InputError.
    """
    try:
        if path == Path("-"):
            file: BinaryIO = sys.stdin.buffer
        elif folder is not None:
            file = bounded_read.open_below(folder, path)
        else:
            flags = 0 if bounded_read.is_inherited_stream(path) else os.O_NONBLOCK
            file = bounded_read.open_file(path, flags=flags)
    except bounded_read.FileError as error:
        raise InputError(f"{error}\n  for a pipe or a device use standard input: `-`") from None
    with file:
        head = _peek(file)
        unpack = next((unpack for magic, unpack in _UNPACKERS.items() if head.startswith(magic)), None)
        yield file if unpack is None else unpack(file)


def _is_endless(descriptor: int) -> bool:
    """True for a device without an end, such as /dev/zero. Terminals and /dev/null have an end."""
    status = os.fstat(descriptor)
    is_device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
    return is_device and not os.isatty(descriptor) and not os.path.samestat(status, Path(os.devnull).stat())
