"""Pure: commands that run hangwatch on a node and return its output, by ssh, pdsh, srun, kubectl, or locally."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from hangwatch.formats import decoding

Via: TypeAlias = Literal["ssh", "pdsh", "srun", "kubectl", "local"]

# Ends the command when our end of its standard input closes, whatever ends us, and after the deadline. One line,
# without a quotation mark: it passes through the login shell of a user, which may be csh.
_WATCHED = (
    "exec 3<&0; timeout -k 2 {seconds:.0f} {command} </dev/null & p=$!; "
    "(read x <&3; kill $p) >/dev/null 2>&1 & w=$!; "
    "wait $p; s=$?; kill $w 2>/dev/null; {ending}"
)
_ENDED = ("Succeeded", "Failed")
_PDSH_LINE = re.compile(rb"([^:\s]+): ?(.*)", re.DOTALL)
_PDSH_STATUS = re.compile(rb"pdsh@[^:]+: ([^:\s]+): .* exited with exit code ([0-9]+)\s*")
_SRUN_LINE = re.compile(rb"\s*([0-9]+): ?(.*)", re.DOTALL)


class Pod(NamedTuple):
    """The pod of hangwatch on one node."""

    namespace: str
    name: str


class _Metadata(msgspec.Struct):
    name: str
    namespace: str = "default"


class _Spec(msgspec.Struct):
    node: str = msgspec.field(name="nodeName", default="")


class _Status(msgspec.Struct):
    phase: str = ""


class _Item(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec
    status: _Status = msgspec.field(default_factory=_Status)


class _List(msgspec.Struct):
    items: tuple[_Item, ...] = ()


class OnePerNode(NamedTuple):
    """A separate command for each node."""

    command: Callable[[str], Sequence[str]]


class OneForAll(NamedTuple):
    """One command that asks all nodes and puts a label before each line of their output.

    `label` splits a line into the label and the rest; `status` returns the node and exit code in a line that reports
    them. With `names_itself` labels are not node names: the first line of each label is the name of its node, the last
    one "=" and the exit code.
    """

    command: Sequence[str]
    label: Callable[[bytes], tuple[str, bytes] | None]
    status: Callable[[bytes], tuple[str, int] | None]
    names_itself: bool = False


Transport: TypeAlias = OnePerNode | OneForAll


def script(command: str, seconds: float, ending: str = "exit $s") -> str:
    """Return the shell script for a node: the command, ended at the deadline or when the asking process is gone.

    `ending` is the code after it, with the exit code in `$s`.
    """
    return _WATCHED.format(seconds=max(1.0, seconds), command=command, ending=ending)


def ssh(command: str, seconds: float, options: Sequence[str] = ()) -> OnePerNode:
    """Return the command for one connection per node, without a password prompt; %h in `command` is the node's name."""
    usual = ("-x", "-a", "-oBatchMode=yes", f"-oConnectTimeout={max(1, round(seconds))}")

    def node_command(node: str) -> Sequence[str]:
        asked = script(_named(command, node), seconds)
        return ["ssh", *options, *usual, "--", node, f"sh -c {shlex.quote(asked)}"]

    return OnePerNode(node_command)


def local(command: str, seconds: float) -> OnePerNode:
    """Return the command that runs locally, once for each name, for %h in it: `ip netns exec %h hangwatch`.

    The shell that we end is not the shell that runs the script, as with ssh(1). If the script ended between the start
    of the command and the start of its watcher, the command would continue to run.
    """
    return OnePerNode(lambda node: ["sh", "-c", 'sh -c "$0"; exit $?', script(_named(command, node), seconds)])


def _named(command: str, node: str) -> str:
    return command.replace("%h", shlex.quote(node))


def kubectl(command: str, seconds: float, pods: Mapping[str, Pod], options: Sequence[str] = ()) -> OnePerNode:
    """Return the command that runs in the pod of hangwatch on each node; %h in `command` is the node's name."""

    def node_command(node: str) -> Sequence[str]:
        pod = pods[node]
        where = ["--namespace", pod.namespace, pod.name, "--container", "hangwatch"]
        return ["kubectl", *options, "exec", "-i", *where, "--", "sh", "-c", script(_named(command, node), seconds)]

    return OnePerNode(node_command)


def pods_by_node(listed: bytes) -> dict[str, Pod]:
    """Parse the output of `kubectl get pods --output json`; pods by node. Raises ValueError."""
    found = decoding.decode_json(listed, _List)
    return {item.spec.node: Pod(item.metadata.namespace, item.metadata.name) for item in found.items if item.spec.node}


def nodes_of_pods(listed: bytes) -> list[str]:
    """Return the nodes of pods in the output of `kubectl get pods --output json`, except pods that have ended.

    Raises ValueError.
    """
    found = decoding.decode_json(listed, _List)
    return sorted({item.spec.node for item in found.items if item.spec.node and item.status.phase not in _ENDED})


def pdsh(command: str, seconds: float, nodes: str, fanout: int, options: Sequence[str] = ()) -> OneForAll:
    """Return one pdsh command for all nodes; its own timeouts are not used."""
    asked = f"sh -c {shlex.quote(script(command, seconds))}"
    return OneForAll(["pdsh", "-f", str(fanout), *options, "-w", nodes, asked], _labelled(_PDSH_LINE), _pdsh_status)


def srun(command: str, seconds: float, nodes: Sequence[str], job: str, options: Sequence[str] = ()) -> OneForAll:
    """Return one step next to those of the job, a task on each node, without a GPU; slurmd tells the node of a task."""
    step = ["--overlap", f"--jobid={job}", "--gres=gpu:0", "--label", "--kill-on-bad-exit=0"]
    where = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"]
    asked = command.replace("%h", "$SLURMD_NODENAME")
    named = f"echo $SLURMD_NODENAME; {script(asked, seconds, 'echo; echo =$s')}"
    return OneForAll(
        ["srun", *step, *where, *options, "sh", "-c", named], _labelled(_SRUN_LINE), lambda _: None, names_itself=True
    )


def _labelled(pattern: re.Pattern[bytes]) -> Callable[[bytes], tuple[str, bytes] | None]:
    def split(line: bytes) -> tuple[str, bytes] | None:
        found = pattern.fullmatch(line)
        return None if found is None else (found[1].decode("utf-8", "replace"), found[2])

    return split


def _pdsh_status(line: bytes) -> tuple[str, int] | None:
    found = _PDSH_STATUS.fullmatch(line)
    return None if found is None or len(found[2]) > 3 else (found[1].decode("utf-8", "replace"), int(found[2]))
