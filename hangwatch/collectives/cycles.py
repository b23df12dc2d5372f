"""The strongly connected components of a graph. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

Node = TypeVar("Node")


def strongly_connected(ways: Mapping[Node, Sequence[Node]]) -> Iterator[list[Node]]:
    """Yield the strongly connected components of a graph, by Tarjan's algorithm without recursion.

    `ways` maps each node to the nodes to which it has an edge. Each node is in exactly one component. The time grows
    linearly with the number of nodes and edges.
    """
    order: dict[Node, int] = {}
    lowest: dict[Node, int] = {}
    stack: list[Node] = []
    on_stack: set[Node] = set()
    for root in ways:
        if root in order:
            continue
        path = [(root, iter(ways[root]))]
        order[root] = lowest[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while path:
            node, further = path[-1]
            following = next(further, None)
            if following is None:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
                if lowest[node] == order[node]:
                    part = []
                    while True:
                        part.append(stack.pop())
                        on_stack.discard(part[-1])
                        if part[-1] == node:
                            break
                    yield part
            elif following not in order:
                order[following] = lowest[following] = len(order)
                stack.append(following)
                on_stack.add(following)
                path.append((following, iter(ways.get(following, ()))))
            elif following in on_stack:
                lowest[node] = min(lowest[node], order[following])
