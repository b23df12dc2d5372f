"""PyTorch's flight recorder, read out of the memory of a running process: nothing set in the job, and nothing paused.

A static pointer in libtorch leads to it: found by a symbol of the library (`symbols`), or by the shape of what it leads
to (`search`). Its fields lie where the table of the process's version says (`layouts`), which is believed only where
all of it fits (`decode`). It asks for the right of ptrace(2), no other, and works on a rank in any state.
"""

from __future__ import annotations

import errno
import os
import platform
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

from msgspec.structs import replace

from hangwatch.model import Fault, ProcessId
from hangwatch.model.flight_records import RankRecords
from hangwatch.probes import pseudo_files
from hangwatch.probes.process import process_memory, procfs
from hangwatch.probes.torch_recorder import decode, layouts, libraries, search, symbols
from hangwatch.probes.torch_recorder.layouts import Layout
from hangwatch.probes.torch_recorder.libraries import Mapped, Mappings
from hangwatch.probes.torch_recorder.memory_image import Place, Read, UnreadableError, fits

MOST_MAPS_BYTES = 8 << 20
MOST_SECONDS = 5.0  # of one process, the symbols of its library apart
MOST_KNOWN = 4096
MACHINES = frozenset({"x86_64", "AMD64"})
_TURN_ON = "set TORCH_FR_BUFFER_SIZE=2000 in the job (TORCH_NCCL_TRACE_BUFFER_SIZE=2000 before torch 2.11)"

_Key = TypeVar("_Key")
_Known = TypeVar("_Known")


class Recorders:
    """The recorders of the processes of this node: where those were found that took a search, and which are there."""

    def __init__(self, proc_root: Path = procfs.PROC) -> None:
        self._proc_root = proc_root
        self._lock = threading.Lock()
        self._found: dict[tuple[ProcessId, int], tuple[int, Layout]] = {}
        self._lasting: dict[ProcessId, tuple[RankRecords | Fault, ...]] = {}

    def lasting(self, process: ProcessId) -> tuple[RankRecords | Fault, ...] | None:
        """What `read` has told of a process that holds as long as it lives, without its records; None: nothing yet.

        That is a recorder with room for records, or one that is off: torch makes it once, at the first operation.
        """
        with self._lock:
            return self._lasting.get(process)

    def read(self, process: ProcessId, share: str = "", newest: int | None = None) -> tuple[RankRecords | Fault, ...]:
        """What each recorder of a process holds, or why it cannot be told; never empty.

        With `newest`, of the operations that are done only so many of each group are told, and the oldest of all: a
        tenth of the time. `share` is whose places are taken where its library gives no answer. A recorder that was
        never used is empty, with room for nothing. The reasons of a fault: NoTorch, NoRecorder (a version or a build
        without one), RecorderOff, UnknownLayout, ChangedWhileRead, TooLarge, PermissionDenied, NoAnswer, ProcessGone.
        """
        told = self._read(process, share, newest)
        if any(one.reason == "RecorderOff" if isinstance(one, Fault) else one.capacity for one in told):
            kept = (one if isinstance(one, Fault) else replace(one, records=(), groups=(), members=()) for one in told)
            self._keep(self._lasting, process, tuple(kept))
        return told

    def _read(self, process: ProcessId, share: str, newest: int | None) -> tuple[RankRecords | Fault, ...]:
        subject = f"pid {process.pid}"
        try:
            found = self._mappings(process)
            if not found.libraries:
                raise UnreadableError("NoTorch", "it has not loaded torch")
            if platform.machine() not in MACHINES:
                raise UnreadableError("UnknownLayout", f"the layout on {platform.machine()} has not been measured")
        except UnreadableError as why:
            return (_fault(subject, why),)
        answers: list[RankRecords | Fault] = []
        for library in found.libraries:
            try:
                answers.append(self._of(library, found, process, share, newest))
            except UnreadableError as why:
                answers.append(_fault(f"{subject} {library.library}", why))
        if self._is_gone(process):
            return (_fault(subject, UnreadableError("ProcessGone", "the process has ended")),)
        told = [answer for answer in answers if not (isinstance(answer, Fault) and answer.reason == "NoRecorder")]
        return tuple(told or answers)

    def _mappings(self, process: ProcessId) -> Mappings:
        if self._is_gone(process):
            raise UnreadableError("ProcessGone", "the process has ended")
        (maps,) = self._reader(process, "maps")([(0, MOST_MAPS_BYTES)])
        found = libraries.mapped(maps)
        if not found.libraries and len(maps) >= MOST_MAPS_BYTES:
            raise UnreadableError("TooLarge", f"it has more than {MOST_MAPS_BYTES >> 20} MiB of mappings")
        return found

    def _of(self, library: Mapped, found: Mappings, process: ProcessId, share: str, newest: int | None) -> RankRecords:
        (page,) = self._reader(process, "mem")([(library.start, symbols.PAGE_BYTES)])
        known = symbols.SHARED.of(library, page, process, share, self._proc_root)
        read = self._reader(process, "mem")  # the time that a child took counts for nobody
        candidates = layouts.of(known.version)
        if known.pointer is not None:
            (raw,) = read([(library.start + known.pointer, 8)])
            fits(len(raw) == 8, "the pointer to it leads to no memory")
            address = int.from_bytes(raw, "little")
            if not address:
                return _unused(library, candidates, known.version)
            _, records = _only([(address, layout) for layout in candidates], read, library, newest)
            return replace(records, torch_version=known.version)
        key = process, library.start
        with self._lock:
            place = self._found.pop(key, None)
        places = [place] if place else search.search(read, library.data, found.writable, candidates)
        if not places:
            raise UnreadableError(
                "NoRecorder", f"no object in {library.path} has the shape of a flight recorder that is on"
            )
        place, records = _only(places, read, library, newest)
        self._keep(self._found, key, place)
        return replace(records, torch_version=known.version, found_by="shape")

    def _keep(self, known: dict[_Key, _Known], key: _Key, value: _Known) -> None:
        with self._lock:
            if len(known) >= MOST_KNOWN:
                known.clear()
            known[key] = value

    def _is_gone(self, process: ProcessId) -> bool:
        state = procfs.read_state(process.pid, self._proc_root)
        return state is None or state[0] != process

    def _reader(self, process: ProcessId, name: str) -> Read:
        path, end = self._proc_root / str(process.pid) / name, time.monotonic() + MOST_SECONDS

        def read(places: Sequence[Place]) -> Sequence[bytes]:
            if time.monotonic() > end:
                raise UnreadableError("NoAnswer", f"it was not read within {MOST_SECONDS:.0f} s")
            answer = process_memory.SHARED.read_pieces(path, places)
            if isinstance(answer, int):
                raise _refused(answer, path)
            return answer

        return read


def _only(
    places: Sequence[tuple[int, Layout]], read: Read, library: Mapped, newest: int | None
) -> tuple[tuple[int, Layout], RankRecords]:
    """The one of these that is a recorder in all that it holds. Raises UnreadableError where there is none, or more."""
    errors, found = [], []
    for address, layout in places:
        try:
            found.append(
                ((address, layout), decode.read(read, address, layout, library.library, time.time, newest=newest))
            )
        except UnreadableError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    if len(found) > 1:
        raise UnreadableError("UnknownLayout", f"{len(found)} objects or layouts fit, and only one can be right")
    return found[0]


def _unused(library: Mapped, candidates: Sequence[Layout], version: str) -> RankRecords:
    return RankRecords(
        library=library.library,
        records=(),
        next_id=0,
        oldest_id=0,
        is_wrapped=False,
        capacity=0,
        torch_version=version,
        layout=candidates[0].name if len(candidates) == 1 else "",
        read_unix_seconds=time.time(),
    )


def _refused(number: int, path: Path) -> UnreadableError:
    """What an error of open(2) means; EBUSY is that of `memory`."""
    if number == errno.EBUSY:
        return UnreadableError("NoAnswer", f"{path} gives no answer")
    fault = pseudo_files.fault_of(OSError(number, os.strerror(number)), str(path), str(path))
    return (
        UnreadableError(fault.reason, fault.detail)
        if fault
        else UnreadableError("ProcessGone", "the process has ended")
    )


def _fault(subject: str, why: UnreadableError) -> Fault:
    remedies = {"PermissionDenied": "run as root, or grant CAP_SYS_PTRACE", "RecorderOff": _TURN_ON}
    about: Literal["target", "tool"] = "target" if why.reason == "ProcessGone" else "tool"
    return Fault(
        subject=subject, reason=why.reason, detail=why.detail, remedy=remedies.get(why.reason, ""), about=about
    )


SHARED = Recorders()
