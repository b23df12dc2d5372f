"""Sets of nodes in ClusterShell's syntax, which Slurm uses too: `node[1-40]`, `@group`."""

from __future__ import annotations

import re

from hangwatch.errors import UserError

MOST_NODES = 1 << 16
_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class NodesError(UserError):
    """An invalid set of nodes. The message gives the reason."""


def expand(text: str) -> list[str]:
    """Return the names in a set of nodes, each once. Raises NodesError.

    Only host names are accepted. A name that begins with "-" would be an option of ssh.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException
    from ClusterShell.NodeUtils import GroupResolverError

    sizes = [_size(*ends) for ends in _RANGE.findall(text)]
    if any(size > MOST_NODES for size in sizes):
        raise NodesError(f"--nodes {text[:80]}: more than {MOST_NODES:,} nodes")
    try:
        nodes = NodeSet(text)
        if len(nodes) > MOST_NODES:
            raise NodesError(f"--nodes {text[:80]}: more than {MOST_NODES:,} nodes")
        names = [str(name) for name in nodes]
    except (NodeSetException, GroupResolverError) as error:
        raise NodesError(f"--nodes {text[:80]}: {error}") from None
    if not names:
        raise NodesError(f"--nodes {text[:80]!r}: contains no node")
    return check_names(names)


def check_names(names: list[str]) -> list[str]:
    """Return the names unchanged. Raises NodesError for a name that is not a host name."""
    strange = next((name for name in names if not _NAME.fullmatch(name)), None)
    if strange is not None:
        raise NodesError(f"--nodes: {strange!r} is not a host name")
    return names


def _size(first: str, last: str) -> int:
    return MOST_NODES + 1 if max(len(first), len(last)) > 18 else int(last) - int(first)
