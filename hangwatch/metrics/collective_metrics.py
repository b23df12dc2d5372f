"""Metrics of collectives: sequence numbers. With them, alert rules over all nodes find ranks that have not joined."""

from collections import Counter
from collections.abc import Iterator

from hangwatch.metrics import collective_progress
from hangwatch.metrics.collective_progress import JobProgress
from hangwatch.metrics.series import Series, name_labels, yes_or_no
from hangwatch.state.board import JobEntry, Snapshot

COLLECTIVES_OF_A_JOB = 2048  # ranks times groups, with at most three series each
COLLECTIVES_OF_AN_OWNER = 4096
COLLECTIVES_OF_A_NODE = 16384


def add_numbers(series: Series, snapshot: Snapshot) -> None:
    """Add the sequence numbers of the ranks of open incidents."""
    for entry, progress in _progress(snapshot):
        _add_ranks(series, name_labels(entry.job.name), progress)
        _add_job(series, name_labels(entry.job.name), progress)


def _add_ranks(series: Series, name: tuple[str, ...], progress: JobProgress) -> None:
    waiters = [reached for reached in progress.reached if reached.waits_in is not None]
    for reached in progress.reached:
        labels = (*name, str(reached.place.rank), reached.group)
        if reached.is_default and reached.place.stance != "waits":
            series.add("rank_collective_number", labels, reached.number)
        if reached.waits_in is not None:
            series.add("rank_collective_waited_number", labels, reached.waits_in.number)
    for reached, more_ranks in collective_progress.merge_ranks(waiters, "waits_in.number"):
        if reached.waits_in is not None:
            labels = (*name, str(reached.place.rank), reached.group)
            series.add("job_collective_waited_number", (*labels, more_ranks), reached.waits_in.number)
    for other in progress.unseen:
        labels = (*name, str(other.place.rank), other.group, *_place(other.place))
        series.add("rank_collective_unseen_since_timestamp_seconds", labels, other.since_unix_seconds)
    groups = {reached.group for reached in waiters}
    for reached, more_ranks in collective_progress.merge_ranks(
        progress.reached, "place.stance", "place.has_open", "generation", "number"
    ):
        labels = (*name, str(reached.place.rank), reached.group, *_place(reached.place), str(reached.generation))
        is_waited_here = reached.is_default or reached.group in groups
        series.add("job_collective_number", (*labels, yes_or_no(is_waited_here), more_ranks), reached.number)


def _add_job(series: Series, name: tuple[str, ...], progress: JobProgress) -> None:
    for key, count in collective_progress.count_collectives(progress.reached).items():
        labels = (*name, key.group, key.description, str(key.number), key.operation, yes_or_no(key.waits))
        series.add("job_collective_ranks", labels, count)
    for group, count in collective_progress.count_used(progress.reached).items():
        series.add("job_collective_used_ranks", (*name, group), count)
    series.add("job_collective_waiting_ranks", name, collective_progress.count_waiting(progress.reached))
    for group, unix_seconds in collective_progress.waited_since(progress.reached).items():
        series.add("job_collective_waited_since_timestamp_seconds", (*name, group), unix_seconds)
    series.add("job_collective_left_out", name, progress.left_out)


def _place(place: collective_progress.RankStance) -> tuple[str, str]:
    return place.stance, yes_or_no(place.has_open)


def _progress(snapshot: Snapshot) -> Iterator[tuple[JobEntry, JobProgress]]:
    """Yield each job with an open incident, and its progress. Owners and their jobs get equal parts of the limit."""
    entries = [entry for entry in snapshot.jobs.values() if entry.open_incident is not None]
    jobs_of = Counter(entry.job.share for entry in entries)
    for entry in entries:
        of_owner = min(COLLECTIVES_OF_AN_OWNER, COLLECTIVES_OF_A_NODE // len(jobs_of))
        of_job = min(COLLECTIVES_OF_A_JOB, of_owner // jobs_of[entry.job.share])
        if entry.open_incident is not None:
            yield entry, collective_progress.find_progress(entry.open_incident.grouping, of_job)
