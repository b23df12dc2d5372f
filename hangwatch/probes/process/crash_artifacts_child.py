"""Read crash artifacts for the parent, which must never wait for them: the job's owner chose their paths.

Started as `python -I -m hangwatch.probes.process.crash_artifacts_child` with a JSON list of files on stdin. It opens
each file below its root. No link is followed, except links that root made in folders to which only root can write. The
file must be a regular file of that user, and is bounded. The answers are lines of JSON.
"""

import errno
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

from hangwatch.formats import bounded_read

MOST_NOTE_BYTES = 1 << 20
_MOST_TABLE_BYTES = 1 << 16
_PT_NOTE, _NT_PRSTATUS = 4, 1  # elf(5), linux/elf.h


def open_file(question: dict[str, Any]) -> BinaryIO:
    """Open a regular file of this user below this root. Only root's links are followed. Raises FileError."""
    root, path = Path(question["root"]), Path(question["path"])
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
        raise bounded_read.FileError(path, "is not an absolute path")
    file = bounded_read.open_below(root, root.joinpath(*path.parts[1:]), roots_links=True)
    owner = os.fstat(file.fileno()).st_uid
    if owner != question["uid"]:
        file.close()
        raise bounded_read.FileError(path, f"belongs to user {owner}, not to the user of the job")
    return file


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file, or the pid and signal of a core.

    `refused` is the reason why it was not read. An empty reason means that the file does not exist.
    """
    try:
        with open_file(question) as file:
            status = os.fstat(file.fileno())
            if question["kind"] == "core":
                return {"unix_seconds": status.st_mtime, **_core(file)}
            if question["kind"] == "end":
                file.seek(max(0, status.st_size - question["most_bytes"]))
                content = file.read(question["most_bytes"])
            else:
                content = bounded_read.read_rest(file, question["path"], question["most_bytes"])
            return {"content": content.decode("utf-8", "replace")}
    except bounded_read.FileError as error:
        return {"refused": "" if error.errno == errno.ENOENT else str(error)}


def _core(file: BinaryIO) -> dict[str, Any]:
    """Return pid and signal from the first NT_PRSTATUS (linux/elfcore.h), which is of the thread that died."""
    segments = _segments(file)
    if not segments:
        return {"refused": "is not a 64-bit ELF core"}
    for kind, offset, length in segments:
        if kind == _PT_NOTE:
            file.seek(min(offset, 1 << 62))
            return _prstatus(file.read(min(length, MOST_NOTE_BYTES)))
    return {"refused": "is a core without notes"}


def _segments(file: BinaryIO) -> list[tuple[int, int, int]]:
    """Return kind, offset and length of each segment of a 64-bit ELF core; empty for another file."""
    head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", head, 16)[0] != 4:
        return []
    at, size, count = *struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54)
    file.seek(at)
    table = file.read(min(size * count, _MOST_TABLE_BYTES))
    return [
        (*struct.unpack_from("<I", table, first), *struct.unpack_from("<8xQ16xQ", table, first))
        for first in range(0, len(table) - 55, max(size, 56))
    ]


def _prstatus(notes: bytes) -> dict[str, Any]:
    at = 0
    while at + 12 <= len(notes):
        name, length, kind = struct.unpack_from("<III", notes, at)
        at += 12 + (name + 3) // 4 * 4
        if kind == _NT_PRSTATUS and length >= 36 and at + 36 <= len(notes):
            return {
                "signal": struct.unpack_from("<h", notes, at + 12)[0],
                "pid": struct.unpack_from("<i", notes, at + 32)[0],
            }
        at += (length + 3) // 4 * 4
    return {"refused": "is a core without a process"}


def main() -> None:
    """Answer the questions on standard input."""
    for question in json.load(sys.stdin):
        sys.stdout.write(json.dumps(answer(question)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
