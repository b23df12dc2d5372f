"""How commands ask many nodes now: the options that say which and how, the progress, and who did not answer."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import click

from hangwatch import words
from hangwatch.cli import screen
from hangwatch.cli.usage_errors import InputError
from hangwatch.fleet import nodeset, transports
from hangwatch.fleet.transports import Via

if TYPE_CHECKING:
    from hangwatch.fleet import remote_run
    from hangwatch.fleet.node_replies import RollCall

MOST_TOLD = 10
MOST_NAME_CHARACTERS = 200
LOOKUP_SECONDS = 20.0
NODE_DEADLINE_SECONDS = 30.0
POD_SELECTOR = "app.kubernetes.io/name=hangwatch"  # deploy/helm/hangwatch

topology_option = click.option(
    "--topology",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The leaf switches of nodes: a topology.conf of Slurm, or lines NODES: SWITCH. Default: SLURM_TOPOLOGY_ADDR.",
)

_Command = TypeVar("_Command", bound=Callable[..., Any])
_OPTIONS = (
    click.option("--nodes", "nodeset", help="On these nodes, in ClusterShell's syntax: node[1-40], @group."),
    click.option("--via", type=click.Choice(get_args(Via)), help="How to reach them.  [default: ssh]"),
    click.option("--jobid", help="The Slurm job for --via srun; without --nodes: the nodes that squeue lists for it."),
    click.option(
        "--deadline",
        "deadline_seconds",
        type=click.FloatRange(1, 3600),
        help="For each node, in seconds.  [default: 30]",
    ),
    click.option("--remote-command", help="How hangwatch is called there, as a shell reads it.  [default: hangwatch]"),
    click.option("--selector", help="With --via kubectl: on the nodes of the pods with this label, job-name=J."),
    click.option("-n", "--namespace", help="The namespace of these pods.  [default: that of kubectl]"),
    click.option("--via-options", help="Options for ssh, pdsh, srun or kubectl, as a shell reads them."),
)


class Reach(NamedTuple):
    """Which nodes are asked, and how they are reached."""

    nodes: str | None
    via: Via
    jobid: str | None
    deadline_seconds: float
    remote_command: str
    via_options: str
    selector: str | None = None
    namespace: str | None = None


def nodes_options(command: _Command) -> _Command:
    """Give a command the options that `reach_of` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class _Given(NamedTuple):
    """The options of `nodes_options` as they were given; None where one was not."""

    nodeset: str | None
    via: Via | None
    jobid: str | None
    deadline_seconds: float | None
    remote_command: str | None
    via_options: str | None
    selector: str | None
    namespace: str | None


def reach_of(options: Mapping[str, Any], tool: str = "hangwatch") -> Reach | None:
    """What the options of `nodes_options` mean; None where no other node is meant. `tool` is what runs there.

    Raises UsageError.
    """
    nodeset, via, jobid, deadline_seconds, remote_command, via_options, selector, namespace = _Given(**options)
    given = {"--nodes": nodeset, "--jobid": jobid, "--selector": selector, "--remote-command": remote_command}
    for name, value in given.items():
        if value is not None and not value.strip():
            raise click.UsageError(f"{name} is empty: is a variable of the shell not set?")
    if nodeset is None and jobid is None and selector is None:
        if any(option is not None for option in (via, deadline_seconds, remote_command, via_options, namespace)):
            raise click.UsageError("--via, --via-options, --deadline and --remote-command go with --nodes or --jobid")
        return None
    if selector is None and namespace is not None:
        raise click.UsageError("--namespace goes with --selector")
    if selector is not None and (via != "kubectl" or nodeset is not None or jobid is not None):
        raise click.UsageError("--selector goes with --via kubectl, and names the nodes in place of --nodes")
    return Reach(
        nodes=nodeset,
        via=via or "ssh",
        jobid=jobid,
        deadline_seconds=deadline_seconds or NODE_DEADLINE_SECONDS,
        remote_command=remote_command or tool,
        via_options=via_options or "",
        selector=selector,
        namespace=namespace,
    )


def nodes_of(reach: Reach) -> list[str]:
    """The nodes that are meant. Raises InputError and NodesError."""
    if reach.selector is not None:
        return _nodes_of_pods(reach)
    return nodeset.expand(reach.nodes) if reach.nodes else _nodes_of_slurm_job(reach.jobid)


def ask(
    reach: Reach,
    nodes: Sequence[str],
    arguments: str,
    roll_call: RollCall[Any],
    on_reply: Callable[[remote_run.Reply], None],
) -> None:
    """Run hangwatch with these arguments, as a shell reads them, on all nodes, and show how many have answered.

    Then tell who has not, and what nodes printed beside it. Raises InputError.
    """
    ask_shell(reach, nodes, f"{reach.remote_command} {arguments}", roll_call, on_reply)


def ask_shell(
    reach: Reach,
    nodes: Sequence[str],
    command: str,
    roll_call: RollCall[Any],
    on_reply: Callable[[remote_run.Reply], None],
) -> None:
    """As `ask`, with a whole command as a shell reads it."""
    from hangwatch.fleet import remote_run

    transport = _transport(reach, command, nodes)
    progress = Progress()
    try:
        complaints = remote_run.ask(
            nodes,
            transport,
            deadline_seconds=reach.deadline_seconds,
            on_reply=on_reply,
            on_progress=lambda now: progress.show(now, len(roll_call.answered)),
        )
    except OSError as error:
        raise InputError(f"--via {reach.via}: {error.filename or 'its command'}: {error.strerror}") from None
    finally:
        progress.end()
    roll_call.complain(complaints)
    tell(roll_call, reach.deadline_seconds)


def tell(roll_call: RollCall[Any], deadline_seconds: float) -> None:
    """Who did not answer, and what nodes said beside it, each once."""
    if roll_call.silent:
        silent = words.fold_nodes(roll_call.silent)
        click.echo(f"unanswered after {words.duration(deadline_seconds)} or not reached: {silent}", err=True)
    for told in (roll_call.failed, roll_call.complaints):
        for said, nodes in told[:MOST_TOLD]:
            name = words.elided(words.fold_nodes(nodes), MOST_NAME_CHARACTERS)
            for line in said.splitlines():
                click.echo(f"{name}: {line}", err=True)
        if len(told) > MOST_TOLD:
            click.echo(f"and {len(told) - MOST_TOLD} more of other nodes", err=True)


class Progress:
    """How many have answered: a line that is written over on a terminal, else one line at the end."""

    def __init__(self) -> None:
        self._is_terminal = screen.can_write_over(sys.stderr)
        self._line = ""

    def show(self, now: remote_run.Progress, answered: int) -> None:
        """Say so, where somebody looks."""
        self._line = (
            f"answered {answered} of {words.count(now.asked, 'node')}, silent {now.asked - now.ended}, "
            f"{now.seconds:.0f} s"
        )
        if self._is_terminal:
            click.echo(f"\r\x1b[K{self._line}", nl=False, err=True)

    def end(self) -> None:
        """Say it for the last time."""
        if self._line:
            click.echo("" if self._is_terminal else self._line, err=True)


def _transport(reach: Reach, command: str, nodes: Sequence[str]) -> transports.Transport:
    """Raises InputError."""
    seconds, options = reach.deadline_seconds, _options(reach)
    match reach.via:
        case "ssh":
            return transports.ssh(command, seconds, options)
        case "pdsh":
            from hangwatch.fleet.remote_run import FANOUT

            return transports.pdsh(command, seconds, words.fold_nodes(nodes), FANOUT, options)
        case "srun":
            if reach.jobid is None:
                raise click.UsageError("--via srun needs --jobid: the step runs beside those of the job")
            return transports.srun(command, seconds, nodes, reach.jobid, options)
        case "kubectl":
            pods = _pods(options)
            without = [node for node in nodes if node not in pods]
            if without:
                raise InputError(f"--via kubectl: no pod of hangwatch runs on {words.fold_nodes(without)}")
            return transports.kubectl(command, seconds, pods, options)
    return transports.local(command, seconds)


def _options(reach: Reach) -> list[str]:
    try:
        return shlex.split(reach.via_options)
    except ValueError as error:
        raise InputError(f"--via-options: {error}") from None


def _nodes_of_pods(reach: Reach) -> list[str]:
    """The nodes of a job's pods. Raises InputError, and NodesError for a name of a node that is none."""
    place = [] if reach.namespace is None else [f"--namespace={reach.namespace}"]
    command = ["kubectl", *_options(reach), "get", "pods", *place, f"--selector={reach.selector}", "--output", "json"]
    try:
        nodes = transports.nodes_of_pods(_printed_by(command))
    except ValueError as error:
        raise InputError(f"--via kubectl: its list of pods cannot be read: {error}") from None
    if not nodes:
        raise InputError(
            f"--selector {reach.selector}: no such pod has a node\n"
            "  `kubectl get pods --all-namespaces --show-labels` shows labels and namespaces (-n)"
        )
    return nodeset.named(nodes)


def _nodes_of_slurm_job(job: str | None) -> list[str]:
    assert job is not None
    try:
        printed = _printed_by(["squeue", "--noheader", f"--jobs={job}", "--format=%N"])
    except InputError as error:
        raise InputError(
            f"--jobid {words.elided(job, 80)}: {error}\n"
            "  `squeue --me` lists job ids; --nodes names the nodes without squeue"
        ) from None
    listed = printed.decode("utf-8", "replace").split()
    if len(listed) != 1:
        raise InputError(f"--jobid {job}: squeue names no nodes of such a job: give --nodes")
    return nodeset.expand(listed[0])


def _pods(options: Sequence[str]) -> dict[str, transports.Pod]:
    """The pods of hangwatch by node. Raises InputError."""
    command = ["kubectl", *options, "get", "pods", "--all-namespaces", "--selector", POD_SELECTOR, "--output", "json"]
    try:
        return transports.pods_by_node(_printed_by(command))
    except ValueError as error:
        raise InputError(f"--via kubectl: its list of pods cannot be read: {error}") from None


def _printed_by(command: Sequence[str]) -> bytes:
    """What a command prints, within bounds. Raises InputError."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LOOKUP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{command[0]}: gave no answer in {LOOKUP_SECONDS:g} s") from None
    except OSError as error:
        raise InputError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        said = words.elided(done.stderr.decode("utf-8", "replace").strip(), MOST_NAME_CHARACTERS)
        raise InputError(f"{command[0]}: ended with exit code {done.returncode}: {said}")
    return done.stdout
