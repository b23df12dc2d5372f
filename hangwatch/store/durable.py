"""Atomic writing: files and folders appear complete or not at all, even if the machine crashes.

All functions use descriptors of folders and follow no link. Folders are made with mode 0700 and files with 0600.
`allow` is a function that may let others read a file or folder. It is called with the descriptor while the file or
folder is empty. A temporary name has the pid and start time of its writer, so that files of a dead writer can be
recognized and removed.
"""

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeAlias

from hangwatch.formats.incident_file import StoreError, write_remedy
from hangwatch.model import ProcessId
from hangwatch.probes.base import procfs

_TEMPORARY = ".tmp-"
_WRITER = re.compile(r"\.tmp-(?P<pid>[0-9]{1,10})\.(?P<ticks>[0-9]{1,20})-")
Allow: TypeAlias = Callable[[int], None]
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafeFolderError(StoreError):
    """A folder in which another user could make links or read hangwatch's files. The message has the remedy."""


@contextlib.contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Convert an OSError in the `with` block to a StoreError, which names `path` and the remedy."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
        raise StoreError(f"{path}: incidents cannot be written: {what}\n  {write_remedy(error.errno)}") from None


@contextlib.contextmanager
def folder(path: str | Path, parent: int | None = None) -> Iterator[int]:
    """Open a folder by its path; with `parent`, by its name below this descriptor. Raises OSError, also for a link."""
    descriptor = os.open(path, _OPEN_FOLDER, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def made_folder(name: str, parent: int) -> Iterator[int]:
    """Open the folder `name` below the descriptor `parent`. If it does not exist, make it with mode 0700."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
        os.fsync(parent)
    with folder(name, parent) as descriptor:
        yield descriptor


def refuse_unsafe(path: Path, descriptor: int) -> None:
    """Raise UnsafeFolderError if the folder belongs to another user, or if all users can write to it.

    Root and the current user may own it. A sticky folder such as /tmp is safe, because other users cannot rename or
    delete files in it.
    """
    status = os.fstat(descriptor)
    if status.st_uid not in (0, os.geteuid()):
        raise UnsafeFolderError(
            f"{path}: belongs to user {status.st_uid}, who could read and change the files in it\n"
            f"  chown {os.geteuid()} {path}, or choose another directory"
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise UnsafeFolderError(
            f"{path}: all users can write there and could replace files by links\n"
            f"  chmod o-w {path}, or choose another directory"
        )


def _only_us(_descriptor: int) -> None:
    """Keep the file's mode: only the current user may read it."""


def create(parent: int, name: str, content: Mapping[str, bytes], allow: Allow = _only_us) -> None:
    """Make a folder with these files and their subfolders ("dumps/1/rank7.txt"). It appears when all are on disk.

    Raises OSError, after removing the incomplete folder.
    """
    temporary = _temporary(name)
    os.mkdir(temporary, 0o700, dir_fd=parent)
    try:
        with folder(temporary, parent) as new:
            allow(new)
            _write_all(new, content, write, allow)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        shutil.rmtree(f"/proc/self/fd/{parent}/{temporary}", ignore_errors=True)
        raise
    os.fsync(parent)


def update(parent: int, name: str, content: Mapping[str, bytes], allow: Allow = _only_us) -> None:
    """Replace or add files of an existing folder by rename. After an OSError each file is either old or new."""
    with folder(name, parent) as old:
        refuse_unsafe(Path(name), old)
        allow(old)
        _write_all(old, content, replace_file, allow)


def discard(parent: int, name: str, file: str) -> None:
    """Delete a file of a folder. Raises OSError, also if the file does not exist."""
    with folder(name, parent) as old:
        os.unlink(file, dir_fd=old)
        os.fsync(old)


def add(parent: int, name: str, content: Mapping[str, bytes], allow: Allow = _only_us) -> None:
    """Replace or add files as `update` does. If the folder does not exist, it is made. Raises OSError."""
    with made_folder(name, parent):
        update(parent, name, content, allow)


def write(parent: int, name: str, content: bytes, allow: Allow = _only_us) -> None:
    """Write a new file (mode 0600) and wait until it is on disk. Raises OSError, also if the name exists."""
    with new_file(parent, name) as file:
        allow(file.fileno())
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def new_file(parent: int, name: str) -> BinaryIO:
    """Open a new file (mode 0600) for writing. Raises OSError, also if the name exists."""
    return os.fdopen(os.open(name, _OPEN_NEW, 0o600, dir_fd=parent), "wb")


def prove_writable(parent: int) -> None:
    """Write a file and delete it again. Raises OSError if that is impossible."""
    name = _temporary("writable")
    write(parent, name, b"x")
    os.unlink(name, dir_fd=parent)


def remove(path: Path) -> None:
    """Delete a folder: rename it in one step, then delete its files. Raises OSError."""
    renamed = path.with_name(_temporary(path.name))
    path.rename(renamed)
    shutil.rmtree(renamed)


def remove_leftovers(path: Path) -> None:
    """Delete the temporary files of dead writers in a folder, at any depth. Raises OSError."""
    for base, folders, files in os.walk(path):
        for name in (*folders, *files):
            leftover = Path(base, name)
            if not name.startswith(_TEMPORARY) or not _writer_is_dead(name):
                continue
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        folders[:] = [name for name in folders if not name.startswith(_TEMPORARY)]


def _write_all(
    parent: int, content: Mapping[str, bytes], put: Callable[[int, str, bytes, Allow], None], allow: Allow
) -> None:
    """Write these files, each with the function `put`. Make their folders."""
    for path, data in content.items():
        with contextlib.ExitStack() as stack:
            inner = parent
            for part in PurePosixPath(path).parts[:-1]:
                inner = stack.enter_context(made_folder(part, inner))
                allow(inner)
            put(inner, PurePosixPath(path).name, data, allow)
            os.fsync(inner)
    os.fsync(parent)


def replace_file(parent: int, name: str, content: bytes, allow: Allow = _only_us) -> None:
    """Replace a file by rename, or make it. Raises OSError; then the file is as before."""
    temporary = _temporary(name)
    try:
        write(parent, temporary, content, allow)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise


def _temporary(name: str) -> str:
    us = procfs.read_state(os.getpid())
    return f"{_TEMPORARY}{os.getpid()}.{us[0].start_ticks if us else 0}-{name}"


def _writer_is_dead(name: str) -> bool:
    writer = _WRITER.match(name)
    if writer is None or int(writer["pid"]) == os.getpid():
        return True
    return not procfs.is_alive(ProcessId(pid=int(writer["pid"]), start_ticks=int(writer["ticks"])))
