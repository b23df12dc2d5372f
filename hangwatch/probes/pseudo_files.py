"""Reading the small files of /proc and /sys: a text, None where there is none, or a Fault."""

from __future__ import annotations

import errno
from pathlib import Path

from hangwatch.model import Fault

# "Not there" in the ways in which the kernel says it: no file, the process is gone, the feature is switched off.
ABSENT = frozenset({errno.ENOENT, errno.ESRCH, errno.ENOTDIR, errno.EOPNOTSUPP, errno.ENODEV, errno.ENXIO})
DENIED = frozenset({errno.EACCES, errno.EPERM})
LIMIT_BYTES = 4 << 20
MAY_READ = "run as root, or grant CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"


def read(path: Path | str, subject: str, limit_bytes: int = LIMIT_BYTES) -> str | Fault | None:
    """The text of a file, at most `limit_bytes` of it; `subject` is what a fault names. Never raises OSError."""
    raw = read_bytes(path, subject, limit_bytes)
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw


def read_bytes(path: Path | str, subject: str, limit_bytes: int = LIMIT_BYTES) -> bytes | Fault | None:
    """As `read`, undecoded."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - read often: strings, too
            parts = []
            while limit_bytes > 0 and (part := file.read(min(limit_bytes, 1 << 16))):
                parts.append(part)
                limit_bytes -= len(part)
            return b"".join(parts)
    except OSError as error:
        return fault_of(error, subject, str(path))


def names(folder: Path, subject: str) -> tuple[str, ...] | Fault | None:
    """The sorted names in a folder; None where there is no such folder."""
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError as error:
        return fault_of(error, subject, str(folder))


def fault_of(error: OSError, subject: str, path: str) -> Fault | None:
    """What an error of the kernel means: absent (None), or a Fault in words."""
    if error.errno in ABSENT:
        return None
    detail = f"{path}: {error.strerror or error}"
    if error.errno in DENIED:
        return Fault(subject=subject, reason="PermissionDenied", detail=detail, remedy=MAY_READ)
    return Fault(subject=subject, reason="CannotRead", detail=detail)


def number(text: str | Fault | None) -> int | None:
    """The whole number that a file holds, None where it holds none."""
    if not isinstance(text, str):
        return None
    word = text.strip()
    return int(word) if word.lstrip("-").isdecimal() else None
