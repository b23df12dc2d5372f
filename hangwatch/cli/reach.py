"""The options that select nodes, and the tools that run a command on them. A tool is imported only to run it."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import click

from hangwatch.cli.options import Command

NODE_DEADLINE_SECONDS = 30.0

Via: TypeAlias = Literal["ssh", "pdsh", "srun", "kubectl", "local"]

_TOOLS = {
    "check": "hangwatch.tools.commands.check_nodes:check_nodes",
    "dump": "hangwatch.tools.commands.many_nodes:dump_nodes",
}
"""Command, and the function that runs it on many nodes."""

_OPTIONS = (
    click.option("--nodes", help="Run on these nodes, as Slurm prints them: node[01-40]; or @group."),
    click.option("--via", type=click.Choice(get_args(Via)), help="Program that reaches the nodes.  [default: ssh]"),
    click.option("--jobid", help="Run on the nodes of this Slurm job (from squeue, unless --nodes is given)."),
    click.option(
        "--deadline",
        "deadline_seconds",
        type=click.FloatRange(1, 3600),
        help="Seconds to wait for each node.  [default: 30]",
    ),
    click.option("--remote-command", help="Shell command that runs hangwatch on a node.  [default: hangwatch]"),
    click.option("--selector", help="With --via kubectl: run on the nodes of pods with this label, e.g. job-name=J."),
    click.option("-n", "--namespace", help="Namespace of these pods.  [default: kubectl's]"),
    click.option("--via-options", help="More options for ssh, pdsh, srun or kubectl, quoted as in a shell."),
)


def nodes_options(command: Command) -> Command:
    """Add the options that select nodes to a command. `parse_reach` interprets them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class Reach(NamedTuple):
    """The nodes to run on, and the program that connects to them. `selector` and `namespace` are for kubectl."""

    remote_command: str = "hangwatch"
    nodes: str | None = None
    via: Via = "ssh"
    jobid: str | None = None
    deadline_seconds: float = NODE_DEADLINE_SECONDS
    via_options: str = ""
    selector: str | None = None
    namespace: str | None = None


def parse_reach(options: Mapping[str, Any]) -> Reach | None:
    """Interpret the options of `nodes_options`; None if they select no nodes. Raises click.UsageError."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("nodes", "jobid", "selector", "remote_command"):
        if name in given and not given[name].strip():
            raise click.UsageError(f"--{name.replace('_', '-')} is empty: is a shell variable not set?")
    if given.keys().isdisjoint({"nodes", "jobid", "selector"}):
        if given:
            raise click.UsageError("--via, --via-options, --deadline and --remote-command need --nodes or --jobid")
        return None
    if "namespace" in given and "selector" not in given:
        raise click.UsageError("--namespace needs --selector")
    if "selector" in given and (given.get("via") != "kubectl" or "nodes" in given or "jobid" in given):
        raise click.UsageError("--selector needs --via kubectl, and replaces --nodes and --jobid")
    return Reach(**given)


def load_tool(command: str) -> Callable[..., int]:
    """Import and return the function that runs this command on many nodes. It returns the exit code."""
    module, _, name = _TOOLS[command].partition(":")
    function: Callable[..., int] = getattr(importlib.import_module(module), name)
    return function
