"""Files at paths that the user gave: writing files and listing folders."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from hangwatch.cli.usage_errors import InputError
from hangwatch.store import durable

MOST_FILES = 200_000
MOST_FOLDERS_DEEP = 64
_REASONS = {errno.ENXIO: "it is a pipe without a reader", errno.ELOOP: "it is a link: give the file itself"}
# Names of folders of libraries, and of the file in a virtual environment.
_LIBRARIES = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__", "conda-meta", "pyvenv.cfg"})


def write_text(path: Path, content: str) -> None:
    """Write a text file that only this user can read. Stacks are in it. Raises InputError.

    `path` may also be a pipe with a reader. A link is not followed, except in /dev (/dev/stdout).
    """
    if path == Path("-"):
        raise InputError(f"-: give a file name for the page, or {Path('/dev/stdout')}")
    no_link = 0 if path.is_relative_to("/dev") else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | no_link, 0o600)
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            status = os.fstat(descriptor)
            if no_link and stat.S_ISREG(status.st_mode):
                if status.st_uid != os.geteuid():
                    raise InputError(f"{path}: belongs to another user: give a new file")
                os.fchmod(descriptor, 0o600)
                os.ftruncate(descriptor, 0)
            file.write(content)
    except OSError as error:
        raise _not_written(path, error) from None


def write_page(path: Path, content: str) -> None:
    """Write an HTML page as `write_text` does. Raises InputError, also for a file of another kind that exists."""
    if path.suffix not in ("", ".html", ".htm") and path.is_file():
        raise InputError(f"{path}: exists and is no .html file: give a new file")
    write_text(path, content)


def write_new(path: Path, content: bytes) -> None:
    """Write a new file that only this user can read, whole or not at all. A link is not followed.

    Raises InputError, also if the file exists.
    """
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
    except FileExistsError:
        raise InputError(f"{path}: exists: give a new file") from None
    except OSError as error:
        raise _not_written(path, error) from None


def _not_written(path: Path, error: OSError) -> InputError:
    """Return the error for a file that could not be written. If it is incomplete, delete it.

    The error names no file if the file could be opened.
    """
    if error.filename is None and path.is_file() and not path.is_symlink():
        path.unlink()
    return InputError(f"{path}: cannot be written: {_REASONS.get(error.errno or 0, error.strerror)}")


class NewFolder:
    """A new or empty folder that only this user can read. All files in it are new, and no link is followed.

    `files` is the number of written files. The constructor and every method raise InputError.
    """

    def __init__(self, path: Path) -> None:
        self.files = 0
        self._path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with durable.folder(path) as descriptor:
                durable.refuse_unsafe(path, descriptor)
                with os.scandir(descriptor) as entries:
                    if any(entries):
                        raise InputError(f"{path}: is not empty: give a new folder")
        except OSError as error:
            raise InputError(f"{path}: cannot be created: {error.strerror}") from None

    def write(self, folder: str, name: str, content: str) -> None:
        """Write a file to a subfolder, unless it exists. A node may send a rank twice: the first file is kept."""
        try:
            with durable.folder(self._path) as root:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700, dir_fd=root)
                with durable.folder(folder, root) as inner, durable.new_file(inner, name) as file:
                    file.write(content.encode("utf-8", "backslashreplace"))
        except FileExistsError:
            return
        except OSError as error:
            raise InputError(f"{self._path / folder / name}: cannot be written: {error.strerror}") from None
        self.files += 1


def files_below(folder: Path, is_wanted: Callable[[Path], bool], closed: list[Path] | None = None) -> list[Path]:
    """Return the files below a folder for which `is_wanted` is true, sorted. Links are not followed.

    Hidden files and folders, libraries and virtual environments are skipped. Folders that cannot be read are added to
    `closed`. If `closed` is None, they raise InputError. Too many files or levels also raise InputError.
    """

    def refuse(error: OSError) -> None:
        if closed is None or Path(error.filename) == folder:
            raise InputError(f"{error.filename}: cannot be read: {error.strerror}")
        closed.append(Path(error.filename))

    files: list[Path] = []
    for base, folders, names in os.walk(folder, onerror=refuse):
        parent = Path(base)
        if len(parent.relative_to(folder).parts) > MOST_FOLDERS_DEEP:
            raise InputError(f"{folder}: is nested more than {MOST_FOLDERS_DEEP} folders deep; give a smaller folder")
        if parent != folder and not _LIBRARIES.isdisjoint((parent.name, *names)):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += filter(is_wanted, (parent / name for name in names if not name.startswith(".")))
        if len(files) > MOST_FILES:
            raise InputError(f"{folder}: has more than {MOST_FILES} files; give a smaller folder")
    return sorted(files)
