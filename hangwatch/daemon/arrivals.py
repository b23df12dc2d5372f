"""The task that reads when the ranks of each job enqueued their collectives, and names the rank that is late."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.capture.rank_load import read_load
from hangwatch.collectives import arrival
from hangwatch.collectives.arrival import ArrivalOrder, Window
from hangwatch.collectives.rank_differences import RankLoad, find_differences
from hangwatch.daemon.context import DaemonContext
from hangwatch.daemon.rank_counters import RankCounters
from hangwatch.model import Job, ProcessId
from hangwatch.probes.base.owner_turns import OwnerTurns
from hangwatch.state import steps

MOST_RANKS = 256  # of one job on this node
STALE_SECONDS = 600.0  # without a new collective the samples are dropped: the job hangs or rests
# Of one reading of all jobs; the next reading begins with the jobs that it omitted
MOST_SECONDS = 5.0


class _Samples(NamedTuple):
    """The samples of one job with these ranks, and the load of each rank at the last reading.

    Both times are CLOCK_MONOTONIC, seconds. `read_at`: the last reading. `grown_at`: the last with new collectives.
    """

    ranks: tuple[ProcessId, ...]
    window: Window = Window()
    order: ArrivalOrder | None = None
    read_at: float = 0.0
    grown_at: float = 0.0
    loads: Mapping[ProcessId, RankLoad] = {}


class ArrivalReader:
    """The arrival orders of the jobs on this node. It keeps the samples of `[progress] straggler_seconds`."""

    def __init__(self, common: DaemonContext, counters: RankCounters) -> None:
        self._common, self._counters = common, counters
        self._samples: dict[str, _Samples] = {}
        self._turns = OwnerTurns(common.clock)

    def read(self) -> None:
        """Read the new collectives of the ranks of every job with counters, and record the arrival orders."""
        clock = self._common.clock
        end, jobs, samples = clock() + MOST_SECONDS, dict[str, Job](), dict[str, _Samples]()
        for entry in self._common.board.snapshot.living:
            job, counted = entry.job, entry.watch.progress.ranks
            ranks = tuple(rank.id for rank in job.ranks if rank.id in counted)
            if 1 < len(ranks) <= MOST_RANKS:
                before = self._samples.get(job.key)
                samples[job.key] = before if before is not None and before.ranks == ranks else _Samples(ranks)
                jobs[job.key] = job
        oldest_first = sorted(samples, key=lambda key: samples[key].read_at)
        for key in self._turns.take(((jobs[key].share or jobs[key].owner, key) for key in oldest_first), end):
            samples[key] = self._add_reading(samples[key], jobs[key], end)
        self._samples = samples
        orders = {key: each.order for key, each in samples.items() if each.order is not None}
        self._common.board.put(steps.record_arrival_orders, orders)

    def _add_reading(self, samples: _Samples, job: Job, end: float) -> _Samples:
        """Return the samples with a reading of all ranks. If a rank cannot be read before `end`, it does not count."""
        now, seconds = self._common.clock(), self._common.settings.progress.straggler_seconds
        window, is_stale = samples.window, now - samples.grown_at > STALE_SECONDS
        by_rank = {}
        for rank in samples.ranks:
            collectives = (
                self._counters.read_collectives(rank, job.share or job.owner) if self._common.clock() < end else []
            )
            if not collectives:
                return samples._replace(read_at=now, order=None if is_stale else samples.order)
            by_rank[rank] = collectives
        kept = window._replace(readings=()) if is_stale else window
        new = arrival.add_reading(kept, by_rank, seconds)
        sweep, root = self._common.board.snapshot.sweep, self._common.proc_root
        loads = {rank.id: read_load(rank, sweep, root) for rank in job.ranks if rank.id in by_rank}
        order = arrival.judge(new, seconds)
        if order.named is not None:
            order = replace(order, differences=find_differences(samples.loads, loads, order.named))
        grown_at = now if new.last_used != window.last_used else samples.grown_at
        return _Samples(samples.ranks, new, order, now, grown_at, loads)
