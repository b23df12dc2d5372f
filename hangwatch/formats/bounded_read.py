"""Reads files that people name, or that others may have put there, without believing in their size or kind."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_MOST_LINKS = 40  # path_resolution(7)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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


def is_handed_over(path: Path) -> bool:
    """Whether a path is a stream that who called us has opened: `<(command)` of a shell, /dev/stdin.

    Any other pipe may have no writer, ever.
    """
    return path == Path("/dev/stdin") or path.parent == Path("/dev/fd")


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


def opened_below(folder: Path, path: Path, *, roots_links: bool = False) -> BinaryIO:
    """A file somewhere in a folder where others may write, to read: no link between the two is followed (O_NOFOLLOW).

    With `roots_links` one is that root made in a folder where only root writes, as if the path named its target: below
    `folder`, whatever root it has. Raises FileError.
    """
    steps, trail, followed = list(path.relative_to(folder).parts[::-1]), [_opened_folder(folder, path)], 0
    try:
        while True:
            step = steps.pop() if steps else "."
            target = _link(trail[-1], step, path) if roots_links and followed < _MOST_LINKS else None
            if target is not None:
                followed += 1
                steps += [part for part in reversed(target.split("/")) if part not in ("", ".")]
            if step == ".." or (target or "").startswith("/"):
                _leave(trail, 1 if step == ".." else len(trail))
            elif target is None and steps:
                trail.append(_opened_folder(step, path, trail[-1]))
            elif target is None:
                return _opened_file(step, path, trail[-1])
    finally:
        for here in trail:
            os.close(here)


def _leave(trail: list[int], count: int) -> None:
    """Go up so many folders, not above the first one."""
    for here in trail[max(1, len(trail) - count) :]:
        os.close(here)
        trail.remove(here)


def _opened_folder(name: Path | str, path: Path, here: int | None = None) -> int:
    try:
        return os.open(
            name, os.O_RDONLY | os.O_DIRECTORY | (0 if here is None else os.O_NOFOLLOW) | os.O_CLOEXEC, dir_fd=here
        )
    except OSError as error:
        raise _refused_below(name, path, here, error) from None


def _opened_file(name: str, path: Path, here: int) -> BinaryIO:
    try:
        file = os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here), "rb")
    except OSError as error:
        raise _refused_below(name, path, here, error) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileError(path, "is no file", errno.EINVAL)
    return file


def _link(here: int, name: str, path: Path) -> str | None:
    """Where a link of root's leads that nobody else can have made; None where it is none."""
    try:
        found, around = os.stat(name, dir_fd=here, follow_symlinks=False), os.fstat(here)
        if not stat.S_ISLNK(found.st_mode) or found.st_uid or around.st_uid or around.st_mode & _OTHERS_WRITE:
            return None
        return os.readlink(name, dir_fd=here)
    except OSError as error:
        raise _refused(path, error) from None


def _refused_below(name: Path | str, path: Path, here: int | None, error: OSError) -> FileError:
    """Says that a link is the reason, where it is."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR) and here is not None:
        with contextlib.suppress(OSError):
            if stat.S_ISLNK(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
                return FileError(path, f"cannot be read: {os.fspath(name)} on its way is a link", error.errno)
    return _refused(path, error)


def _refused(path: Path | str, error: OSError) -> FileError:
    return FileError(path, f"cannot be read: {error.strerror}", error.errno or 0)


def _size(number: int) -> str:
    return f"{number >> 20} MiB" if number >= 1 << 20 else f"{number >> 10} KiB"
