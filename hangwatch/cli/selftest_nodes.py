"""`hangwatch selftest --nodes`: the ranks of one test on many nodes, each started by hangwatch there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from hangwatch import words
from hangwatch.cli.node_options import Reach, ask, nodes_of
from hangwatch.cli.usage_errors import InputError
from hangwatch.formats import decoding
from hangwatch.selftest import launch, parts
from hangwatch.selftest.launch import Course

if TYPE_CHECKING:
    from hangwatch.fleet.node_replies import RollCall
    from hangwatch.fleet.remote_run import Reply

_STEPS = 10  # of the time-out of one: a test ends after the first that fails, or all are quick


class Question(NamedTuple):
    """What each node is told beside its place; `python` None: its own."""

    backend: str
    timeout_seconds: float
    python: str | None
    devices: str | None
    ranks: int | None

    @property
    def options(self) -> str:
        """As a shell reads them; which devices is said by the layout of a test."""
        found = [f"--backend {self.backend}", f"--timeout-seconds {self.timeout_seconds:g}"]
        found += [f"--python {shlex.quote(self.python)}"] if self.python else []
        found += [f"--ranks {self.ranks}"] if self.ranks is not None else []
        return " ".join(found)


class Nodes:
    """Nodes that have said what they can test, each under the name by which it was asked.

    Raises InputError where one of them has not: a test without it would say less than it seems to.
    """

    def __init__(self, reach: Reach, question: Question) -> None:
        if reach.via == "pdsh":
            raise click.UsageError("a self-test over nodes tells each its own name, which pdsh cannot: --via ssh")
        seconds = launch.START_SECONDS + _STEPS * question.timeout_seconds
        self._reach = reach._replace(deadline_seconds=max(reach.deadline_seconds, seconds))
        self._question = question
        names = nodes_of(reach)
        own = f" --devices {shlex.quote(question.devices)}" if question.devices else ""
        own += f" --ranks {question.ranks}" if question.ranks is not None else ""
        found = _asked(reach, names, f"selftest --offer{own}", parts.Offer)
        without = [name for name in names if name not in found]
        if without:
            raise InputError(f"no self-test on {words.fold_nodes(without)}: mend that, or leave it out of --nodes")
        self._offers = {name: found[name] for name in names}

    @property
    def units(self) -> tuple[str, ...]:
        """Every device of every node."""
        return parts.units(self._offers)

    def run(self, chosen: Sequence[str]) -> Course:
        """One test of these devices: what the ranks of all nodes said."""
        layout = parts.layout_of(chosen)
        port = self._offers[next(iter(layout))].port
        place = f"--part {parts.written(layout)} --node-name %h --port {port}"
        answers = _asked(self._reach, list(layout), f"selftest {place} {self._question.options}", parts.Part)
        return parts.joined(layout, {node: one.course for node, one in answers.items()})


def _asked(
    reach: Reach, nodes: Sequence[str], arguments: str, form: type[parts.AnswerT]
) -> Mapping[str, parts.AnswerT]:
    """What each node answered; who did not is told on standard error."""
    from hangwatch.fleet.node_replies import AnswerError, RollCall

    def read(printed: bytes, _: str) -> parts.AnswerT:
        try:
            return decoding.json(printed, form)
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise AnswerError("gave no answer of a self-test: is hangwatch of the same version there?") from None

    calls: RollCall[parts.AnswerT] = RollCall(read, {0}, lambda one: (one.printed_unix_seconds,) * 2)
    found: dict[str, parts.AnswerT] = {}

    def take(reply: Reply) -> None:
        answer = calls.take(reply)
        if answer is not None:
            found[reply.node] = answer

    ask(reach, nodes, arguments, calls, take)
    return found
