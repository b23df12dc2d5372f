"""The task that reads when the ranks of each job enqueued their collectives, and names the rank that is late."""

from __future__ import annotations

from typing import NamedTuple

from hangwatch.collectives import arrival
from hangwatch.collectives.arrival import Window
from hangwatch.daemon.context import DaemonContext
from hangwatch.daemon.rank_counters import RankCounters
from hangwatch.model import ProcessId
from hangwatch.state import steps

MOST_RANKS = 256  # of one job on this node
STALE_SECONDS = 600.0  # without a new collective the samples are dropped: the job hangs or rests
MOST_SECONDS = 5.0  # of one reading of all jobs; the next reading begins with the jobs that it omitted


class _Samples(NamedTuple):
    """The samples of one job with these ranks. Both times are CLOCK_MONOTONIC, seconds.

    `read_at`: the last reading. `grown_at`: the last reading with new collectives.
    """

    ranks: tuple[ProcessId, ...]
    window: Window = Window()
    read_at: float = 0.0
    grown_at: float = 0.0


class ArrivalReader:
    """The arrival orders of the jobs on this node. It keeps the samples of `[progress] straggler_seconds`."""

    def __init__(self, common: DaemonContext, counters: RankCounters) -> None:
        self._common, self._counters = common, counters
        self._samples: dict[str, _Samples] = {}

    def read(self) -> None:
        """Read the new collectives of the ranks of every job with counters, and record the arrival orders."""
        clock, seconds = self._common.clock, self._common.settings.progress.straggler_seconds
        end, owners, samples = clock() + MOST_SECONDS, dict[str, str](), dict[str, _Samples]()
        for entry in self._common.board.snapshot.living:
            job, counted = entry.job, entry.watch.progress.ranks
            ranks = tuple(rank.id for rank in job.ranks if rank.id in counted)
            if 1 < len(ranks) <= MOST_RANKS:
                before = self._samples.get(job.key)
                samples[job.key] = before if before is not None and before.ranks == ranks else _Samples(ranks)
                owners[job.key] = job.share or job.owner
        for key in sorted(samples, key=lambda key: samples[key].read_at):
            if clock() >= end:
                break
            samples[key] = self._add_reading(samples[key], owners[key], end)
        self._samples = samples
        orders = {key: arrival.judge(each.window, seconds) for key, each in samples.items() if each.read_at}
        self._common.board.put(steps.record_arrival_orders, orders)

    def _add_reading(self, samples: _Samples, owner: str, end: float) -> _Samples:
        """Return the samples with a reading of all ranks. If a rank cannot be read before `end`, it does not count."""
        clock, before = self._common.clock, samples.window
        samples = samples._replace(read_at=clock())
        if samples.read_at - samples.grown_at > STALE_SECONDS:
            samples = samples._replace(window=before._replace(readings=()))
        by_rank = {}
        for rank in samples.ranks:
            collectives = self._counters.read_collectives(rank, owner) if clock() < end else []
            if not collectives:
                return samples
            by_rank[rank] = collectives
        window = arrival.add_reading(samples.window, by_rank, self._common.settings.progress.straggler_seconds)
        has_grown = window.last_used != before.last_used
        return samples._replace(window=window, grown_at=samples.read_at if has_grown else samples.grown_at)
