"""Cycles of a graph, compared with a walk from each node."""

from hypothesis import given
from hypothesis import strategies as st

from hangwatch.collectives.cycles import strongly_connected

NODES = st.integers(0, 7)


def reached(ways: dict[int, list[int]], start: int) -> set[int]:
    found, ahead = {start}, [start]
    while ahead:
        new = set(ways.get(ahead.pop(), ())) - found
        found |= new
        ahead += new
    return found


@given(st.dictionaries(NODES, st.lists(NODES, max_size=4), max_size=8))
def test_two_nodes_are_in_one_part_where_each_leads_to_the_other(ways: dict[int, list[int]]) -> None:
    parts = [frozenset(part) for part in strongly_connected(ways)]
    nodes = {*ways, *(node for ahead in ways.values() for node in ahead)}
    by_walking = {node: reached(ways, node) for node in nodes}
    expected = {frozenset(other for other in by_walking[node] if node in by_walking[other]) for node in nodes}
    assert set(parts) == expected
    assert sum(map(len, parts)) == len(nodes), "each node is in one"


def test_a_very_long_way_needs_no_recursion() -> None:
    count = 100_000
    ring = {node: [(node + 1) % count] for node in range(count)}
    assert [len(part) for part in strongly_connected(ring)] == [count]
