"""Read chosen variables of a process's initial environment. See proc_pid_environ(5).

An environment holds secrets, and its owner controls its size. So only wanted variables are kept, up to a limit. Of a
very large environment only both ends are read. Launchers add their variables at the end; shells pass theirs at the
beginning.
"""

import os
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from hangwatch import words
from hangwatch.probes.base import procfs
from hangwatch.tables import environment_names

READ_BYTES = 256 << 10
VALUE_CHARACTERS = 1024  # the UUIDs of 16 GPUs have 656 characters
KEPT_CHARACTERS = 4096


class Environment(NamedTuple):
    """The wanted variables of a process.

    `is_empty` is true if the environment itself is empty. `complete` is false if part of it was not read or not kept.
    """

    variables: dict[str, str]
    is_empty: bool
    complete: bool


def read(folder: str, wanted: Container[str], shown: Container[str] = ()) -> Environment:
    """Return the variables in `wanted` and `shown` of the process with this folder in /proc.

    At most 256 KiB are read, and 1,024 characters per value are kept. Above 4 KiB in all, variables are dropped, those
    in `shown` first. Raises OSError: the process is gone, or reading is denied.
    """
    descriptor = os.open(f"{folder}/environ", os.O_RDONLY | os.O_CLOEXEC)
    try:
        head = _read_at(descriptor, 0, READ_BYTES)
        if len(head) < READ_BYTES:
            return select([head], wanted, shown, whole=True)
        stat = procfs.read_stat(folder)
        end = os.fstat(descriptor).st_size or (0 if stat is None else stat.environ_bytes)  # a file of /proc has no size
        half = READ_BYTES // 2
        return select([head[:half], _read_at(descriptor, max(end - half, half), half)], wanted, shown, whole=False)
    finally:
        os.close(descriptor)


def read_allowed(pid: int, proc_root: Path, wanted: Container[str] = environment_names.ALLOWED) -> dict[str, str]:
    """Return the variables of a process that the table allows to keep; empty if not permitted or it is gone.

    The call may block for ever: see `locked_memory`.
    """
    try:
        return read(f"{proc_root}/{pid}", wanted).variables
    except OSError:
        return {}


def _read_at(descriptor: int, offset: int, limit_bytes: int) -> bytes:
    parts = []
    while limit_bytes > 0 and (part := os.pread(descriptor, min(limit_bytes, 1 << 16), offset)):
        parts.append(part)
        offset += len(part)
        limit_bytes -= len(part)
    return b"".join(parts)


def select(parts: list[bytes], wanted: Container[str], shown: Container[str], *, whole: bool) -> Environment:
    """Return the variables in `wanted` and `shown` of an environment: entries `NAME=VALUE`, each with a final NUL.

    `parts` are its text; if `whole` is false, only its beginning and its end.
    """
    values = {}
    for index, part in enumerate(parts):
        entries = part.split(b"\0")
        if not whole:  # the part ends or begins inside an entry
            del entries[-1 if index == 0 else 0]
        for entry in entries:
            name_bytes, _, value = entry.partition(b"=")
            name = name_bytes.decode("utf-8", "replace")
            if name in wanted or name in shown:
                values[name] = words.printable(value[:VALUE_CHARACTERS].decode("utf-8", "replace"))[:VALUE_CHARACTERS]
    kept, remaining = {}, KEPT_CHARACTERS
    for name in sorted(values, key=lambda name: name not in wanted):
        if len(values[name]) <= remaining:
            kept[name] = values[name]
            remaining -= len(name) + len(values[name])
    return Environment(kept, is_empty=not any(parts), complete=whole and len(kept) == len(values))
