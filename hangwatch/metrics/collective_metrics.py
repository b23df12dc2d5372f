"""Metrics of collectives: sequence numbers. With them, alert rules over all nodes find ranks that have not joined."""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

from hangwatch.metrics import collective_progress
from hangwatch.metrics.series import JOB, gauge, yes_or_no
from hangwatch.state.board import JobEntry, Snapshot

COLLECTIVES_OF_A_JOB = 2048  # ranks times groups, with at most three series each
COLLECTIVES_OF_AN_OWNER = 4096
COLLECTIVES_OF_A_NODE = 16384


def numbers(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the sequence numbers of the ranks of open incidents."""
    jobs = [(tuple(entry.job.name.labels.values()), progress) for entry, progress in _progress(snapshot)]
    yield from _of_ranks(jobs)
    yield from _of_jobs(jobs)


def _of_ranks(jobs: Iterable[tuple[tuple[str, ...], collective_progress.JobProgress]]) -> Iterator[Metric]:
    of_rank, stance = (*JOB, "rank", "group"), ("stance", "has_open")
    number = gauge(
        "rank_collective_number",
        "Number of the newest collective in the default group, of a rank that does not wait in a collective",
        of_rank,
    )
    waited = gauge("rank_collective_waited_number", "Number of the collective in which the rank waits", of_rank)
    waited_together = gauge(
        "job_collective_waited_number",
        "Number of the collective in which `rank` waits, and up to seven `more_ranks` on this node",
        (*of_rank, "more_ranks"),
    )
    unseen = gauge(
        "rank_collective_unseen_since_timestamp_seconds",
        "For a rank without a record in the default group: start of its complete records, 0 if no record was lost",
        (*of_rank, *stance),
    )
    together = gauge(
        "job_collective_number",
        "Number of the newest collective of `rank`, and of up to seven `more_ranks` on this node with the same labels; "
        '`waited_here` is "no" if no rank on this node waits in the group, which is not the default group',
        (*of_rank, *stance, "generation", "waited_here", "more_ranks"),
    )
    for name, progress in jobs:
        waiters = [reached for reached in progress.reached if reached.waits_in is not None]
        for reached in progress.reached:
            labels = [*name, str(reached.place.rank), reached.group]
            if reached.is_default and reached.place.stance != "waits":
                number.add_metric(labels, reached.number)
            if reached.waits_in is not None:
                waited.add_metric(labels, reached.waits_in.number)
        for reached, more_ranks in collective_progress.merge_ranks(waiters, "waits_in.number"):
            if reached.waits_in is not None:
                labels = [*name, str(reached.place.rank), reached.group, more_ranks]
                waited_together.add_metric(labels, reached.waits_in.number)
        for other in progress.unseen:
            labels = [*name, str(other.place.rank), other.group, *_place(other.place)]
            unseen.add_metric(labels, other.since_unix_seconds)
        groups = {reached.group for reached in waiters}
        for reached, more_ranks in collective_progress.merge_ranks(
            progress.reached, "place.stance", "place.has_open", "generation", "number"
        ):
            labels = [*name, str(reached.place.rank), reached.group, *_place(reached.place), str(reached.generation)]
            is_waited_here = reached.is_default or reached.group in groups
            together.add_metric([*labels, yes_or_no(is_waited_here), more_ranks], reached.number)
    yield from (number, waited, waited_together, unseen, together)


def _of_jobs(jobs: Iterable[tuple[tuple[str, ...], collective_progress.JobProgress]]) -> Iterator[Metric]:
    collective = gauge(
        "job_collective_ranks",
        "Ranks on this node that wait in this collective, or have it as their newest collective",
        (*JOB, "group", "description", "number", "operation", "waits"),
    )
    used = gauge("job_collective_used_ranks", "Ranks on this node that have used the default group", (*JOB, "group"))
    waiting = gauge("job_collective_waiting_ranks", "Ranks on this node that wait in a collective of any group", JOB)
    since = gauge(
        "job_collective_waited_since_timestamp_seconds",
        "Time at which the first waiting rank on this node enqueued its collective, by group",
        (*JOB, "group"),
    )
    left_out = gauge("job_collective_left_out", "Pairs of rank and group without series because of a limit", JOB)
    for name, progress in jobs:
        for key, count in collective_progress.count_collectives(progress.reached).items():
            labels = [*name, key.group, key.description, str(key.number), key.operation, yes_or_no(key.waits)]
            collective.add_metric(labels, count)
        for group, count in collective_progress.count_used(progress.reached).items():
            used.add_metric([*name, group], count)
        waiting.add_metric(name, collective_progress.count_waiting(progress.reached))
        for group, unix_seconds in collective_progress.waited_since(progress.reached).items():
            since.add_metric([*name, group], unix_seconds)
        left_out.add_metric(name, progress.left_out)
    yield from (collective, used, waiting, since, left_out)


def _place(place: collective_progress.RankStance) -> tuple[str, str]:
    return place.stance, yes_or_no(place.has_open)


def _progress(snapshot: Snapshot) -> Iterator[tuple[JobEntry, collective_progress.JobProgress]]:
    """Yield each job with an open incident, and its progress. Owners and their jobs get equal parts of the limit."""
    entries = [entry for entry in snapshot.jobs.values() if entry.open_incident is not None]
    jobs_of = Counter(entry.job.share for entry in entries)
    for entry in entries:
        of_owner = min(COLLECTIVES_OF_AN_OWNER, COLLECTIVES_OF_A_NODE // len(jobs_of))
        of_job = min(COLLECTIVES_OF_A_JOB, of_owner // jobs_of[entry.job.share])
        if entry.open_incident is not None:
            yield entry, collective_progress.find_progress(entry.open_incident.grouping, of_job)
