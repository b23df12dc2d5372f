"""Find out if a job uses PyTorch or JAX: by the libraries that its first rank maps.

A rank maps them some time after its start. So its maps are read again, with growing pauses, until one is found.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.model import Job, ProcessId
from hangwatch.probes.base.growing_pause import GrowingPause
from hangwatch.probes.process.live_environ import LiveEnvironments


class _Known(NamedTuple):
    libraries: tuple[str, ...] | None = None
    pause: GrowingPause = GrowingPause()


class JobLibraries:
    """The libraries of the jobs of a node, by the first rank of each job."""

    def __init__(self, proc_root: Path) -> None:
        self._live = LiveEnvironments(proc_root)
        self._known: dict[ProcessId, _Known] = {}

    def add_to(self, jobs: Sequence[Job], budget_seconds: float) -> tuple[Job, ...]:
        """Return the jobs with their libraries. Those of jobs that are not reached in `budget_seconds` stay unknown."""
        now, lacking = time.monotonic(), {job.ranks[0].id for job in jobs if job.ranks and not job.libraries}
        self._known = {process: self._known.get(process, _Known()) for process in lacking}
        for process, known in sorted(self._known.items(), key=lambda item: item[1].pause.due_monotonic_seconds):
            is_due = not known.libraries and known.pause.due_monotonic_seconds <= now
            if is_due and time.monotonic() < now + budget_seconds:
                self._known[process] = _Known(self._live.find_libraries(process), known.pause.begin(now))
        found = {process: known.libraries for process, known in self._known.items() if known.libraries is not None}
        return tuple(
            replace(job, libraries=found[job.ranks[0].id]) if job.ranks and job.ranks[0].id in found else job
            for job in jobs
        )
