"""The replies of nodes to `hangwatch incidents --json`. Pure."""

import math

import msgspec
from msgspec.structs import replace

from hangwatch.fleet.node_replies import AnswerError, ReplyCollector
from hangwatch.fleet.remote_run import Reply
from hangwatch.formats import decoding
from hangwatch.formats.incident_file import Incidents, Summary


class Replies(ReplyCollector[Incidents]):
    """The incidents of all nodes. A node has the name that the user gave, not the one in its reply."""

    def __init__(self) -> None:
        super().__init__(_parse, frozenset({0}), lambda _: (0.0, 0.0), least_offset_seconds=math.inf)
        self.summaries: list[Summary] = []

    def add(self, reply: Reply) -> None:
        """Add the reply of a node."""
        answer = self.take(reply)
        self.summaries += [] if answer is None else [replace(one, node=reply.node) for one in answer.incidents]


def _parse(printed: bytes, _: str) -> Incidents:
    try:
        return decoding.decode_json(printed, Incidents)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise AnswerError("sent no list of incidents: does it run the same version of hangwatch?") from None
