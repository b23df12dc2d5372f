"""The environment that a process was started with, as far as it is wanted. See proc_pid_environ(5).

It is full of secrets, and its owner may fill it with what he likes: so only wanted variables are kept, of a bounded
size, and of a very large environment only both ends are read. Launchers put their variables at the end, shells
what they were given at the beginning.
"""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from hangwatch import words
from hangwatch.tables import environment_names

READ_BYTES = 256 << 10
VALUE_CHARACTERS = 1024  # the UUIDs of 16 GPUs are 656
KEPT_CHARACTERS = 4096


class Environment(NamedTuple):
    """Wanted variables. `complete` is false where some of the environment was not read, or not kept."""

    variables: dict[str, str]
    is_empty: bool
    complete: bool


def read(descriptor: int, folder: str, wanted: Container[str], shown: Container[str] = ()) -> Environment:
    """The variables in `wanted` and `shown` of an open `environ` in this folder of /proc; those in `wanted` first.

    At most 256 KiB are read and about 4 KiB kept, of each value 1,024 characters. Raises OSError: gone, or denied.
    """
    head = _read_at(descriptor, 0, READ_BYTES)
    if len(head) < READ_BYTES:
        return _kept([head], wanted, shown, whole=True)
    end = max(os.fstat(descriptor).st_size, _length(folder))  # a file of /proc has no size
    half = READ_BYTES // 2
    return _kept([head[:half], _read_at(descriptor, max(end - half, half), half)], wanted, shown, whole=False)


def allowed(pid: int, proc_root: Path) -> dict[str, str]:
    """The variables of a process that the table allows to keep; none where they may not be read, or it is gone.

    The lock of its memory may never be free: see `locked_memory`.
    """
    try:
        descriptor = os.open(f"{proc_root}/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        return read(descriptor, f"{proc_root}/{pid}", environment_names.ALLOWED).variables
    except OSError:
        return {}
    finally:
        os.close(descriptor)


def _read_at(descriptor: int, offset: int, limit_bytes: int) -> bytes:
    parts = []
    while limit_bytes > 0 and (part := os.pread(descriptor, min(limit_bytes, 1 << 16), offset)):
        parts.append(part)
        offset += len(part)
        limit_bytes -= len(part)
    return b"".join(parts)


def _length(folder: str) -> int:
    """By env_start and env_end, fields 50 and 51 of proc_pid_stat(5): 0 where they are not to be seen."""
    fields = Path(folder, "stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[48]) - int(fields[47]) if len(fields) > 48 else 0


def _kept(parts: list[bytes], wanted: Container[str], shown: Container[str], *, whole: bool) -> Environment:
    found = {}
    for place, part in enumerate(parts):
        entries = part.split(b"\0")
        if not whole:  # cut within an entry
            del entries[-1 if place == 0 else 0]
        for entry in entries:
            name, _, value = entry.partition(b"=")
            word = name.decode("utf-8", "replace")
            if word in wanted or word in shown:
                found[word] = words.printable(value[:VALUE_CHARACTERS].decode("utf-8", "replace"))[:VALUE_CHARACTERS]
    kept, left = {}, KEPT_CHARACTERS
    for word in sorted(found, key=lambda word: word not in wanted):
        if len(found[word]) <= left:
            kept[word] = found[word]
            left -= len(word) + len(found[word])
    return Environment(kept, is_empty=not any(parts), complete=whole and len(kept) == len(found))
