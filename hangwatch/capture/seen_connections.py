"""Count the connections between the ranks of a job at each scan, so that a later capture shows a disconnected rank."""

import time
from collections.abc import Sequence

from msgspec.structs import replace

from hangwatch.jobs import process_role
from hangwatch.model import Job, ProcessId
from hangwatch.probes.network.sockets import Connection, Tables


class SeenConnections:
    """The highest number of connections to other ranks or to the store that any scan has seen, for each rank."""

    def __init__(self) -> None:
        self._most: dict[ProcessId, int] = {}

    def add_counts(self, jobs: Sequence[Job], tables: Tables, budget_seconds: float) -> tuple[Job, ...]:
        """Return the jobs with `most_peers` of each rank. Jobs not reached in time keep their last counts."""
        end = time.monotonic() + budget_seconds
        kept = {rank.id: self._most.get(rank.id, 0) for job in jobs for rank in job.ranks}
        for job in jobs:
            if (job.world_size or 0) > 1 and time.monotonic() < end:
                for process, count in _count_peers(job, tables).items():
                    kept[process] = max(kept[process], count)
        self._most = kept
        return tuple(
            replace(job, ranks=tuple(replace(rank, most_peers=kept[rank.id]) for rank in job.ranks)) for job in jobs
        )


def _count_peers(job: Job, tables: Tables) -> dict[ProcessId, int]:
    """Count the connections of each rank to other ranks, as in `Waits.peers`."""
    processes = (*(rank.id for rank in job.ranks), *job.launcher_ids)
    held = {process: [one for one in tables.read_held(process.pid) if one.is_open] for process in processes}
    ends = {one.local: process for process, each in held.items() for one in each}
    _, port = process_role.rendezvous(job.environ)

    def is_peer(process: ProcessId, connection: Connection) -> bool:
        local, remote = connection.local, connection.remote
        if ends.get(remote) == process:
            return False
        return job.has_ranks_on_other_nodes or str(remote[1]) == port or remote in ends or remote[0] == local[0]

    return {rank.id: sum(is_peer(rank.id, one) for one in held[rank.id]) for rank in job.ranks}
