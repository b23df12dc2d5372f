"""Read crash artifacts for the parent, which must never wait for them: the job's owner chose their paths.

Started as `python -I -m hangwatch.probes.process.crash_artifacts_child` with one JSON question on stdin. There are two
questions.

`{"files": []}`: open each file below its root. No link is followed, except links that root made in folders to which
only root can write. The file must be a regular file of that user, and is bounded. The answers are lines of JSON.

`{"core": ..., "debugger": ...}`: this process becomes that user, or `nobody` instead of root, with limits. Then it runs
gdb on that core alone.
"""

import ctypes
import errno
import json
import os
import resource
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

from hangwatch.formats import bounded_read
from hangwatch.probes.process.credentials import take_rights

MOST_NOTE_BYTES = 1 << 20
MOST_CORE_BYTES = 64 << 30
MOST_COPIED_BYTES = 256 << 20  # of a core of root, into memory
_NOBODY = 65534
_MOST_TABLE_BYTES = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38  # linux/prctl.h
_PT_LOAD, _PT_NOTE, _NT_PRSTATUS = 1, 4, 1  # elf(5), linux/elf.h
_LIMITS = (
    (resource.RLIMIT_CPU, 60),  # seconds
    (resource.RLIMIT_AS, 4 << 30),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_NOFILE, 512),
)


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
            metadata = {"unix_seconds": status.st_mtime, "bytes": status.st_size}
            if question["kind"] == "core":
                return metadata | _core(file)
            if question["kind"] == "end":
                file.seek(max(0, status.st_size - question["most_bytes"]))
                return metadata | {"content": file.read(question["most_bytes"]).decode("utf-8", "replace")}
            content = bounded_read.read_rest(file, question["path"], question["most_bytes"])
            return metadata | {"content": content.decode("utf-8", "replace")}
    except bounded_read.FileError as error:
        return {"refused": "" if error.errno == errno.ENOENT else str(error)}


def _core(file: BinaryIO) -> dict[str, Any]:
    """Return pid and signal from the first NT_PRSTATUS, which is of the thread that died.

    See elf(5), linux/elfcore.h.
    """
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


def debug(question: dict[str, Any], command: list[str], program: str) -> None:
    """Change to the user that owns the core, then execute the debugger. Raises FileError.

    For a core of root, that user is `nobody`. The root of another mount namespace is opened before that. /proc/PID/root
    is visible only to a process with the same user and groups, see "access mode checking" in ptrace(2). An open
    descriptor stays usable.
    """
    core, root = open_file(question), _root(question["root"])
    if os.fstat(core.fileno()).st_size > MOST_CORE_BYTES:
        raise bounded_read.FileError(question["path"], f"is larger than {MOST_CORE_BYTES >> 30} GiB")
    descriptor = core.fileno() if question["uid"] else _copy_for_nobody(core)
    _become(question["uid"] or _NOBODY)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for kind, wanted_limit in _LIMITS:
        hard = resource.getrlimit(kind)[1]
        limit = wanted_limit if hard == resource.RLIM_INFINITY else min(wanted_limit, hard)
        resource.setrlimit(kind, (limit, limit))
    os.nice(19)
    os.chdir("/")
    os.set_inheritable(descriptor, True)
    arguments = [*command, *(["-iex", f"set sysroot {root}"] if root else []), f"--core=/proc/self/fd/{descriptor}"]
    arguments += [f"{root}{program}"] if program else []
    os.execve(arguments[0], arguments, {"LC_ALL": "C", "PATH": "/usr/bin:/bin"})  # noqa: S606 - no shell


def _copy_for_nobody(core: BinaryIO) -> int:
    """Return a descriptor of a copy in memory, since `nobody` may not open the core itself.

    The smallest segments are copied first, because these contain the stacks. Segments beyond the limit are zeros in the
    copy.
    """
    size = os.fstat(core.fileno()).st_size
    descriptor = os.memfd_create("core")
    os.ftruncate(descriptor, size)
    loads = [(length, offset) for kind, offset, length in _segments(core) if kind in (_PT_LOAD, _PT_NOTE)]
    left_bytes = MOST_COPIED_BYTES
    for length, offset in [(_MOST_TABLE_BYTES, 0), *sorted(loads)]:
        end = min(offset + length, size)
        if offset >= end or end - offset > left_bytes:
            continue
        left_bytes -= end - offset
        position = os.lseek(descriptor, offset, os.SEEK_SET)
        while position < end and (sent := os.sendfile(descriptor, core.fileno(), position, end - position)):
            position += sent
    return descriptor


def _root(path: str) -> str:
    """Open another root for the debugger, and return the path of its descriptor; empty for this process's root.

    Raises FileError.
    """
    if path == "/":
        return ""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise bounded_read.FileError(path, f"cannot be opened: {error.strerror}") from None
    os.set_inheritable(descriptor, True)
    return f"/proc/self/fd/{descriptor}"


def _become(uid: int) -> None:
    """Become this user, and drop all other rights. Raises FileError if that fails."""
    if os.geteuid() == uid:
        return
    try:
        take_rights(uid, _NOBODY, ())
    except OSError as error:
        why = f"belongs to user {uid}; hangwatch cannot switch to that user: {error.strerror}"
        raise bounded_read.FileError("core", why) from None


def main() -> None:
    """Answer the question on standard input."""
    request = json.load(sys.stdin)
    if "core" in request:
        try:
            debug(request["core"], request["debugger"], request["program"])
        except bounded_read.FileError as error:
            sys.exit(f"hangwatch: {error}")
    for question in request["files"]:
        sys.stdout.write(json.dumps(answer(question)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
