"""Files and folders that appear whole or not at all, also when the machine stops in the middle.

Everything goes through descriptors of folders and follows no link. Folders are made 0700 and files 0600; `allow` is
called with the descriptor of each before anything is in it, and may let others read. A temporary name starts with
`.tmp-`, the pid of its writer and when that began, so that what a dead writer left can be told and removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeAlias

_TEMPORARY = ".tmp-"
_WRITER = re.compile(r"\.tmp-(?P<pid>[0-9]{1,10})(\.(?P<ticks>[0-9]{1,20}))?-")
Allow: TypeAlias = Callable[[int], None]
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafeFolderError(Exception):
    """A folder in which somebody else could plant links or read what is written; the message says how to mend it."""


@contextlib.contextmanager
def folder(path: str | Path, parent: int | None = None) -> Iterator[int]:
    """A descriptor of a folder, by its path or by its name below the descriptor `parent`. Raises OSError for a link."""
    descriptor = os.open(path, _OPEN_FOLDER, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def made_folder(name: str, parent: int) -> Iterator[int]:
    """A descriptor of the folder `name` below the descriptor `parent`, made (0700) where it is missing."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
        os.fsync(parent)
    with folder(name, parent) as descriptor:
        yield descriptor


def refuse_unsafe(path: Path, descriptor: int) -> None:
    """Raise UnsafeFolderError where a user other than root and ourselves owns the folder, or all can change it.

    A sticky folder such as /tmp is safe in this: others cannot rename or delete what is ours.
    """
    found = os.fstat(descriptor)
    if found.st_uid not in (0, os.geteuid()):
        raise UnsafeFolderError(
            f"{path}: belongs to user {found.st_uid}, who could change and read what is stored there\n"
            f"  chown {os.geteuid()} {path}, or choose another directory"
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise UnsafeFolderError(
            f"{path}: everybody can write there and could put links in the place of files\n"
            f"  chmod o-w {path}, or choose another directory"
        )


def _only_us(_descriptor: int) -> None:
    """As it is made: nobody else may read it."""


def create(parent: int, name: str, content: Mapping[str, bytes], allow: Allow = _only_us) -> None:
    """Make a folder with these files ("dumps/1/rank7.txt" makes the folders between); it appears when all is on disk.

    Raises OSError, having removed what it began.
    """
    temporary = _temporary(name)
    os.mkdir(temporary, 0o700, dir_fd=parent)
    try:
        with folder(temporary, parent) as new:
            allow(new)
            _each(new, content, write, allow)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        shutil.rmtree(f"/proc/self/fd/{parent}/{temporary}", ignore_errors=True)
        raise
    os.fsync(parent)


def update(parent: int, name: str, content: Mapping[str, bytes], allow: Allow = _only_us) -> None:
    """Replace or add these files in a folder that exists, each by rename. Raises OSError: each is then old or new."""
    with folder(name, parent) as old:
        refuse_unsafe(Path(name), old)
        allow(old)
        _each(old, content, _replace, allow)


def discard(parent: int, name: str, file: str) -> None:
    """Delete a file of a folder. Raises OSError, also where it is not there."""
    with folder(name, parent) as old:
        os.unlink(file, dir_fd=old)
        os.fsync(old)


def add(parent: int, name: str, content: Mapping[str, bytes], allow: Allow = _only_us) -> None:
    """The same in a folder that is made where it is missing. Raises OSError."""
    with made_folder(name, parent):
        update(parent, name, content, allow)


def write(parent: int, name: str, content: bytes, allow: Allow = _only_us) -> None:
    """Write a new file (0600) and wait until it is on disk. Raises OSError, also when the name is taken."""
    with new_file(parent, name) as file:
        allow(file.fileno())
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def new_file(parent: int, name: str) -> BinaryIO:
    """A new file (0600), open for writing. Raises OSError, also when the name is taken."""
    return os.fdopen(os.open(name, _OPEN_NEW, 0o600, dir_fd=parent), "wb")


def prove_writable(parent: int) -> None:
    """Write a file and delete it again. Raises OSError where that is impossible."""
    name = _temporary("writable")
    write(parent, name, b"x")
    os.unlink(name, dir_fd=parent)


def remove(path: Path) -> None:
    """Delete a folder: it is gone from its place in one step, its files follow. Raises OSError."""
    dying = path.with_name(_temporary(path.name))
    path.rename(dying)
    shutil.rmtree(dying)


def remove_leftovers(path: Path, *, is_locked: bool) -> None:
    """Delete what writers that live no more left behind in a folder, at any depth. Raises OSError.

    Where the folder `is_locked` by us, a name without the time at which its writer began is of no living writer: only
    an earlier version gave such names.
    """
    for base, folders, files in os.walk(path):
        for name in (*folders, *files):
            leftover = Path(base, name)
            if not name.startswith(_TEMPORARY) or not _writer_is_dead(name, is_locked=is_locked):
                continue
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        folders[:] = [name for name in folders if not name.startswith(_TEMPORARY)]


def _each(
    parent: int, content: Mapping[str, bytes], put: Callable[[int, str, bytes, Allow], None], allow: Allow
) -> None:
    for path, data in content.items():
        with contextlib.ExitStack() as stack:
            inner = parent
            for part in PurePosixPath(path).parts[:-1]:
                inner = stack.enter_context(made_folder(part, inner))
                allow(inner)
            put(inner, PurePosixPath(path).name, data, allow)
            os.fsync(inner)
    os.fsync(parent)


def _replace(parent: int, name: str, content: bytes, allow: Allow) -> None:
    temporary = _temporary(name)
    try:
        write(parent, temporary, content, allow)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise


def _temporary(name: str) -> str:
    pid = os.getpid()
    return f"{_TEMPORARY}{pid}.{_start_ticks(pid) or 0}-{name}"


def _writer_is_dead(name: str, *, is_locked: bool) -> bool:
    found = _WRITER.match(name)
    if found is None or int(found["pid"]) == os.getpid():
        return True
    began = _start_ticks(int(found["pid"]))
    if began is None or found["ticks"] is None:
        return began is None or is_locked
    return began != int(found["ticks"])


def _start_ticks(pid: int) -> int | None:
    """When a process began, in ticks since the machine did (field 22 of proc_pid_stat(5)); None where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
