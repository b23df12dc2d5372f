"""The replies of nodes to `hangwatch slow --records`, and the order of the nodes of each job. Pure."""

from collections.abc import Mapping

from hangwatch.collectives.node_arrivals import NodeOrder, NodeTimes, PlaceTimes, compare_nodes
from hangwatch.model import Value
from hangwatch.model.keyed_lists import list_by_key
from hangwatch.tools.fleet.node_replies import AnswerError, ReplyCollector, parse_answer

SCHEMA_VERSION = 1


class JobRecords(Value, frozen=True):
    """The newest collectives of a job on a node. `job_key` is equal on all nodes."""

    job_id: str
    job_key: str
    places: tuple[PlaceTimes, ...]


class NodeRecords(Value, frozen=True):
    """The output of `hangwatch slow --records`: the newest collectives of the jobs on a node.

    `clock_error_seconds` is the largest possible error of its clock; null if unknown.
    """

    node: str
    printed_unix_seconds: float
    clock_error_seconds: float | None
    jobs: tuple[JobRecords, ...]
    schema_version: int = SCHEMA_VERSION


class Replies(ReplyCollector[NodeRecords]):
    """The replies of all nodes to `hangwatch slow --records`."""

    def __init__(self) -> None:
        super().__init__(_parse, frozenset({0}))


def compare(records_by_node: Mapping[str, NodeRecords]) -> Mapping[str, NodeOrder]:
    """Return the order of the nodes of each job, by job key. A node has the name that the user gave."""
    nodes = list_by_key(
        (job.job_key, NodeTimes(node, records.clock_error_seconds, job.places))
        for node, records in records_by_node.items()
        for job in records.jobs
    )
    return {key: compare_nodes(times) for key, times in nodes.items()}


def _parse(printed: bytes, _: str) -> NodeRecords:
    records = parse_answer(printed, NodeRecords, "sent no records: does it run the same version of hangwatch?")
    places = [place for job in records.jobs for place in job.places]
    are_uneven = any(len(place.numbers) != len(place.unix_ns) for place in places)
    if are_uneven or (records.clock_error_seconds or 0.0) < 0:
        raise AnswerError("sent records that do not fit together")
    return records
