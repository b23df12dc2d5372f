"""The strongly connected components of a graph. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from hangwatch.model.keyed_lists import list_by_key

Node = TypeVar("Node")


def strongly_connected(ways: Mapping[Node, Sequence[Node]]) -> Iterator[list[Node]]:
    """Yield the strongly connected components of a graph, by Kosaraju's algorithm without recursion.

    `ways` maps each node to the nodes to which it has an edge. Each node is in exactly one component. The time grows
    linearly with the number of nodes and edges.
    """
    backward = list_by_key((other, node) for node, following in ways.items() for other in following)
    completed = [node for part in _walk(ways, ways) for node in part]
    yield from _walk(backward, reversed(completed))


def _walk(ways: Mapping[Node, Sequence[Node]], roots: Iterable[Node]) -> Iterator[list[Node]]:
    """Yield the nodes that each root reaches and no earlier root does, in the order in which the walk leaves them."""
    seen: set[Node] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        path = [(root, iter(ways.get(root, ())))]
        part = []
        while path:
            node, further = path[-1]
            following = next((other for other in further if other not in seen), None)
            if following is None:
                part.append(node)
                path.pop()
            else:
                seen.add(following)
                path.append((following, iter(ways.get(following, ()))))
        yield part
