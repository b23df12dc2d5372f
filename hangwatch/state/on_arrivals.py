"""Step of the board for the arrival orders of the jobs: which rank enqueues its collectives late."""

from collections.abc import Mapping

from msgspec.structs import replace

from hangwatch.collectives.arrival import ArrivalOrder
from hangwatch.state.board import Snapshot


def record_arrival_orders(snapshot: Snapshot, orders: Mapping[str, ArrivalOrder]) -> Snapshot:
    """Record the arrival order of every living job, by `Job.key`. A job without one loses its earlier one.

    It never changes the state of a job.
    """
    for entry in snapshot.living:
        snapshot = snapshot.with_job(replace(entry, arrival_order=orders.get(entry.job.key)))
    return snapshot
