"""The static pointer of a flight recorder, by the symbols of its library: a child reads each library file once.

The file belongs to the job and may be on a file system that never responds: then the child is abandoned, and that
library is searched by shape. Results are kept by file (device and inode, as the kernel shows them in /proc/PID/maps)
and by the file's first page as the process has it mapped, with its build id and the places of its parts. No other file
is taken for it, whatever happens to the path.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from hangwatch.model import Fault, ProcessId
from hangwatch.probes import child
from hangwatch.probes.torch_recorder.libraries import Mapped

CHILD = Path(__file__).with_name("symbols_child.py")
DEADLINE_SECONDS = 10.0
STARVATION = child.Starvation(20.0, cpu_seconds=2.0, most_asleep=2)
"""A child that waits for a core does not wait for a file. After 2 s of CPU it has had one: libtorch_cpu takes 0.2."""

SILENCE_SECONDS = 600.0  # after which a file that gave no answer is asked again
PAGE_BYTES = 4096
MOST_KNOWN = 256
MOST_ANSWER_BYTES = 4096
_FARTHEST = 1 << 40


class Symbols(NamedTuple):
    """What the file says: how far behind its first mapping the pointer lies, None where it says not; the version."""

    pointer: int | None = None
    version: str = ""


class _Key(NamedTuple):
    device: str
    inode: int
    offset: int
    library: str
    page: str


class SymbolTables:
    """What is known of each library file."""

    def __init__(self, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._known: dict[_Key, Symbols] = {}
        self._silent: dict[_Key, float] = {}
        self._asking: dict[_Key, threading.Lock] = {}
        self._runner = child.Runner("reader of symbols", starvation=STARVATION)

    def left_behind(self) -> int:
        """How many children wait for a file now."""
        return self._runner.abandoned.count()

    def of(self, library: Mapped, first_page: bytes, process: ProcessId, share: str, proc_root: Path) -> Symbols:
        """What the file that this process has mapped says; nothing where it cannot be read."""
        page = hashlib.sha256(first_page).hexdigest()
        key = _Key(library.device, library.inode, library.offset, library.library, page)
        with self._lock:
            asking = self._asking.setdefault(key, threading.Lock())
        with asking:  # ranks of one node are read at once, and have one library
            with self._lock:
                known = self._known.get(key)
                is_silent = time.monotonic() < self._silent.get(key, 0.0)
            if known is not None or is_silent:
                return known or Symbols()
            known = self._ask(key, library.path, process, share, proc_root)
            with self._lock:
                if len(self._known) + len(self._silent) >= MOST_KNOWN:
                    self._known, self._silent, self._asking = {}, {}, {}
                if known is None:
                    self._silent[key] = time.monotonic() + SILENCE_SECONDS
                else:
                    self._known[key] = known
        return known or Symbols()

    def _ask(self, key: _Key, path: str, process: ProcessId, share: str, proc_root: Path) -> Symbols | None:
        """None where there was no answer."""
        question = [f"{proc_root}/{process.pid}/root", path, key.device, key.inode, key.offset, key.library]
        printed = self._runner.run(
            [sys.executable, "-I", str(CHILD), json.dumps(question)],
            process,
            share=share,
            deadline_seconds=self._deadline_seconds,
        )
        try:
            return None if isinstance(printed, Fault) else _symbols(printed.out, key.page)
        except ValueError:  # no JSON
            return None


def _symbols(raw: bytes, page: str) -> Symbols:
    if not 0 < len(raw) <= MOST_ANSWER_BYTES:
        return Symbols()
    answer = json.loads(raw)
    pointer = answer["pointer"]
    if answer["page"] != page or (pointer is not None and not 0 < pointer < _FARTHEST):
        return Symbols()
    return Symbols(pointer, answer["version"])


SHARED = SymbolTables()
