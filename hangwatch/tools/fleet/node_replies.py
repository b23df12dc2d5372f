"""The replies of nodes: which nodes responded, which failed and why, and the jobs on them. Pure.

The reply of a node counts only for that node, even if it contains names of other nodes.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from msgspec.structs import replace

from hangwatch import words
from hangwatch.formats import decoding, sighting
from hangwatch.formats.incident_file import StoreError
from hangwatch.formats.sighting import GroupedDump, Sighting
from hangwatch.model import Grouping
from hangwatch.tools.fleet.cross_node import ClockOffset
from hangwatch.tools.fleet.merge import SightingCollector
from hangwatch.tools.fleet.remote_run import MOST_ANSWER_BYTES, Reply

LEAST_OFFSET_SECONDS = 1.0
_NOT_FOUND = 127  # exit code of sh(1) and timeout(1): no such command
_NOT_EXECUTABLE = 126
_UNREACHED = 255  # ssh(1)
_TIMED_OUT = frozenset({124, 137})  # timeout(1): 124 timed out, 137 timed out and killed with SIGKILL
_DUMPED = frozenset({0, 1})  # 1: no job runs on the node
_REASON_CHARACTERS = 300
_COMPLAINT_LINES = 8

AnswerT = TypeVar("AnswerT")


class AnswerError(Exception):
    """A reply that is not valid. The message gives the reason."""


def parse_answer(printed: bytes, form: type[AnswerT], problem: str) -> AnswerT:
    """Decode the output of a node. Raises AnswerError with the text `problem`, where `{error}` is the reason."""
    try:
        return decoding.decode_json(printed, form)
    except (ValueError, RecursionError) as error:
        raise AnswerError(problem.format(error=error)) from None


class ReplyCollector(Generic[AnswerT]):
    """The replies of nodes to one command. Each reply is added when it arrives.

    `read` parses the output of a node; its arguments are the output and the name of the node. It raises AnswerError
    or StoreError. `answered` are the exit codes of a valid reply. The times in a reply, by the clock of the node,
    show clock differences; those below `least_offset_seconds` are ignored.
    """

    def __init__(
        self,
        read: Callable[[bytes, str], AnswerT],
        answered: Collection[int],
        least_offset_seconds: float = LEAST_OFFSET_SECONDS,
    ) -> None:
        self.answered: list[str] = []
        self.silent: list[str] = []
        self.clocks: list[ClockOffset] = []
        self._read = read
        self._answering = answered
        self._least_offset_seconds = least_offset_seconds
        self._failed: dict[str, list[str]] = defaultdict(list)
        self._complaints: dict[str, list[str]] = defaultdict(list)

    @property
    def failed(self) -> list[tuple[str, list[str]]]:
        """A list of (reason, nodes) for the nodes that were reached but failed. The most frequent reason is first."""
        return _folded(self._failed)

    @property
    def complaints(self) -> list[tuple[str, list[str]]]:
        """A list of (text, nodes) for the texts on standard error of nodes. The most frequent text is first."""
        return _folded(self._complaints)

    def take(self, reply: Reply) -> AnswerT | None:
        """Add a reply and return its parsed output; None if the node failed or did not respond."""
        if reply.is_late or reply.status in _TIMED_OUT or reply.status == _UNREACHED:
            self.silent.append(reply.node)
            return None
        try:
            answer = self._read(self._printed(reply), reply.node)
        except (AnswerError, StoreError) as error:
            self._failed[words.elided(str(error).partition("\n")[0], _REASON_CHARACTERS)].append(reply.node)
            return None
        self.answered.append(reply.node)
        offset = _offset(reply, answer)
        if abs(offset) >= self._least_offset_seconds:
            self.clocks.append(ClockOffset(node=reply.node, seconds=offset))
        return answer

    def complain(self, complaints: Mapping[str, bytes]) -> None:
        """Record the texts that nodes printed on standard error, by node."""
        for node, complaint in complaints.items():
            lines = (words.printable(line.strip()) for line in complaint.decode("utf-8", "replace").splitlines())
            if shown := list(filter(None, lines))[:_COMPLAINT_LINES]:
                self._complaints["\n".join(shown)].append(node)

    def _printed(self, reply: Reply) -> bytes:
        """Return the JSON in a reply. Raises AnswerError if there is none."""
        if reply.is_too_large:
            raise AnswerError(f"sent more than {MOST_ANSWER_BYTES >> 20} MiB")
        if reply.status in (_NOT_FOUND, _NOT_EXECUTABLE):
            raise AnswerError("hangwatch is not on its PATH: use --remote-command /path/to/hangwatch")
        if reply.status is not None and reply.status not in self._answering:
            raise AnswerError(f"hangwatch ended with exit code {reply.status}")
        # A login may print text before the JSON.
        start = 0 if reply.output.startswith(b"{") else reply.output.find(b"\n{")
        if start < 0:
            raise AnswerError("sent no JSON" + (f" (exit code {reply.status})" * bool(reply.status)))
        return reply.output[start:]


class Replies(ReplyCollector[GroupedDump]):
    """The replies of all nodes to `hangwatch dump --json --grouped`. `with_stacks`: they contain all stacks, too."""

    def __init__(self, *, with_stacks: bool = False) -> None:
        super().__init__(_dump_with_stacks if with_stacks else _dump, _DUMPED)
        self.gathering = SightingCollector()
        self.without_job: list[str] = []

    def take(self, reply: Reply) -> GroupedDump | None:
        """Add a reply and return the jobs of the node; None if the node failed or did not respond.

        In all values the node has the name that the user gave.
        """
        dump = super().take(reply)
        if dump is None:
            return None
        if not dump.jobs:
            self.without_job.append(reply.node)
        for one in dump.jobs:
            self.gathering.add(one)
        return dump


def _folded(nodes_of: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    return sorted(nodes_of.items(), key=lambda item: (-len(item[1]), item[0]))


def _dump(printed: bytes, node: str) -> GroupedDump:
    dump = sighting.parse(Path("its answer"), printed)
    # Names of nodes in the dump itself are not trusted.
    return replace(dump, node=node, jobs=tuple(_sighting_of(each, node) for each in dump.jobs))


def _dump_with_stacks(printed: bytes, node: str) -> GroupedDump:
    dump = _dump(printed, node)
    captures = sighting.captures(Path("its answer"), printed)
    with_node = (
        replace(
            capture, node=node, ranks=tuple(replace(rank, id=replace(rank.id, node=node)) for rank in capture.ranks)
        )
        for capture in captures
    )
    return replace(dump, captures=tuple(with_node))


def _sighting_of(sighting: Sighting, node: str) -> Sighting:
    groups = (
        replace(group, members=tuple(replace(each, id=replace(each.id, node=node)) for each in group.members))
        for group in sighting.grouping.groups
    )
    grouping = Grouping(groups=tuple(groups), world_size=sighting.grouping.world_size, notes=sighting.grouping.notes)
    return replace(sighting, node=node, grouping=grouping)


def _offset(reply: Reply, answer: object) -> float:
    """Return the smallest possible clock difference in seconds. Positive: the node's clock is ahead.

    The times in the answer, by the node's clock, are between the request and the end of the reply. 0 without them.
    """
    last_unix_seconds = getattr(answer, "printed_unix_seconds", None)
    if last_unix_seconds is None:
        return 0.0
    ahead = last_unix_seconds - reply.ended_unix_seconds
    behind = getattr(answer, "began_unix_seconds", last_unix_seconds) - reply.asked_unix_seconds
    return float(ahead if ahead > 0 else min(behind, 0.0))
