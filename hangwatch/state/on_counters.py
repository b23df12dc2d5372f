"""Steps of the board for readings of the progress counters of all ranks, and for the arrival orders of jobs."""

from collections.abc import Mapping

from msgspec.structs import replace

from hangwatch import detector
from hangwatch.collectives.arrival import ArrivalOrder
from hangwatch.config import Detector, Progress
from hangwatch.detector import job_watch
from hangwatch.model import Fault, ProcessId
from hangwatch.model.flight_records import ProgressCounter
from hangwatch.state.actions import Action
from hangwatch.state.board import Snapshot
from hangwatch.state.incident_timeline import update_timeline


def record_counters(
    snapshot: Snapshot,
    counters: Mapping[ProcessId, ProgressCounter | Fault],
    *,
    now: float,
    unix_now: float,
    settings: Detector,
    progress: Progress,
    capture_seconds: float,
    gap_seconds: float,
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Record the counters, or the reasons why there are none, and apply them to the watch of every living job.

    `now` is CLOCK_MONOTONIC in seconds. `capture_seconds` and `gap_seconds`: see `detector.apply_counters`.
    """
    actions: list[Action] = []
    for entry in snapshot.living:
        readable = {
            rank.id: counter
            for rank in entry.job.ranks
            if isinstance(counter := counters.get(rank.id), ProgressCounter)
        }
        watch, wanted = detector.apply_counters(
            entry.watch,
            readable,
            [rank.id for rank in entry.job.ranks],
            now,
            settings,
            progress,
            capture_seconds=capture_seconds,
            gap_seconds=gap_seconds,
        )
        answers = (counters.get(rank.id) for rank in entry.job.ranks)
        faults = tuple(answer for answer in answers if isinstance(answer, Fault))
        stepped = replace(entry, watch=watch, page=job_watch.should_page(watch, now, settings), counter_faults=faults)
        stepped, more = update_timeline(stepped, wanted, unix_now)
        snapshot = snapshot.with_job(stepped)
        actions += more
    return snapshot, tuple(actions)


def record_arrival_orders(snapshot: Snapshot, orders: Mapping[str, ArrivalOrder]) -> Snapshot:
    """Record the arrival order of every living job, by `Job.key`. A job without one loses its earlier one.

    It never changes the state of a job.
    """
    for entry in snapshot.living:
        snapshot = snapshot.with_job(replace(entry, arrival_order=orders.get(entry.job.key)))
    return snapshot
