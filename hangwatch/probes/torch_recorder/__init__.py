"""Read PyTorch's flight recorder from the memory of a running process.

Nothing is set in the job, and nothing is paused. A static pointer in libtorch leads to the recorder. From 2.15 on a
registry leads to those of further backends. Both are found by symbols of the library (`symbols`), or the recorder by
its shape (`search`, which also reads the registry). The offsets of the fields come from a table by version (`layouts`).
They are accepted only if all values are plausible (`decode`). Reading requires the right of ptrace(2). It works on a
rank in any state.
"""

import platform
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar
from weakref import WeakValueDictionary

from msgspec.structs import replace

from hangwatch.model import Fault, ProcessId
from hangwatch.model.flight_records import Library, RankRecords
from hangwatch.probes.base import procfs
from hangwatch.probes.base.pseudo_files import PAGE_BYTES
from hangwatch.probes.process import process_memory
from hangwatch.probes.process.memory_image import Read, UnreadableError, require
from hangwatch.probes.process.process_memory import MOST_MAPS_BYTES
from hangwatch.probes.torch_recorder import decode, layouts, libraries, search, symbols, threads
from hangwatch.probes.torch_recorder.layouts import Layout
from hangwatch.probes.torch_recorder.libraries import Mapped, Mappings

MOST_SECONDS = 5.0  # for one process, without the symbols of its library
MOST_KNOWN = 4096
MACHINES = frozenset({"x86_64", "AMD64"})
_TURN_ON = "set TORCH_FR_BUFFER_SIZE=2000 in the job (TORCH_NCCL_TRACE_BUFFER_SIZE=2000 before torch 2.11)"

_Key = TypeVar("_Key")
_Known = TypeVar("_Known")


class Recorders:
    """A reader of the flight recorders of processes of this node.

    It caches the addresses that a search found, and the parts of recorders that do not change.
    """

    def __init__(self, proc_root: Path = procfs.PROC) -> None:
        self._proc_root = proc_root
        self._lock = threading.Lock()
        self._owner_locks = WeakValueDictionary[str, threading.Lock]()
        self._places_by_shape: dict[tuple[ProcessId, int], tuple[int, Layout]] = {}
        self._places: dict[ProcessId, dict[Library, tuple[int, Layout]]] = {}
        self._lasting: dict[ProcessId, tuple[RankRecords | Fault, ...]] = {}

    def unchanging_part(self, process: ProcessId) -> tuple[RankRecords | Fault, ...] | None:
        """Return the unchanging part of an earlier result of `read`, without records; None before it is final.

        It is final for a recorder with capacity, or one that is off: torch creates it once, at the first operation.
        """
        with self._lock:
            return self._lasting.get(process)

    def places(self, process: ProcessId) -> dict[Library, tuple[int, Layout]]:
        """Return the address and layout of each recorder that `read` has found in this process."""
        with self._lock:
            return dict(self._places.get(process, {}))

    def read(self, process: ProcessId, share: str = "", newest: int | None = None) -> tuple[RankRecords | Fault, ...]:
        """Return the content of each recorder of a process, or a fault; never empty.

        With `newest`, the result has the oldest operation, the open operations, and this number of completed operations
        per group. This takes a tenth of the time. `share` is the user or pod that a child reading the library or memory
        counts for. A recorder that was never used is empty with capacity 0.

        Reasons of a fault: NoTorch, NoRecorder (a version or build without one), RecorderOff, RecorderUnread (it has
        process groups, and no recorder of them is known), UnknownLayout, ChangedWhileRead, TooLarge, PermissionDenied,
        NoAnswer, ProcessGone.
        """
        with self._lock:
            lock_of_owner = self._owner_locks.setdefault(share, threading.Lock())
        with lock_of_owner:  # a capture of many ranks leaves time to captures of other owners
            contents = self._read(process, share, newest)
        if any(each.reason == "RecorderOff" if isinstance(each, Fault) else each.capacity for each in contents):
            empty = (
                each if isinstance(each, Fault) else replace(each, records=(), groups=(), members=())
                for each in contents
            )
            self._keep(self._lasting, process, tuple(empty))
        return contents

    def _read(self, process: ProcessId, share: str, newest: int | None) -> tuple[RankRecords | Fault, ...]:
        subject = f"pid {process.pid}"
        try:
            mappings = self._mappings(process, share)
            if not mappings.libraries:
                raise UnreadableError("NoTorch", "it has not loaded torch")
            if platform.machine() not in MACHINES:
                raise UnreadableError("UnknownLayout", f"the layout on {platform.machine()} has not been measured")
        except UnreadableError as error:
            return (_fault(subject, error),)
        contents: dict[Library, RankRecords | Fault] = {}
        for library in mappings.libraries:
            try:
                contents |= self._read_library(library, mappings, process, share, newest)
            except UnreadableError as error:
                contents[library.library] = _fault(f"{subject} {library.library}", error)
        contents = self._tell_unread(process, contents)
        if not procfs.is_alive(process, self._proc_root):
            return (_fault(subject, UnreadableError("ProcessGone", "the process has ended")),)
        with_recorder = [
            answer for answer in contents.values() if not (isinstance(answer, Fault) and answer.reason == "NoRecorder")
        ]
        return tuple(with_recorder or contents.values())

    def _tell_unread(
        self, process: ProcessId, contents: dict[Library, RankRecords | Fault]
    ) -> dict[Library, RankRecords | Fault]:
        """Return the contents, with a fault RecorderUnread only for backends with groups in this process."""
        read = {"gloo" if name == "gloo" else "nccl" for name, content in contents.items() if not _is_empty(content)}
        unread = frozenset() if "nccl" in read else threads.find_communicators(process, self._proc_root) - read
        for name, content in {**dict.fromkeys(unread), **contents}.items():
            if isinstance(content, Fault) and content.reason == "RecorderUnread" and name not in unread:
                contents[name] = replace(content, reason="NoRecorder")
            elif not isinstance(content, Fault) and name in unread:
                error = UnreadableError("RecorderUnread", "it has process groups, and its recorder was never used")
                contents[name] = _fault(f"pid {process.pid} {name}", error)
        return contents

    def _mappings(self, process: ProcessId, share: str) -> Mappings:
        """Return the mappings of a process; empty, without reading them, if it maps too little to have loaded torch."""
        if not procfs.is_alive(process, self._proc_root):
            raise UnreadableError("ProcessGone", "the process has ended")
        if 0 < procfs.read_mapped_bytes(process.pid, self._proc_root) < procfs.FRAMEWORK_MAPPED_BYTES:
            return Mappings((), ())
        (maps,) = self._reader(process, "maps", share)([(0, MOST_MAPS_BYTES)])
        found = libraries.parse_maps(maps)
        if not found.libraries and len(maps) >= MOST_MAPS_BYTES:
            raise UnreadableError("TooLarge", f"it has more than {MOST_MAPS_BYTES >> 20} MiB of mappings")
        return found

    def _read_library(
        self, library: Mapped, mappings: Mappings, process: ProcessId, share: str, newest: int | None
    ) -> dict[Library, RankRecords | Fault]:
        """Return the content of the recorders of one library. Raises UnreadableError if it has none."""
        (page,) = self._reader(process, "mem", share)([(library.start, PAGE_BYTES)])
        from_symbols = symbols.SHARED.look_up(library, page, process, share, self._proc_root)
        read = self._reader(process, "mem", share)  # a new deadline: the child's time does not count
        candidates = layouts.candidates(from_symbols.version)
        if from_symbols.pointer is not None:
            contents: dict[Library, RankRecords | Fault] = {}
            for name, address in _addresses(read, library, from_symbols).items():
                try:
                    if not address:
                        contents[name] = RankRecords(
                            library=name,
                            records=(),
                            next_id=0,
                            oldest_id=0,
                            is_wrapped=False,
                            capacity=0,
                            torch_version=from_symbols.version,
                            layout=candidates[0].name if len(candidates) == 1 else "",
                            read_unix_seconds=time.time(),
                        )
                        continue
                    places = [(address, layout) for layout in candidates]
                    place, records = _decode_only_recorder(places, read, name, newest)
                    self._keep(self._places, process, self.places(process) | {name: place})
                    contents[name] = replace(records, torch_version=from_symbols.version)
                except UnreadableError as error:
                    if error.reason == "UnknownLayout" and not layouts.is_known(from_symbols.version):
                        error = _unread(error.detail, from_symbols.version)
                    contents[name] = _fault(f"pid {process.pid} {name}", error)
            return contents
        key = process, library.start
        with self._lock:
            earlier_place = self._places_by_shape.pop(key, None)
        places = [earlier_place] if earlier_place else search.search(read, library.data, mappings.writable, candidates)
        if not places and from_symbols.is_late:
            detail = f"reading {library.path} took too long, or reading another file of its owner did"
            raise UnreadableError("NoAnswer", detail)
        if not places:
            if not layouts.is_recorded(library.library, from_symbols.version):
                raise UnreadableError("NoRecorder", f"torch {from_symbols.version} has none for {library.library}")
            detail = f"no object in {library.path} has the shape of an active flight recorder"
            raise _unread(detail, from_symbols.version)
        place, records = _decode_only_recorder(places, read, library.library, newest)
        self._keep(self._places_by_shape, key, place)
        self._keep(self._places, process, self.places(process) | {library.library: place})
        return {library.library: replace(records, torch_version=from_symbols.version, found_by="shape")}

    def _keep(self, cache: dict[_Key, _Known], key: _Key, value: _Known) -> None:
        with self._lock:
            if len(cache) >= MOST_KNOWN:
                cache.clear()
            cache[key] = value

    def _reader(self, process: ProcessId, name: str, share: str) -> Read:
        return process_memory.reader(self._proc_root / str(process.pid) / name, MOST_SECONDS, share)


def _addresses(read: Read, library: Mapped, from_symbols: symbols.Symbols) -> dict[Library, int]:
    """Return the address of the recorder of each backend; 0 if it was never used. Raises UnreadableError."""
    (raw,) = read([(library.start + (from_symbols.pointer or 0), 8)])
    require(len(raw) == 8, "its pointer leads to unmapped memory")
    own = {library.library: int.from_bytes(raw, "little")}
    if from_symbols.registry is None:
        return own
    return search.read_registry(read, library.start + from_symbols.registry) | own


def _decode_only_recorder(
    places: Sequence[tuple[int, Layout]], read: Read, library: Library, newest: int | None
) -> tuple[tuple[int, Layout], RankRecords]:
    """Return the only place that decodes as a recorder. Raises UnreadableError if none or several do."""
    errors, fitting = [], []
    for address, layout in places:
        try:
            fitting.append(((address, layout), decode.read(read, address, layout, library, time.time, newest=newest)))
        except UnreadableError as error:
            errors.append(error)
    if not fitting:
        raise errors[0]
    if len(fitting) > 1:
        raise UnreadableError("UnknownLayout", f"{len(fitting)} objects or layouts fit instead of one")
    return fitting[0]


def _is_empty(content: RankRecords | Fault) -> bool:
    is_absent = isinstance(content, Fault) and content.reason in ("NoRecorder", "RecorderUnread")
    return is_absent or (isinstance(content, RankRecords) and not content.capacity)


def _unread(detail: str, version: str) -> UnreadableError:
    """Return the error of a recorder that hangwatch cannot find or decode, with the version if it is unknown."""
    is_new = version != "" and not layouts.is_known(version)
    return UnreadableError("RecorderUnread", f"torch {version} is unknown: {detail}" if is_new else detail)


def _fault(subject: str, error: UnreadableError) -> Fault:
    remedies = {
        "PermissionDenied": "run as root, or grant CAP_SYS_PTRACE",
        "RecorderOff": _TURN_ON,
        "RecorderUnread": "install the newest hangwatch, or report this version of PyTorch",
    }
    about: Literal["target", "tool"] = "target" if error.reason == "ProcessGone" else "tool"
    return Fault(
        subject=subject, reason=error.reason, detail=error.detail, remedy=remedies.get(error.reason, ""), about=about
    )


SHARED = Recorders()
