"""Sequence numbers of the ranks of open incidents, by which rules over all nodes tell who has not come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from hangwatch.metrics import collective_progress
from hangwatch.metrics.series import JOB, gauge, yes
from hangwatch.state.board import JobEntry, Snapshot

COLLECTIVES_OF_A_JOB = 2048  # ranks times groups, each of two series at most
COLLECTIVES_OF_AN_OWNER = 4096
COLLECTIVES_OF_A_NODE = 16384


def numbers(snapshot: Snapshot) -> Iterator[Metric]:
    """Sequence numbers of the ranks of open incidents, by which rules over all nodes tell who has not come."""
    of_rank = (*JOB, "rank", "group")
    stance = ("stance", "has_open")
    number = gauge(
        "rank_collective_number",
        "Number of the newest collective that a rank of a job with an open incident has enqueued in a group",
        (*of_rank, *stance, "generation"),
    )
    waited = gauge("rank_collective_waited_number", "Number of the collective that the rank waits in", of_rank)
    unseen = gauge(
        "rank_collective_unseen_since_timestamp_seconds",
        "A rank without a record in the default group; since when it would show one, 0 for always",
        (*of_rank, *stance),
    )
    collective = gauge(
        "job_collective_ranks",
        "Ranks on this node that wait in a collective, or whose newest one it is",
        (*JOB, "group", "description", "number", "operation", "waits"),
    )
    since = gauge(
        "job_collective_waited_since_timestamp_seconds",
        "When the first rank on this node enqueued what it waits in, of each group",
        (*JOB, "group"),
    )
    left_out = gauge("job_collective_left_out", "Ranks times groups that are over the bounds, and have no series", JOB)
    for entry, found in _reached(snapshot):
        name = tuple(entry.job.name.labels.values())
        for one in found.reached:
            rank = (*name, str(one.place.rank), one.group)
            number.add_metric([*rank, *_place(one.place), str(one.generation)], one.number)
            if one.waits_in is not None:
                waited.add_metric(rank, one.waits_in.number)
        for other in found.unseen:
            labels = [*name, str(other.place.rank), other.group, *_place(other.place)]
            unseen.add_metric(labels, other.since_unix_seconds)
        for met, count in collective_progress.collectives(found.reached).items():
            labels = [*name, met.group, met.description, str(met.number), met.operation, yes(met.waits)]
            collective.add_metric(labels, count)
        for group, unix_seconds in collective_progress.waited_since(found.reached).items():
            since.add_metric([*name, group], unix_seconds)
        left_out.add_metric(name, found.left_out)
    yield from (number, waited, unseen, collective, since, left_out)


def _place(place: collective_progress.Place) -> tuple[str, str]:
    return place.stance, yes(place.has_open)


def _reached(snapshot: Snapshot) -> Iterator[tuple[JobEntry, collective_progress.Found]]:
    """Of each job with an open incident; owners share what one node may show, and each job what its owner may."""
    entries = [entry for entry in snapshot.jobs.values() if entry.open_incident is not None]
    jobs_of = Counter(entry.job.share for entry in entries)
    for entry in entries:
        of_owner = min(COLLECTIVES_OF_AN_OWNER, COLLECTIVES_OF_A_NODE // len(jobs_of))
        of_job = min(COLLECTIVES_OF_A_JOB, of_owner // jobs_of[entry.job.share])
        if entry.open_incident is not None:
            yield entry, collective_progress.found(entry.open_incident.grouping, of_job)
