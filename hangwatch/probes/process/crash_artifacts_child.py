"""Reads what a dead rank left, for a parent that must never wait for it: files whose paths the job's owner chose.

Started as `python -I -m hangwatch.probes.process.crash_artifacts_child`.
It reads one JSON question from its standard input. `{"files": []}`:
each is opened below its root, through no link but such as root made where only root writes, is a regular file of that
user, and is bounded; the answers are lines of JSON. `{"core": ..., "debugger": ...}`: this becomes that user, within
limits, and then gdb on that core alone.
"""

from __future__ import annotations

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

MOST_NOTE_BYTES = 1 << 20
MOST_CORE_BYTES = 64 << 30
_NOBODY = 65534
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38  # linux/prctl.h
_PT_NOTE, _NT_PRSTATUS = 4, 1  # elf(5), linux/elf.h
_LIMITS = (
    (resource.RLIMIT_CPU, 60),  # seconds
    (resource.RLIMIT_AS, 4 << 30),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_NOFILE, 512),
)


def opened(question: dict[str, Any]) -> BinaryIO:
    """A regular file of this user below this root; of links on its way only root's are followed. Raises FileError."""
    root, path = Path(question["root"]), Path(question["path"])
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
        raise bounded_read.FileError(path, "is no whole path")
    file = bounded_read.opened_below(root, root.joinpath(*path.parts[1:]), roots_links=True)
    owner = os.fstat(file.fileno()).st_uid
    if owner != question["uid"]:
        file.close()
        raise bounded_read.FileError(path, f"belongs to user {owner}, not to the job's")
    return file


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The content of a file, or of a core who died of what; `refused` says why not, empty where there is none."""
    try:
        with opened(question) as file:
            found = os.fstat(file.fileno())
            told = {"unix_seconds": found.st_mtime, "bytes": found.st_size}
            if question["kind"] == "core":
                return told | _core(file)
            if question["kind"] == "end":
                file.seek(max(0, found.st_size - question["most_bytes"]))
                return told | {"content": file.read(question["most_bytes"]).decode("utf-8", "replace")}
            content = bounded_read.content_of(file, question["path"], question["most_bytes"])
            return told | {"content": content.decode("utf-8", "replace")}
    except bounded_read.FileError as error:
        return {"refused": "" if error.errno == errno.ENOENT else str(error)}


def _core(file: BinaryIO) -> dict[str, Any]:
    """Pid and signal by its first NT_PRSTATUS, that of the thread that died; see elf(5), linux/elfcore.h, 64 bits."""
    head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", head, 16)[0] != 4:
        return {"refused": "is no ELF core of 64 bits"}
    at, size, count = *struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54)
    file.seek(at)
    table = file.read(min(size * count, 1 << 16))
    for first in range(0, len(table) - 55, max(size, 56)):
        kind, _, offset = struct.unpack_from("<IIQ", table, first)
        length = struct.unpack_from("<Q", table, first + 32)[0]
        if kind == _PT_NOTE:
            file.seek(min(offset, 1 << 62))
            return _prstatus(file.read(min(length, MOST_NOTE_BYTES)))
    return {"refused": "is a core without notes"}


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
    return {"refused": "is a core that names no process"}


def debug(question: dict[str, Any], command: list[str], program: str) -> None:
    """Become the owner of the core, who is not root, and then the debugger. Raises FileError.

    The root of another mount namespace is opened before: the kernel shows /proc/PID/root to who has the user and all
    groups of that process, see ptrace(2), "access mode checking"; a descriptor of one's own it shows to anybody.
    """
    core, root = opened(question), _root(question["root"])
    if os.fstat(core.fileno()).st_size > MOST_CORE_BYTES:
        raise bounded_read.FileError(question["path"], f"is larger than {MOST_CORE_BYTES >> 30} GiB")
    _become(question["uid"])
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for kind, wanted in _LIMITS:
        hard = resource.getrlimit(kind)[1]
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (most, most))
    os.nice(19)
    os.chdir("/")
    os.set_inheritable(core.fileno(), True)
    words = [*command, *(["-iex", f"set sysroot {root}"] if root else []), f"--core=/proc/self/fd/{core.fileno()}"]
    words += [f"{root}{program}"] if program else []
    os.execve(words[0], words, {"LC_ALL": "C", "PATH": "/usr/bin:/bin"})  # noqa: S606 - no shell


def _root(path: str) -> str:
    """Another root as a descriptor that the debugger inherits; empty for our own. Raises FileError."""
    if path == "/":
        return ""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise bounded_read.FileError(path, f"cannot be opened: {error.strerror}") from None
    os.set_inheritable(descriptor, True)
    return f"/proc/self/fd/{descriptor}"


def _become(uid: int) -> None:
    """Give up all rights but this user's. Raises FileError where that cannot be."""
    if uid == 0:
        raise bounded_read.FileError("core", "is root's: a debugger is run as an unprivileged user only")
    if os.geteuid() == uid:
        return
    try:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        why = f"is user {uid}'s, whom hangwatch may not become to read it: {error.strerror}"
        raise bounded_read.FileError("core", why) from None


def main() -> None:
    """Answer the question on standard input."""
    asked = json.load(sys.stdin)
    if "core" in asked:
        try:
            debug(asked["core"], asked["debugger"], asked["program"])
        except bounded_read.FileError as error:
            sys.exit(f"hangwatch: {error}")
    for question in asked["files"]:
        sys.stdout.write(json.dumps(answer(question)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
