"""Bounded reading of files that other users may have written. Links and special files can be refused."""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from hangwatch.errors import UserError

_MOST_LINKS = 40  # path_resolution(7)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class FileError(UserError):
    """A file that cannot be read. The message holds the path and the reason."""

    def __init__(self, path: Path | str, why: str, number: int = 0) -> None:
        super().__init__(f"{os.fspath(path)!r}: {why}" if "\0" in os.fspath(path) else f"{path}: {why}")
        self.errno = number
        """The errno of the system call; 0 if no system call failed."""


def read(path: Path | str, most_bytes: int, *, flags: int = 0) -> bytes:
    """Return the content of a file of at most `most_bytes`. Raises FileError, also if the file is larger.

    At most one byte more is read, so a device or pipe without an end does no harm. `flags` are those of `open_file`.
    """
    with open_file(path, flags=flags) as file:
        return read_rest(file, path, most_bytes)


def is_inherited_stream(path: Path) -> bool:
    """True if the path is a stream that the calling process has opened: `<(command)` of a shell, or /dev/stdin.

    Such a stream has a writer. Any other pipe may never get one.
    """
    return path == Path("/dev/stdin") or path.parent == Path("/dev/fd")


def read_rest(file: BinaryIO, path: Path | str, most_bytes: int) -> bytes:
    """Return the rest of an open file. Raises FileError if more than `most_bytes` remain."""
    try:
        content = file.read(most_bytes + 1)
    except OSError as error:
        raise _refused(path, error) from None
    if len(content) > most_bytes:
        raise FileError(path, f"is larger than {_size(most_bytes)}: not read", errno.EFBIG)
    return content


def open_file(path: Path | str, *, flags: int = 0) -> BinaryIO:
    """Open a file for reading, with `flags` of open(2): O_NONBLOCK accepts only a regular file. Raises FileError."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags), "rb")
    except OSError as error:
        raise _refused(path, error) from None
    except ValueError as error:  # a NUL in the path, or a character that a path cannot contain
        raise FileError(path, f"is not a valid path: {error}", errno.EINVAL) from None
    return _regular_file(file, path) if flags & os.O_NONBLOCK else file


def _regular_file(file: BinaryIO, path: Path | str) -> BinaryIO:
    """Return the file if it is a regular file. Else it is closed; raises FileError."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileError(path, "is not a regular file", errno.EINVAL)
    return file


def open_below(folder: Path, path: Path, *, roots_links: bool = False) -> BinaryIO:
    """Open the file `path` below `folder`, in which other users may write. No link below `folder` is followed.

    With `roots_links`, links that only root can have made are followed. Their targets are resolved below `folder`.
    Raises FileError.
    """
    remaining = list(path.relative_to(folder).parts[::-1])
    open_folders, links_followed = [_opened_folder(folder, path)], 0
    try:
        while True:
            name = remaining.pop() if remaining else "."
            target = _link(open_folders[-1], name, path) if roots_links and links_followed < _MOST_LINKS else None
            if target is not None:
                links_followed += 1
                remaining += [part for part in reversed(target.split("/")) if part not in ("", ".")]
            if name == ".." or (target or "").startswith("/"):
                _leave(open_folders, 1 if name == ".." else len(open_folders))
            elif target is None and remaining:
                open_folders.append(_opened_folder(name, path, open_folders[-1]))
            elif target is None:
                return _opened_file(name, path, open_folders[-1])
    finally:
        for descriptor in open_folders:
            os.close(descriptor)


def _leave(open_folders: list[int], count: int) -> None:
    """Close the last `count` folders and remove them from the list. The first folder always stays."""
    for descriptor in open_folders[max(1, len(open_folders) - count) :]:
        os.close(descriptor)
        open_folders.remove(descriptor)


def _opened_folder(name: Path | str, path: Path, parent: int | None = None) -> int:
    try:
        return os.open(
            name, os.O_RDONLY | os.O_DIRECTORY | (0 if parent is None else os.O_NOFOLLOW) | os.O_CLOEXEC, dir_fd=parent
        )
    except OSError as error:
        raise _refused_below(name, path, parent, error) from None


def _opened_file(name: str, path: Path, parent: int) -> BinaryIO:
    try:
        file = os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent), "rb")
    except OSError as error:
        raise _refused_below(name, path, parent, error) from None
    return _regular_file(file, path)


def _link(parent: int, name: str, path: Path) -> str | None:
    """Return the target of a link that only root can have made; None if `name` is not such a link."""
    try:
        status, parent_status = os.stat(name, dir_fd=parent, follow_symlinks=False), os.fstat(parent)
        if (
            not stat.S_ISLNK(status.st_mode)
            or status.st_uid
            or parent_status.st_uid
            or parent_status.st_mode & _OTHERS_WRITE
        ):
            return None
        return os.readlink(name, dir_fd=parent)
    except OSError as error:
        raise _refused(path, error) from None


def _refused_below(name: Path | str, path: Path, parent: int | None, error: OSError) -> FileError:
    """Return the error to raise. If the reason is a link in the path, the message names the link."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR) and parent is not None:
        with contextlib.suppress(OSError):
            if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                return FileError(path, f"cannot be read: {os.fspath(name)} in its path is a link", error.errno)
    return _refused(path, error)


def _refused(path: Path | str, error: OSError) -> FileError:
    return FileError(path, f"cannot be read: {error.strerror}", error.errno or 0)


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"
