"""The leaf switch of a node, from the environment of Slurm's tasks or from a file. It is used only in messages."""

import os
import re
from pathlib import Path

from hangwatch import words
from hangwatch.errors import UserError
from hangwatch.formats import bounded_read
from hangwatch.formats.sighting import SWITCH_ADDRESS
from hangwatch.model import Value
from hangwatch.tools.fleet import nodeset

_MOST_BYTES = 4 << 20
_MOST_CHARACTERS = 64
_SWITCH = re.compile(r"switchname\s*=\s*(\S+)", re.IGNORECASE)
_NODES = re.compile(r"\bnodes\s*=\s*(\S+)", re.IGNORECASE)
_PAIR = re.compile(r"(\S+)\s*:\s*(\S+)")


class TopologyError(UserError):
    """An invalid topology file. The message names the line."""


class Leaf(Value, frozen=True):
    """The leaf switch of a node, as short printable text, and its source: the name of a variable or file."""

    switch: str
    source: str


def leaf_by_slurm(address: str) -> Leaf | None:
    """Return the leaf switch in `address`, the value of SLURM_TOPOLOGY_ADDR; None if it contains no switch.

    The value lists the switches from the root to the node, separated by dots. See srun(1).
    """
    *_, switch, node = ["", "", *address.split(".")]
    return Leaf(_printable(switch), SWITCH_ADDRESS) if switch and node else None


def read(path: Path) -> dict[str, Leaf]:
    """Read a topology file and return the leaf switch of each node.

    The lines are `SwitchName=s1 Nodes=node[1-8]`, as in Slurm's topology.conf(5), or `node[1-8]: s1`. A line with a
    switch but no nodes is skipped. Raises TopologyError, and NodesError for an invalid set of nodes.
    """
    try:
        text = bounded_read.read(path, _MOST_BYTES, flags=os.O_NONBLOCK).decode("utf-8", "replace")
    except bounded_read.FileError as error:
        raise TopologyError(f"--topology {error}") from None
    leaves: dict[str, Leaf] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        switch, nodes = _SWITCH.search(entry), _NODES.search(entry)
        pair = _PAIR.fullmatch(entry)
        if switch is None and pair is None:
            raise TopologyError(f"--topology {path}:{number}: must be SwitchName=... Nodes=..., or NODES: SWITCH")
        name, of = (pair[2], pair[1]) if switch is None and pair else (switch[1] if switch else "", nodes and nodes[1])
        for node in nodeset.expand(of) if of else ():
            leaves[node] = Leaf(_printable(name), path.name)
        if len(leaves) > nodeset.MOST_NODES:
            raise TopologyError(f"--topology {path}: more than {nodeset.MOST_NODES:,} nodes")
    if not leaves:
        raise TopologyError(f"--topology {path}: has no line that assigns nodes to a switch")
    return leaves


def _printable(name: str) -> str:
    return words.elided(words.printable(name), _MOST_CHARACTERS)
