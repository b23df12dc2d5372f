"""Find the static variables of flight recorders by the symbols of a library. A child reads each library file once.

The file belongs to the job, and may be on a file system that never responds. Then the child is abandoned, and that
library is searched by shape. Results are cached by device and inode, as in /proc/PID/maps, and by the first page as
mapped by the process. This page holds the build id. So no other file is mistaken for the library, even if the path
changes.
"""

import hashlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from hangwatch.model import Fault, ProcessId
from hangwatch.probes.base import child
from hangwatch.probes.torch_recorder.libraries import Mapped

CHILD = Path(__file__).with_name("symbols_child.py")
DEADLINE_SECONDS = 10.0
STARVATION = child.Starvation(20.0, cpu_seconds=2.0, most_asleep=2)
"""Extra time for a child that waits for a CPU, not for a file. Reading libtorch_cpu takes 0.1 s of CPU."""

SILENCE_SECONDS = 600.0  # time before another try, of a file that did not respond and of all files of its owner
PAGE_BYTES = 4096
MOST_KNOWN = 256
MOST_ANSWER_BYTES = 4096
_FARTHEST = 1 << 40


class Symbols(NamedTuple):
    """The symbols of a library file.

    `pointer` is the offset of the pointer to the recorder from the library's first mapping; None if unknown. `registry`
    is that of the recorders of other backends. `version` is the torch version; empty if unknown. `is_late` is true if
    the file was not read in time, or another file of its owner.
    """

    pointer: int | None = None
    version: str = ""
    registry: int | None = None
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
        self.runner = child.Runner("reader of symbols", starvation=STARVATION)

    def look_up(self, library: Mapped, first_page: bytes, process: ProcessId, share: str, proc_root: Path) -> Symbols:
        """Return the symbols of the file that this process has mapped; empty if it cannot be read.

        One thread asks for all owners. So after a file that takes too long, its owner (`share`) waits with all others.
        """
        page = hashlib.sha256(first_page).hexdigest()
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
        return symbols or _LATE

    def _ask(self, key: _Key, path: str, process: ProcessId, share: str, proc_root: Path) -> Symbols | None:
        """Return the answer of a child; None if it did not respond, or was ended by its limit of CPU time."""
        question = [f"{proc_root}/{process.pid}/root", path, key.device, key.inode, key.offset, key.library]
        printed = self.runner.run(
            [sys.executable, "-I", str(CHILD), json.dumps(question)],
            process,
            share=share,
            deadline_seconds=self._deadline_seconds,
        )
        try:
            return None if isinstance(printed, Fault) or printed.code < 0 else _symbols(printed.out, key.page)
        except ValueError:  # not JSON
            return None


def _symbols(raw: bytes, page: str) -> Symbols:
    if not 0 < len(raw) <= MOST_ANSWER_BYTES:
        return Symbols()
    answer = json.loads(raw)
    offsets = answer["pointer"], answer["registry"]
    if answer["page"] != page or any(offset is not None and not 0 < offset < _FARTHEST for offset in offsets):
        return Symbols()
    return Symbols(offsets[0], answer["version"], offsets[1])


SHARED = SymbolTables()
