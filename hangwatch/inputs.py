"""Reads files that people name, or that others may have put there, without believing in their size or kind."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class FileError(Exception):
    """A file that cannot be read; the message is its path, and why."""

    def __init__(self, path: Path | str, why: str, number: int = 0) -> None:
        super().__init__(f"{os.fspath(path)!r}: {why}" if "\0" in os.fspath(path) else f"{path}: {why}")
        self.errno = number
        """The system's error number, 0 where the system did not complain."""


def read(path: Path | str, most_bytes: int, *, flags: int = 0) -> bytes:
    """The content of a file of at most so many bytes; no more is read of a device or a pipe that never ends.

    `flags` are those of `opened`. Raises FileError.
    """
    with opened(path, flags=flags) as file:
        return content_of(file, path, most_bytes)


def content_of(file: BinaryIO, path: Path | str, most_bytes: int) -> bytes:
    """What is left of an open file, at most so many bytes. Raises FileError."""
    try:
        content = file.read(most_bytes + 1)
    except OSError as error:
        raise _refused(path, error) from None
    if len(content) > most_bytes:
        raise FileError(path, f"is larger than {_size(most_bytes)}: it is not read", errno.EFBIG)
    return content


def opened(path: Path | str, *, flags: int = 0) -> BinaryIO:
    """A file to read. `flags` are added to those of open(2); with O_NONBLOCK nothing else than a file is opened.

    Raises FileError.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags), "rb")
    except OSError as error:
        raise _refused(path, error) from None
    except ValueError as error:  # a NUL in the path, a character that no path can hold
        raise FileError(path, f"is no path: {error}", errno.EINVAL) from None
    if flags & os.O_NONBLOCK and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileError(path, "is no file", errno.EINVAL)
    return file


def opened_below(folder: Path, path: Path) -> BinaryIO:
    """A file somewhere in a folder where others may write, to read: no link between the two is followed (O_NOFOLLOW).

    Raises FileError.
    """
    *folders, name = path.relative_to(folder).parts
    try:
        here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for step in folders:
                inner = os.open(step, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                os.close(here)
                here = inner
            file = os.fdopen(
                os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here), "rb"
            )
        finally:
            os.close(here)
    except OSError as error:
        raise _refused(path, error) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileError(path, "is no file", errno.EINVAL)
    return file


def _refused(path: Path | str, error: OSError) -> FileError:
    return FileError(path, f"cannot be read: {error.strerror}", error.errno or 0)


def _size(number: int) -> str:
    return f"{number >> 20} MiB" if number >= 1 << 20 else f"{number >> 10} KiB"
