"""The nodes that the options select, and execution of a command on these nodes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hangwatch import words
from hangwatch.cli import screen
from hangwatch.cli.reach import Reach
from hangwatch.cli.usage_errors import InputError
from hangwatch.tools.fleet import nodeset, transports
from hangwatch.tools.fleet.transports import nodes_of_pods

if TYPE_CHECKING:
    from hangwatch.tools.fleet import remote_run
    from hangwatch.tools.fleet.node_replies import ReplyCollector

MOST_TOLD = 10
MOST_NAME_CHARACTERS = 200
LOOKUP_SECONDS = 20.0
POD_SELECTOR = "app.kubernetes.io/name=hangwatch"  # deploy/helm/hangwatch

T = TypeVar("T")


def resolve_nodes(reach: Reach) -> list[str]:
    """Return the names of the selected nodes. Raises InputError and NodesError."""
    if reach.selector is not None:
        # The nodes of the pods that --selector matches.
        namespace = [] if reach.namespace is None else [f"--namespace={reach.namespace}"]
        nodes = _read_pods([*_options(reach), "get", "pods", *namespace, f"--selector={reach.selector}"], nodes_of_pods)
        if not nodes:
            raise InputError(
                f"--selector {reach.selector}: no pod with this label has a node\n"
                "  `kubectl get pods --all-namespaces --show-labels` shows labels and namespaces (-n)"
            )
        return nodeset.check_names(nodes)
    return nodeset.expand(reach.nodes) if reach.nodes else _nodes_of_slurm_job(reach.jobid, reach.via)


def describe_no_job(answered: Collection[str]) -> str:
    """Return the message that none of the nodes that responded runs a job."""
    return (
        f"no training job found on {words.fold_nodes(answered)} that this user may see"
        if answered
        else "no node responded"
    )


def run_hangwatch(
    reach: Reach,
    nodes: Sequence[str],
    arguments: str,
    roll_call: ReplyCollector[T],
    on_answer: Callable[[str, T], object] | None = None,
) -> dict[str, T]:
    """Run hangwatch with `arguments`, which are quoted for a shell, on all nodes, and show the progress.

    Return the answers by node; with `on_answer`, pass each to it instead, with the name of its node. At the end, print
    the nodes that did not respond, and the error messages of nodes. Raises InputError.
    """
    from hangwatch.tools.fleet import remote_run

    if reach.via != "local" and shutil.which(reach.via) is None:
        raise InputError(
            f"--via {reach.via}: the program {reach.via} is not on the PATH of this machine\n"
            f"  install it{' (Debian: openssh-client)' if reach.via == 'ssh' else ''}, or select another: "
            "--via ssh, pdsh, srun or kubectl"
        )
    transport = _transport(reach, f"{reach.remote_command} {arguments}".strip(), nodes)
    progress, answers = Progress(), dict[str, T]()
    take = on_answer or answers.__setitem__

    def on_reply(reply: remote_run.Reply) -> None:
        answer = roll_call.take(reply)
        if answer is not None:
            take(reply.node, answer)

    try:
        complaints = remote_run.run_on_nodes(
            nodes,
            transport,
            deadline_seconds=reach.deadline_seconds,
            on_reply=on_reply,
            on_progress=lambda now: progress.show(now, len(roll_call.answered), len(roll_call.silent)),
        )
    except OSError as error:
        raise InputError(f"--via {reach.via}: {error.filename or 'its command'}: {error.strerror}") from None
    finally:
        progress.end()
    roll_call.complain(complaints)
    report_failures(roll_call, reach.deadline_seconds)
    return answers


def report_failures(roll_call: ReplyCollector[Any], deadline_seconds: float) -> None:
    """Print the nodes that did not respond, and the error messages of nodes. Equal messages are printed together."""
    if roll_call.silent:
        silent = words.fold_nodes(roll_call.silent)
        click.echo(f"no response within {words.duration(deadline_seconds)}, or unreachable: {silent}", err=True)
    for messages in (roll_call.failed, roll_call.complaints):
        for message, nodes in messages[:MOST_TOLD]:
            name = words.elided(words.fold_nodes(nodes), MOST_NAME_CHARACTERS)
            for line in message.splitlines():
                click.echo(f"{name}: {line}", err=True)
        if len(messages) > MOST_TOLD:
            click.echo(f"and {words.count(len(messages) - MOST_TOLD, 'more message')} of other nodes", err=True)


class Progress:
    """A line with the number of nodes that have responded: rewritten on a terminal, else printed at the end."""

    def __init__(self) -> None:
        self._is_terminal = screen.can_write_over(sys.stderr)
        self._line = ""

    def show(self, now: remote_run.Progress, answered: int, silent: int) -> None:
        """Show the progress, if standard error is a terminal. `silent` nodes have not responded by the deadline."""
        parts = [f"{answered} of {words.count(now.total, 'node')} responded"]
        parts += [f"waiting for {now.total - now.ended}"] if now.total > now.ended else []
        parts += [f"gave up on {silent}"] if silent else []
        self._line = f"{', '.join(parts)}, {now.seconds:.0f} s"
        if self._is_terminal:
            click.echo(f"\r\x1b[K{self._line}", nl=False, err=True)

    def end(self) -> None:
        """Finish the line, or print it if it was not shown."""
        if self._line:
            click.echo("" if self._is_terminal else self._line, err=True)


def _transport(reach: Reach, command: str, nodes: Sequence[str]) -> transports.Transport:
    """Return the transport that runs `command` on these nodes. Raises InputError and click.UsageError."""
    seconds, options = reach.deadline_seconds, _options(reach)
    match reach.via:
        case "ssh":
            return transports.ssh(command, seconds, options)
        case "pdsh":
            from hangwatch.tools.fleet.remote_run import FANOUT

            return transports.pdsh(command, seconds, words.fold_nodes(nodes), FANOUT, options)
        case "srun":
            if reach.jobid is None:
                raise click.UsageError("--via srun needs --jobid: it starts a step of that job")
            return transports.srun(command, seconds, nodes, reach.jobid, options)
        case "kubectl":
            selected = ["get", "pods", "--all-namespaces", "--selector", POD_SELECTOR]
            pods = _read_pods([*options, *selected], transports.pods_by_node)
            missing = [node for node in nodes if node not in pods]
            if missing:
                raise InputError(f"--via kubectl: no pod of hangwatch runs on {words.fold_nodes(missing)}")
            return transports.kubectl(command, seconds, pods, options)
    return transports.local(command, seconds)


def _options(reach: Reach) -> list[str]:
    try:
        return shlex.split(reach.via_options)
    except ValueError as error:
        raise InputError(f"--via-options: {error}") from None


def _nodes_of_slurm_job(job: str | None, via: str | None) -> list[str]:
    """Return the nodes of a Slurm job. Raises InputError for several jobs, or if a step for `via` would not start."""
    assert job is not None
    try:
        printed = _printed_by(["squeue", "--noheader", f"--jobs={job}", "--format=%i|%T|%N"])
    except InputError as error:
        raise InputError(
            f"--jobid {words.elided(job, 80)}: {error}\n  `squeue --me` lists job ids; --nodes works without squeue"
        ) from None
    rows = [row.split("|") for row in printed.decode("utf-8", "replace").splitlines() if row.count("|") == 2]
    parts = {part: nodes for part, _, nodes in rows if nodes.strip()}
    states = {state for part, state, _ in rows if part in parts or not parts}
    if not parts:
        state = f" ({', '.join(sorted(states))})" if states else ""
        raise InputError(f"--jobid {job}: squeue lists no nodes of this job{state}: give --nodes")
    if len(parts) > 1 and all("_" in part for part in parts):
        tasks = words.elided(", ".join(parts), 80)
        raise InputError(f"--jobid {job}: is an array of several running jobs: give one of them ({tasks})")
    if via == "srun" and "SUSPENDED" in states:
        raise InputError(
            f"--jobid {job}: Slurm has suspended this job: its ranks are stopped, and a step would wait\n"
            f"  `scontrol resume {job}` continues it; --via ssh reads its stacks now"
        )
    if via == "srun" and len(parts) > 1:
        raise InputError(f"--jobid {job}: is a heterogeneous job, and a step has the nodes of one part only: --via ssh")
    return nodeset.expand(",".join(parts.values()))  # a list for each component of a heterogeneous job


def _read_pods(arguments: Sequence[str], read: Callable[[bytes], T]) -> T:
    """Return what `read` makes of the list of pods that kubectl prints. Raises InputError."""
    try:
        return read(_printed_by(["kubectl", *arguments, "--output", "json"]))
    except ValueError as error:
        raise InputError(f"--via kubectl: its list of pods cannot be read: {error}") from None


def _printed_by(command: Sequence[str]) -> bytes:
    """Run a local command for at most `LOOKUP_SECONDS`. Return its standard output. Raises InputError."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LOOKUP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{command[0]}: did not end within {LOOKUP_SECONDS:g} s") from None
    except OSError as error:
        raise InputError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        message = words.elided(done.stderr.decode("utf-8", "replace").strip(), MOST_NAME_CHARACTERS)
        raise InputError(f"{command[0]}: ended with exit code {done.returncode}: {message}")
    return done.stdout
