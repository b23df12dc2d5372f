"""Ranks and node names, folded: the one door to ClusterShell's sets."""

from __future__ import annotations

from collections.abc import Iterable

from ClusterShell.NodeSet import NodeSet, NodeSetException
from ClusterShell.RangeSet import RangeSet


def fold_ranks(ranks: Iterable[int]) -> str:
    """Rank numbers as ranges: 0, 1, 2, 5 is "0-2,5"; empty for none."""
    return str(RangeSet.fromlist([str(rank) for rank in ranks]))


def fold_nodes(nodes: Iterable[str]) -> str:
    """Node names as a set: node1, node2, node3 is "node[1-3]"; names that ClusterShell cannot read are listed."""
    names = sorted(set(nodes))
    try:
        return str(NodeSet.fromlist(names))
    except NodeSetException:
        return ",".join(names)


def expand_nodes(text: str) -> tuple[str, ...]:
    """The names in a node set such as "node[1-3],login1", sorted.

    Raises ValueError when the text is no node set.
    """
    try:
        return tuple(str(name) for name in NodeSet(text))
    except NodeSetException as error:
        raise ValueError(f"{text!r} is no node set ({error}): write names such as node[1-40] or a1,a2") from None
