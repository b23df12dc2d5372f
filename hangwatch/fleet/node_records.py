"""The replies of nodes to `hangwatch slow --records`, and the order of the nodes of each job. Pure."""

from collections.abc import Mapping

from hangwatch.collectives.node_arrivals import NodeOrder, NodeTimes, PlaceTimes, compare_nodes
from hangwatch.fleet.node_replies import AnswerError, ReplyCollector, parse_answer
from hangwatch.fleet.remote_run import Reply
from hangwatch.model import Value

SCHEMA_VERSION = 1
MOST_PLACES = 4096  # of one node


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
    """The replies of all nodes. A node has the name that the user gave, not the one in its reply."""

    def __init__(self) -> None:
        super().__init__(_parse, frozenset({0}), lambda records: (records.printed_unix_seconds,) * 2)
        self.job_ids: dict[str, str] = {}
        self._nodes: dict[str, list[NodeTimes]] = {}

    def add(self, reply: Reply) -> None:
        """Add the reply of a node."""
        records = self.take(reply)
        if records is None:
            return
        for job in records.jobs:
            self.job_ids.setdefault(job.job_key, job.job_id)
            times = NodeTimes(node=reply.node, clock_error_seconds=records.clock_error_seconds, places=job.places)
            self._nodes.setdefault(job.job_key, []).append(times)

    def compare(self) -> Mapping[str, NodeOrder]:
        """Return the order of the nodes of each job, by job key."""
        return {key: compare_nodes(nodes) for key, nodes in self._nodes.items()}


def _parse(printed: bytes, _: str) -> NodeRecords:
    records = parse_answer(printed, NodeRecords, "sent no records: does it run the same version of hangwatch?")
    places = [place for job in records.jobs for place in job.places]
    are_uneven = any(len(place.numbers) != len(place.unix_ns) for place in places)
    if len(places) > MOST_PLACES or are_uneven or (records.clock_error_seconds or 0.0) < 0:
        raise AnswerError("sent records that do not fit together")
    return records
