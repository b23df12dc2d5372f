"""Files that a command reads or writes where the user says."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from hangwatch.cli.usage_errors import InputError
from hangwatch.store import durable

MOST_FILES = 200_000
MOST_FOLDERS_DEEP = 64


def write_text(path: Path, content: str) -> None:
    """Write a file, or a pipe that somebody reads, or say why that cannot be. Raises InputError."""
    if path == Path("-"):
        raise InputError(f"-: the page goes to a file of its own: name one, or {Path('/dev/stdout')}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        why = "it is a pipe that nobody reads" if error.errno == errno.ENXIO else error.strerror
        raise InputError(f"{path}: cannot be written: {why}") from None


class NewFolder:
    """A folder for us alone that did not exist or was empty; everything in it is new, and no link is followed.

    Raises InputError, from any method.
    """

    def __init__(self, path: Path) -> None:
        self.files = 0
        self._path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with durable.folder(path) as descriptor:
                durable.refuse_unsafe(path, descriptor)
                with os.scandir(descriptor) as entries:
                    is_empty = next(entries, None) is None
                if not is_empty:
                    raise InputError(f"{path}: is not empty: name a new folder")
        except OSError as error:
            raise InputError(f"{path}: cannot be made: {error.strerror}") from None
        except durable.UnsafeFolderError as error:
            raise InputError(str(error)) from None

    def write(self, folder: str, name: str, content: str) -> None:
        """Write a file into a folder of it."""
        try:
            with durable.folder(self._path) as own:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700, dir_fd=own)
                with durable.folder(folder, own) as inner, durable.new_file(inner, name) as file:
                    file.write(content.encode("utf-8", "backslashreplace"))
        except FileExistsError:
            return  # a node that says a rank twice: the first counts
        except OSError as error:
            raise InputError(f"{self._path / folder / name}: cannot be written: {error.strerror}") from None
        self.files += 1


def files_below(folder: Path, is_wanted: Callable[[Path], bool], closed: list[Path] | None = None) -> list[Path]:
    """What lies below a folder and is wanted, sorted; hidden folders and names that begin with a dot are left out.

    No link in it is followed: others may write there. Folders in it that cannot be read are added to `closed`. Raises
    InputError, without `closed` for these as well.
    """

    def refuse(error: OSError) -> None:
        if closed is not None and Path(error.filename) != folder:
            closed.append(Path(error.filename))
            return
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}")

    found: list[Path] = []
    deep = len(folder.parts)
    for base, folders, names in os.walk(folder, onerror=refuse):
        here = Path(base)
        if len(here.parts) - deep > MOST_FOLDERS_DEEP:
            raise InputError(
                f"{folder}: folders lie deeper in each other than {MOST_FOLDERS_DEEP}; name those you mean"
            )
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        shown = (here / name for name in names if not name.startswith("."))
        found += filter(is_wanted, shown)
        if len(found) > MOST_FILES:
            raise InputError(f"{folder}: holds more than {MOST_FILES} files; name the ones you mean")
    return sorted(found)
