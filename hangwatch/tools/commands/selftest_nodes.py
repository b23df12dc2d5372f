"""`hangwatch selftest --nodes`: one self-test of the devices of many nodes."""

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import click

from hangwatch import words
from hangwatch.cli.reach import Reach
from hangwatch.cli.usage_errors import InputError
from hangwatch.tools.commands.node_options import resolve_nodes, run_hangwatch
from hangwatch.tools.selftest import launch, parts
from hangwatch.tools.selftest.launch import Course

_STEPS = 10  # longest duration of a test, as a multiple of the timeout of one step. It ends at the first failed step


class SelftestOptions(NamedTuple):
    """The options of `hangwatch selftest`. If `python` is None, each node uses its default interpreter.

    A test over several nodes calls `hangwatch selftest` on each node with the hidden options, the last four.
    """

    backend: str
    timeout_seconds: float
    python: str | None
    devices: str | None
    ranks: int | None
    late_seconds: float
    bisect: bool
    as_json: bool
    offer: bool
    part: str | None
    node_name: str
    port: int | None

    @property
    def node_options(self) -> str:
        """The options that every node gets, as text for a shell.

        --devices is not among them, because the layout of a test contains the devices.
        """
        options = [f"--backend {self.backend}", f"--timeout-seconds {self.timeout_seconds:g}"]
        options += [f"--python {shlex.quote(self.python)}"] if self.python else []
        options += [f"--ranks {self.ranks}"] if self.ranks is not None else []
        return " ".join(options)


class Nodes:
    """The nodes of a self-test, and the devices on each.

    The constructor queries the nodes. It raises InputError if a node does not respond: a test without it could mislead.
    """

    def __init__(self, reach: Reach, question: SelftestOptions) -> None:
        if reach.via == "pdsh":
            raise click.UsageError("--via pdsh cannot run a self-test: it passes no name to each node; use --via ssh")
        seconds = launch.START_SECONDS + _STEPS * question.timeout_seconds
        self._reach = reach._replace(deadline_seconds=max(reach.deadline_seconds, seconds))
        self._question = question
        names = resolve_nodes(reach)
        options = f" --devices {shlex.quote(question.devices)}" if question.devices else ""
        options += f" --ranks {question.ranks}" if question.ranks is not None else ""
        offers = _ask(reach, names, f"selftest --offer{options}", parts.Offer)
        missing = [name for name in names if name not in offers]
        if missing:
            nodes = words.fold_nodes(missing)
            raise InputError(f"the self-test cannot run on {nodes}: fix that, or remove them from --nodes")
        self._offers = {name: offers[name] for name in names}

    @property
    def units(self) -> tuple[str, ...]:
        """The names of all devices of all nodes."""
        return parts.units(self._offers)

    def run(self, chosen: Sequence[str]) -> Course:
        """Test these devices and return the results of the ranks of all nodes."""
        layout = parts.layout_of(chosen)
        port = self._offers[next(iter(layout))].port
        place = f"--part {parts.written(layout)} --node-name %h --port {port}"
        answers = _ask(self._reach, list(layout), f"selftest {place} {self._question.node_options}", parts.Part)
        return parts.joined(layout, {node: answer.course for node, answer in answers.items()})


def _ask(reach: Reach, nodes: Sequence[str], arguments: str, form: type[parts.AnswerT]) -> Mapping[str, parts.AnswerT]:
    """Run hangwatch on the nodes and return the reply of each node. Print the nodes that did not respond."""
    from hangwatch.tools.fleet.node_replies import collect_answers

    problem = "sent no result of a self-test: does it run the same version of hangwatch?"
    return run_hangwatch(reach, nodes, arguments, collect_answers(form, problem))
