"""Progress counters of all monitored ranks. One task reads them, one finds recorders, and one takes the newest."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from hangwatch.collectives.arrival import Enqueued, list_collectives
from hangwatch.config import Settings
from hangwatch.model import Fault, ProcessId
from hangwatch.model.flight_records import ProgressCounter, RankRecords
from hangwatch.probes import torch_recorder
from hangwatch.probes.base import procfs
from hangwatch.probes.torch_recorder.progress_counters import ProgressCounters
from hangwatch.state.board import Board

OLD_SECONDS = 10.0  # older counters are not used: they would look as if all jobs stood still


class RankCounters:
    """The newest progress counters of the ranks of this node. `clock` is CLOCK_MONOTONIC in seconds."""

    def __init__(self, settings: Settings, proc_root: Path, clock: Callable[[], float]) -> None:
        self._recorders = torch_recorder.SHARED if proc_root == procfs.PROC else torch_recorder.Recorders(proc_root)
        self._counters = ProgressCounters(self._recorders, proc_root, clock)
        self._clock = clock
        self._oldest_seconds = max(OLD_SECONDS, 3 * settings.gpu.sample_seconds)
        self._latest: tuple[float, Mapping[ProcessId, ProgressCounter | Fault]] = (-math.inf, {})

    def read(self, board: Board) -> None:
        """Read the counters of all ranks on the board."""
        began = self._clock()
        jobs = (entry.job for entry in board.snapshot.living)
        self._counters.follow({rank.id: job.share or job.owner for job in jobs for rank in job.ranks})
        self._latest = began, self._counters.read()

    def look(self) -> None:
        """Find the recorders of new ranks, and the threads that use their groups."""
        self._counters.look()

    def latest(self) -> Mapping[ProcessId, ProgressCounter | Fault]:
        """Return the newest counters; empty if they are too old, and before the first reading."""
        read_at, counters = self._latest
        return counters if self._clock() - read_at <= self._oldest_seconds else {}

    def read_collectives(self, rank: ProcessId, owner: str) -> list[Enqueued]:
        """Return the collectives in the recorders of a rank, of the groups that count; empty if it is not readable."""
        uncounted = self._counters.uncounted_groups(rank)
        return [
            collective
            for recorder in self._recorders.read(rank, owner)
            if isinstance(recorder, RankRecords)
            for collective in list_collectives(
                recorder, [group_id for library, group_id in uncounted if library == recorder.library]
            )
        ]
