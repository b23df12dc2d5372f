"""Read the small files of /proc and /sys. A result is a text, None if the file is absent, or a Fault."""

import errno
import os
from pathlib import Path

from hangwatch.model import Fault

# Errors that mean "absent": no such file, the process is gone, or the feature is switched off.
ABSENT = frozenset({errno.ENOENT, errno.ESRCH, errno.ENOTDIR, errno.EOPNOTSUPP, errno.ENODEV, errno.ENXIO})
DENIED = frozenset({errno.EACCES, errno.EPERM})
LIMIT_BYTES = 4 << 20
PAGE_BYTES = 4096
MAY_READ = "run as root, or grant CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"


def read(path: Path | str, subject: str, limit_bytes: int = LIMIT_BYTES) -> str | Fault | None:
    """Return at most `limit_bytes` of a file as text; None if absent. Faults name `subject`. Never raises OSError."""
    raw = read_bytes(path, subject, limit_bytes)
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw


def read_or_empty(path: Path | str, limit_bytes: int = LIMIT_BYTES) -> str:
    """Return at most `limit_bytes` of a file as text; an empty text if the file cannot be read."""
    text = read(path, "", limit_bytes)
    return text if isinstance(text, str) else ""


def read_bytes(path: Path | str, subject: str, limit_bytes: int = LIMIT_BYTES) -> bytes | Fault | None:
    """Return the bytes of a file, otherwise like `read`."""
    raw = read_start(path, limit_bytes)
    return fault_of(raw, subject, str(path)) if isinstance(raw, OSError) else raw


def read_start(path: Path | str, limit_bytes: int) -> bytes | OSError:
    """Return the first `limit_bytes` of a file, or the error if it is gone or denied."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error.with_traceback(None)  # else it holds the frames of its callers, and they hold it
    try:
        if limit_bytes <= PAGE_BYTES:  # the kernel returns a small file in one read
            return os.read(descriptor, limit_bytes)
        parts = []
        while limit_bytes > 0 and (part := os.read(descriptor, min(limit_bytes, 1 << 16))):
            parts.append(part)
            limit_bytes -= len(part)
        return b"".join(parts)
    except OSError as error:
        return error.with_traceback(None)
    finally:
        os.close(descriptor)


def read_link(path: Path | str) -> str:
    """Return the target of a link; empty if it cannot be read."""
    try:
        return os.readlink(path)  # noqa: PTH115 - also magic links of /proc, which are no paths
    except OSError:
        return ""


def names(folder: Path, subject: str) -> tuple[str, ...] | Fault | None:
    """Return the sorted names in a folder; None if there is no such folder."""
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError as error:
        return fault_of(error, subject, str(folder))


def names_or_empty(folder: Path) -> tuple[str, ...]:
    """Return the sorted names in a folder; empty if it cannot be read."""
    found = names(folder, "")
    return found if isinstance(found, tuple) else ()


def fault_of(error: OSError, subject: str, path: str) -> Fault | None:
    """Convert an error of the kernel: None if it means "absent", else a Fault."""
    if error.errno in ABSENT:
        return None
    detail = f"{path}: {error.strerror or error}"
    if error.errno in DENIED:
        return Fault(subject=subject, reason="PermissionDenied", detail=detail, remedy=MAY_READ)
    return Fault(subject=subject, reason="CannotRead", detail=detail)


def number(text: str | Fault | None) -> int | None:
    """Return the whole number that a text holds; None for any other text or a Fault."""
    if not isinstance(text, str):
        return None
    word = text.strip()
    return int(word) if word.lstrip("-").isdecimal() else None
