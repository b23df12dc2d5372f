"""Metrics of collectives: sequence numbers. With them, alert rules over all nodes find ranks that have not joined."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from hangwatch.checks.framework.contract import JOB, Metric, Metrics
from hangwatch.metrics import collective_progress
from hangwatch.metrics.collective_progress import GroupProgress, JobProgress, RankStance
from hangwatch.metrics.view import View, yes_or_no
from hangwatch.model import JobName

COLLECTIVES_OF_A_JOB = 2048  # ranks times groups, with at most three series each
COLLECTIVES_OF_AN_OWNER = 4096
COLLECTIVES_OF_A_NODE = 16384

_GROUP = ("rank", "group")
_STANCE = ("stance", "has_open")


class _JobNumbers(NamedTuple):
    job: JobName
    progress: JobProgress


def _list_numbers(view: View) -> Iterator[_JobNumbers]:
    """Yield the progress of each job with an open incident. Owners and their jobs get equal parts of the limit."""
    entries = [entry for entry in view.snapshot.jobs.values() if entry.open_incident is not None]
    jobs_of = Counter(entry.job.share for entry in entries)
    for entry in entries:
        of_owner = min(COLLECTIVES_OF_AN_OWNER, COLLECTIVES_OF_A_NODE // len(jobs_of))
        of_job = min(COLLECTIVES_OF_A_JOB, of_owner // jobs_of[entry.job.share])
        if entry.open_incident is not None:
            yield _JobNumbers(entry.job.name, collective_progress.find_progress(entry.open_incident.grouping, of_job))


def _place(place: RankStance) -> tuple[str, str]:
    return place.stance, yes_or_no(place.has_open)


def _name(reached: GroupProgress) -> tuple[str, str]:
    return str(reached.place.rank), reached.group


def _list_waiters(each: _JobNumbers) -> list[GroupProgress]:
    return [reached for reached in each.progress.reached if reached.waits_in is not None]


def _merge_waiters(each: _JobNumbers) -> dict[tuple[str, ...], int]:
    return {
        (*_name(reached), more_ranks): reached.waits_in.number
        for reached, more_ranks in collective_progress.merge_ranks(_list_waiters(each), "waits_in.number")
        if reached.waits_in is not None
    }


def _merge_ranks(each: _JobNumbers) -> dict[tuple[str, ...], int]:
    groups = {reached.group for reached in _list_waiters(each)}
    numbers: dict[tuple[str, ...], int] = {}
    for reached, more_ranks in collective_progress.merge_ranks(
        each.progress.reached, "place.stance", "place.has_open", "generation", "number"
    ):
        labels = (*_name(reached), *_place(reached.place), str(reached.generation))
        is_waited_here = reached.is_default or reached.group in groups
        numbers[(*labels, yes_or_no(is_waited_here), more_ranks)] = reached.number
    return numbers


def _count_ranks(each: _JobNumbers) -> dict[tuple[str, ...], int]:
    return {
        (key.group, key.description, str(key.number), key.operation, yes_or_no(key.waits)): count
        for key, count in collective_progress.count_collectives(each.progress.reached).items()
    }


METRICS = (
    Metrics[View, _JobNumbers](
        Metric(
            "rank_collective_number",
            "Number of the newest collective in the default group, of a rank that does not wait in a collective",
            lambda each: {
                _name(reached): reached.number
                for reached in each.progress.reached
                if reached.is_default and reached.place.stance != "waits"
            },
            by=_GROUP,
        ),
        Metric(
            "rank_collective_waited_number",
            "Number of the collective in which the rank waits",
            lambda each: {
                _name(reached): reached.waits_in.number
                for reached in each.progress.reached
                if reached.waits_in is not None
            },
            by=_GROUP,
        ),
        Metric(
            "job_collective_waited_number",
            "Number of the collective in which `rank` waits, and up to seven `more_ranks` on this node",
            _merge_waiters,
            by=(*_GROUP, "more_ranks"),
        ),
        Metric(
            "rank_collective_unseen_since_timestamp_seconds",
            "For a rank without a record in the default group: start of its complete records, 0 if no record was lost",
            lambda each: {
                (str(other.place.rank), other.group, *_place(other.place)): other.since_unix_seconds
                for other in each.progress.unseen
            },
            by=(*_GROUP, *_STANCE),
        ),
        Metric(
            "job_collective_number",
            "Number of the newest collective of `rank`, and of up to seven `more_ranks` on this node with the same "
            'labels; `waited_here` is "no" if no rank on this node waits in the group, which is not the default group',
            _merge_ranks,
            by=(*_GROUP, *_STANCE, "generation", "waited_here", "more_ranks"),
        ),
        Metric(
            "job_collective_ranks",
            "Ranks on this node that wait in this collective, or have it as their newest collective",
            _count_ranks,
            by=("group", "description", "number", "operation", "waits"),
        ),
        Metric(
            "job_collective_used_ranks",
            "Ranks on this node that have used the default group",
            lambda each: collective_progress.count_used(each.progress.reached),
            by=("group",),
        ),
        Metric(
            "job_collective_waiting_ranks",
            "Ranks on this node that wait in a collective of any group",
            lambda each: collective_progress.count_waiting(each.progress.reached),
        ),
        Metric(
            "job_collective_waited_since_timestamp_seconds",
            "Time at which the first waiting rank on this node enqueued its collective, by group",
            lambda each: collective_progress.waited_since(each.progress.reached),
            by=("group",),
        ),
        Metric(
            "job_collective_left_out",
            "Pairs of rank and group without series because of a limit",
            lambda each: each.progress.left_out,
        ),
        subjects=_list_numbers,
        labels=JOB,
    ),
)
