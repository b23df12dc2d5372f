"""Find the static variables of flight recorders by the symbols of a library. A child reads each library file once.

The file belongs to the job, and may be on a file system that never responds. Then the child is abandoned, and that
library is searched by shape. Results are cached by device and inode, as in /proc/PID/maps, and by the first page as
mapped by the process. This page holds the build id. So no other file is mistaken for the library, even if the path
changes. `dump` keeps the results for its next run in a file that only its user can change, on a local file system.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from hangwatch import words
from hangwatch.formats import bounded_read, decoding
from hangwatch.model import Fault, ProcessId
from hangwatch.probes.base import child, child_runner
from hangwatch.probes.torch_recorder.libraries import Mapped

CHILD = Path(__file__).with_name("symbols_child.py")
DEADLINE_SECONDS = 10.0
STARVATION = child.Starvation(20.0, cpu_seconds=2.0, most_asleep=2)
"""Extra time for a child that waits for a CPU, not for a file. Reading libtorch_cpu takes 0.1 s of CPU."""

# Time before another try, of a file that did not respond and of all files of its owner
SILENCE_SECONDS = 600.0
MOST_KNOWN = 256
MOST_KEPT_BYTES = 1 << 17
_FARTHEST = 1 << 40
_Offset = Annotated[int, msgspec.Meta(gt=0, lt=_FARTHEST)]


class Symbols(NamedTuple):
    """The symbols of a library file.

    `pointer` is the offset of the pointer to the recorder from the library's first mapping; None if unknown. `registry`
    is that of the recorders of other backends. `version` is the torch version; empty if unknown. `is_late` is true if
    the file was not read in time, or another file of its owner.
    """

    pointer: _Offset | None = None
    version: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.+_-]{0,64}\Z")] = ""
    registry: _Offset | None = None
    is_late: bool = False


_LATE = Symbols(is_late=True)


class _Key(NamedTuple):
    device: str
    inode: int
    offset: int
    library: str
    page: str


class SymbolTables:
    """A cache of the symbols of library files."""

    def __init__(self, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._symbols: dict[_Key, Symbols] = {}
        self._silent_until: dict[_Key | str, float] = {}  # files and owners
        self._locks: dict[_Key, threading.Lock] = {}
        self._path: Path | None = None
        self.runner = child_runner.Runner("reader of symbols", starvation=STARVATION)

    def keep_in(self, folder: Path) -> None:
        """Use the symbols that earlier runs kept in a folder that only this user can change, and add those of this run.

        It must be on a local file system: it is read here and not in a child.
        """
        with contextlib.suppress(OSError, bounded_read.FileError, msgspec.DecodeError, RecursionError):
            self._path = folder / "hangwatch-symbols.json" if _is_ours(folder.lstat()) else None
            with bounded_read.open_file(self._path or "", flags=os.O_NOFOLLOW | os.O_NONBLOCK) as file:
                if _is_ours(os.fstat(file.fileno())):
                    kept = bounded_read.read_rest(file, folder, MOST_KEPT_BYTES)
                    self._symbols |= decoding.decode_json(kept, list[tuple[_Key, Symbols]])

    def _keep(self) -> None:
        """Replace the file by the symbols that are known now."""
        if self._path is not None and (kept := [each for each in self._symbols.items() if each[1].pointer]):
            new_path = self._path.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(OSError):
                with os.fdopen(os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(msgspec.json.encode(kept))
                new_path.replace(self._path)

    def look_up(self, library: Mapped, first_page: bytes, process: ProcessId, share: str, proc_root: Path) -> Symbols:
        """Return the symbols of the file that this process has mapped; empty if it cannot be read.

        One thread asks for all owners. So after a file that takes too long, its owner (`share`) waits with all others.
        """
        page = words.checksum(first_page, 32)
        key = _Key(library.device, library.inode, library.offset, library.library, page)
        with self._lock:
            file_lock = self._locks.setdefault(key, threading.Lock())
        with file_lock:  # ranks of one node are read in parallel and share a library
            with self._lock:
                symbols = self._symbols.get(key)
                is_silent = time.monotonic() < max(self._silent_until.get(each, 0.0) for each in (key, share))
            if symbols is not None or is_silent:
                return symbols or _LATE
            symbols = self._ask(key, library.path, process, share, proc_root)
            with self._lock:
                if len(self._symbols) + len(self._silent_until) >= MOST_KNOWN:
                    self._symbols, self._silent_until, self._locks = {}, {}, {}
                if symbols is None:
                    end = time.monotonic() + SILENCE_SECONDS
                    self._silent_until |= dict.fromkeys((key, share) if share else (key,), end)
                else:
                    self._symbols[key] = symbols
                    self._keep()
        return symbols or _LATE

    def _ask(self, key: _Key, path: str, process: ProcessId, share: str, proc_root: Path) -> Symbols | None:
        """Return the answer of a child; None if it did not respond, or was ended by its limit of CPU time."""
        question = f"{proc_root}/{process.pid}/root", path, key.device, str(key.inode), str(key.offset), key.library
        printed = self.runner.run(
            [sys.executable, "-I", str(CHILD), *question],
            process,
            share=share,
            deadline_seconds=self._deadline_seconds,
        )
        return None if isinstance(printed, Fault) or printed.code < 0 else _symbols(printed.out, key.page)


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _symbols(raw: bytes, page: str) -> Symbols:
    with contextlib.suppress(msgspec.DecodeError):
        answered_page, symbols = decoding.decode_json(raw, tuple[str, Symbols])
        return symbols if answered_page == page else Symbols()
    return Symbols()


SHARED = SymbolTables()
