"""Add the variables that processes have set after their start to a scan.

Only candidates are read, see `live_environ`: processes without a rank, a world size and a rendezvous address in their
initial environment, which hold a GPU, have the title of a known worker, or map PyTorch or JAX. They are read again,
with growing pauses, until they have all three.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from hangwatch.model import Process
from hangwatch.probes.base.owner_turns import GrowingPause, order_by_turns
from hangwatch.probes.base.procfs import FRAMEWORK_MAPPED_BYTES, PROC, read_mapped_bytes
from hangwatch.probes.process.live_environ import LiveEnvironments, Modules, Place
from hangwatch.tables import launchers

_HELPER_COMM = "pt_data_worker"


class LateEnvironments:
    """The processes of a node that may set their rank late, and the variables that each has set so far."""

    def __init__(self, proc_root: Path = PROC) -> None:
        self._root = proc_root
        self._live = LiveEnvironments(proc_root)
        self._candidates: dict[int, _Candidate] = {}

    def add_to(
        self,
        scanned: Iterable[tuple[Process, int | str]],
        gpu_pids: Collection[int],
        owner_of: Callable[[Process], str],
        seconds: float,
    ) -> dict[int, Process]:
        """Return the processes that have set variables, by pid, with all their variables.

        `scanned` are the processes for which `may_set_rank` is true, each with a value that changes at execve(2).
        Reading takes about `seconds`. Owners take turns, and processes with a GPU come first.
        """
        now = time.monotonic()
        earlier_candidates, self._candidates = self._candidates, {}
        due = []
        for process, program in scanned:
            pid = process.id.pid
            candidate = earlier_candidates.get(pid)
            if candidate is None or not candidate.is_of(process, program):
                candidate = _Candidate(process, program)
            candidate.source = process
            self._candidates[pid] = candidate
            if candidate.pause.due_monotonic_seconds <= now:
                due.append(candidate)
        places = {candidate.source.id: candidate.place for candidate in due if candidate.place is not None}
        unchanged = self._live.find_unchanged(places)
        due.sort(key=lambda candidate: candidate.pause.due_monotonic_seconds)
        owned = ((owner_of(candidate.source), candidate) for candidate in due)
        for owner, candidate in order_by_turns(owned, lambda each: each.source.id.pid in gpu_pids):
            if time.monotonic() > now + seconds:
                break
            candidate.pause = candidate.pause.begin(now)
            may_be_rank = self._may_be_rank(candidate, candidate.source.id.pid in gpu_pids)
            if may_be_rank and candidate.source.id not in unchanged:
                self._read(candidate, owner)
        return {pid: candidate.merged() for pid, candidate in self._candidates.items() if candidate.has_more}

    def _read(self, candidate: _Candidate, owner: str) -> None:
        process = candidate.source.id
        if candidate.place is None:
            place = self._live.find_place(process, candidate.modules, owner) if candidate.modules else None
            if place is None:
                return
            candidate.place = place
        answer = self._live.read(process, candidate.place, launchers.VARIABLES, launchers.SHOWN)
        if answer is not None:
            candidate.place, environment = answer
            candidate.variables = environment.variables
            if launchers.has_whole_slot(candidate.variables):  # complete: it is not read again
                candidate.pause = GrowingPause(float("inf"))

    def _may_be_rank(self, candidate: _Candidate, holds_gpu: bool) -> bool:
        """True for a candidate. Its maps are read until they show a library, but again only if it has mapped more."""
        process = candidate.source
        if process.comm == _HELPER_COMM:
            return False
        is_worker = holds_gpu or process.comm.startswith(launchers.TABLE.worker_titles)
        if candidate.modules is not None and candidate.modules.libraries:
            return True
        mapped_bytes = read_mapped_bytes(process.id.pid, self._root)
        if not is_worker and mapped_bytes < FRAMEWORK_MAPPED_BYTES:
            return False
        if candidate.modules is None or mapped_bytes > candidate.mapped_bytes:
            candidate.modules = self._live.find_modules(process.id) or candidate.modules
            candidate.mapped_bytes = mapped_bytes
        return candidate.modules is not None and (is_worker or bool(candidate.modules.libraries))


def may_set_rank(process: Process) -> bool:
    """True for a Python program without a rank, a world size and a rendezvous address in its initial environment."""
    if launchers.has_whole_slot(process.environ):
        return False
    names = (*launchers.TABLE.python_comms, *launchers.TABLE.worker_titles)
    return process.is_python is True or process.comm.startswith(names)


@dataclass
class _Candidate:
    """A process that may set its rank, with its variables as last read. `source` is the process as scanned."""

    source: Process
    program: int | str
    modules: Modules | None = None
    mapped_bytes: int = 0
    place: Place | None = None
    pause: GrowingPause = field(default_factory=GrowingPause)
    variables: Mapping[str, str] = field(default_factory=dict)

    def is_of(self, process: Process, program: int | str) -> bool:
        """True if this is the same process, and it has not executed another program."""
        return program == self.program and (process is self.source or process.id == self.source.id)

    @property
    def has_more(self) -> bool:
        """True if its variables or libraries are known."""
        return bool(self.variables) or bool(self.modules and self.modules.libraries)

    def merged(self) -> Process:
        """Return the process with its libraries and all its variables, those of now before those of its start."""
        libraries = self.modules.libraries if self.modules else ()
        return replace(self.source, environ={**self.source.environ, **self.variables}, libraries=libraries)
