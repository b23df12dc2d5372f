"""Command lines of ssh, pdsh, srun and kubectl that run a command on nodes and return its output. Pure."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from hangwatch.formats import decoding

# Ends the command at the deadline, and when the local end of its standard input closes: that happens however the local
# process ends. timeout(1) leads the process group of its command, and may end at a signal without its command (until
# coreutils 9.6, if it has just forked), so the group is killed. It is one line without quotation marks, because the
# user's login shell may be csh.
_WATCHED = (
    "exec 3<&0; timeout -k 2 {seconds:.0f} {command} </dev/null & p=$!; "
    "(read x <&3; kill -s TERM -- -$p || kill $p) >/dev/null 2>&1 & w=$!; "
    "wait $p; s=$?; kill $w 2>/dev/null; {ending}"
)
_ENDED = ("Succeeded", "Failed")
_PDSH_LINE = re.compile(rb"([^:\s]+): ?(.*)", re.DOTALL)
_PDSH_STATUS = re.compile(rb"pdsh@[^:]+: ([^:\s]+): .* exited with exit code ([0-9]+)\s*")
_SRUN_LINE = re.compile(rb"\s*([0-9]+): ?(.*)", re.DOTALL)


class Pod(NamedTuple):
    """The pod in which hangwatch runs on one node."""

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
    """A transport with a separate command for each node."""

    command: Callable[[str], Sequence[str]]


class OneForAll(NamedTuple):
    """A transport with one command for all nodes. The command prints a label before each line of their output.

    `label` splits a line into the label and the rest. `status` returns the node and the exit code if a line reports
    them, else None. A label is the name of a node, unless `names_itself` is set. In that case, the first line with
    a label has the name of the node, and the last line has "=" and the exit code.
    """

    command: Sequence[str]
    label: Callable[[bytes], tuple[str, bytes] | None]
    status: Callable[[bytes], tuple[str, int] | None]
    names_itself: bool = False


Transport: TypeAlias = OnePerNode | OneForAll


def script(command: str, seconds: float, ending: str = "exit $s") -> str:
    """Return the shell script for a node. It kills `command` after `seconds`, or when the local process is gone.

    `ending` is shell code that runs after the command. In it, `$s` is the exit code of the command.
    """
    return _WATCHED.format(seconds=max(1.0, seconds), command=command, ending=ending)


def ssh(command: str, seconds: float, options: Sequence[str] = ()) -> OnePerNode:
    """Return the ssh command for each node. It never prompts for a password. %h in `command` is the node's name."""
    usual = ("-x", "-a", "-oBatchMode=yes", f"-oConnectTimeout={max(1, round(seconds))}")

    def node_command(node: str) -> Sequence[str]:
        asked = script(_named(command, node), seconds)
        return ["ssh", *options, *usual, "--", node, f"sh -c {shlex.quote(asked)}"]

    return OnePerNode(node_command)


def local(command: str, seconds: float) -> OnePerNode:
    """Return a local command for each node, for tests and network namespaces: `ip netns exec %h hangwatch`.

    %h in `command` is the name of the node. As with ssh(1), the script runs in an inner shell, and only the outer
    shell is killed. If the script itself were killed before it starts its watcher, the command would continue to
    run.
    """
    return OnePerNode(lambda node: ["sh", "-c", 'sh -c "$0"; exit $?', script(_named(command, node), seconds)])


def _named(command: str, node: str) -> str:
    return command.replace("%h", shlex.quote(node))


def kubectl(command: str, seconds: float, pods: Mapping[str, Pod], options: Sequence[str] = ()) -> OnePerNode:
    """Return the kubectl command for each node, in its hangwatch pod. %h in `command` is the node's name."""

    def node_command(node: str) -> Sequence[str]:
        pod = pods[node]
        where = ["--namespace", pod.namespace, pod.name, "--container", "hangwatch"]
        return ["kubectl", *options, "exec", "-i", *where, "--", "sh", "-c", script(_named(command, node), seconds)]

    return OnePerNode(node_command)


def pods_by_node(listed: bytes) -> dict[str, Pod]:
    """Parse the output of `kubectl get pods --output json`. Return the pods by node. Raises ValueError."""
    found = decoding.decode_json(listed, _List)
    return {item.spec.node: Pod(item.metadata.namespace, item.metadata.name) for item in found.items if item.spec.node}


def nodes_of_pods(listed: bytes) -> list[str]:
    """Return the nodes of pods that have not ended in `kubectl get pods --output json`. Raises ValueError."""
    found = decoding.decode_json(listed, _List)
    return sorted({item.spec.node for item in found.items if item.spec.node and item.status.phase not in _ENDED})


def pdsh(command: str, seconds: float, nodes: str, fanout: int, options: Sequence[str] = ()) -> OneForAll:
    """Return one pdsh command for all nodes. The script on each node has the deadline, not pdsh."""
    asked = f"sh -c {shlex.quote(script(command, seconds))}"
    return OneForAll(["pdsh", "-f", str(fanout), *options, "-w", nodes, asked], _labelled(_PDSH_LINE), _pdsh_status)


def srun(command: str, seconds: float, nodes: Sequence[str], job: str, options: Sequence[str] = ()) -> OneForAll:
    """Return one srun command for all nodes: a step of the Slurm job `job`, with one task on each node, without a GPU.

    Each task first prints its node's name from SLURMD_NODENAME. %h in `command` is the node's name.
    """
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
