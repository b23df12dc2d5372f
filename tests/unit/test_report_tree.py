"""The merged tree of stacks.

A rank is in each node of its path and in one leaf. Larger branches come first.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from hangwatch.model import Fault, Frame, Group, Member, RankId
from hangwatch.report.stack_tree import Node, merge_tree

FUNCTIONS = st.sampled_from(["main", "train", "step", "all_reduce", "__next__"])
FILES = st.sampled_from(["a.py", "b.py"])
FRAMES = st.builds(Frame, function=FUNCTIONS, file=FILES, line=st.sampled_from([None, 1, 2]))


@st.composite
def grouped(draw: st.DrawFn) -> list[Group]:
    stacks = draw(st.lists(st.lists(FRAMES, max_size=6).map(tuple), max_size=8))
    sizes = draw(st.lists(st.integers(1, 5), min_size=len(stacks), max_size=len(stacks)))
    ranks = iter(range(100))
    return [
        Group(
            key=f"k{number}",
            activity="unknown",
            frames=stack,
            members=tuple(Member(id=RankId(rank=next(ranks))) for _ in range(size)),
        )
        for number, (stack, size) in enumerate(zip(stacks, sizes, strict=True))
    ]


def nodes(trees: tuple[Node, ...]) -> Iterator[Node]:
    for tree in trees:
        yield tree
        yield from nodes(tree.children)


def paths(
    trees: tuple[Node, ...], above: tuple[tuple[str, str], ...] = ()
) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """Yield each group's key with the functions and files of the frames on its path."""
    for tree in trees:
        way = above + tuple((frame.function, frame.file) for frame in tree.frames)
        yield from ((group.key, way) for group in tree.ends)
        yield from paths(tree.children, way)


@given(grouped())
def test_every_rank_ends_exactly_once(groups: list[Group]) -> None:
    ends = Counter(member.id for node in nodes(merge_tree(groups)) for group in node.ends for member in group.members)
    assert ends == Counter({member.id: 1 for group in groups for member in group.members})


@given(grouped())
def test_a_node_holds_the_ranks_of_its_ends_and_branches(groups: list[Group]) -> None:
    for node in nodes(merge_tree(groups)):
        below = [rank for child in node.children for rank in child.ids]
        ends = [member.id for group in node.ends for member in group.members]
        assert sorted(node.ids, key=RankId.sort_key) == sorted(below + ends, key=RankId.sort_key)
        assert [group.key for group in node.below()] == [g.key for n in nodes((node,)) for g in n.ends]


@given(grouped())
def test_the_way_to_an_end_is_the_stack(groups: list[Group]) -> None:
    expected = {group.key: tuple((f.function, f.file) for f in reversed(group.frames)) for group in groups}
    assert dict(paths(merge_tree(groups))) == expected


@given(grouped())
def test_branches_differ_and_are_ordered_by_size(groups: list[Group]) -> None:
    trees = merge_tree(groups)
    for children in (trees, *(node.children for node in nodes(trees))):
        first = [
            (child.frames[0].function, child.frames[0].file, child.frames[0].line) for child in children if child.frames
        ]
        assert len(set(first)) == len(first)
        assert [len(child.ids) for child in children] == sorted((len(child.ids) for child in children), reverse=True)


@given(grouped(), st.randoms())
def test_the_order_of_groups_does_not_change_the_tree(groups: list[Group], order: random.Random) -> None:
    shuffled = list(groups)
    order.shuffle(shuffled)
    assert sorted(paths(merge_tree(shuffled))) == sorted(paths(merge_tree(groups)))


def _in_main(key: str, line: int, called: str = "step") -> Group:
    frames = (Frame(function=called, file="t.py", line=9), Frame(function="main", file="t.py", line=line))
    return Group(key=key, activity="unknown", frames=frames, members=(Member(id=RankId(rank=line)),))


def test_a_line_is_shown_where_all_agree() -> None:
    (tree,) = merge_tree([_in_main("a", 1), _in_main("b", 2, "save")])
    assert [str(frame) for frame in tree.frames] == ["main (t.py)"]
    assert [str(frame) for child in tree.children for frame in child.frames] == ["step (t.py:9)", "save (t.py:9)"]


def test_stacks_that_differ_in_lines_only_part_at_the_first_that_differs() -> None:
    trees = merge_tree([_in_main("a", 1), _in_main("b", 2)])
    assert [[str(frame) for frame in tree.frames] for tree in trees] == [
        ["main (t.py:1)", "step (t.py:9)"],
        ["main (t.py:2)", "step (t.py:9)"],
    ]


def test_group_without_a_stack_is_a_separate_tree_node() -> None:
    fault = Fault(subject="pid 1", reason="Uninterruptible", detail="blocked")
    blocked = Group(key="b", activity="unknown", fault=fault, members=(Member(id=RankId(rank=1)),))
    trees = merge_tree([blocked])
    assert [(node.frames, node.ends) for node in trees] == [((), (blocked,))]


def test_a_stack_of_a_thousand_frames() -> None:
    deep = tuple(Frame(function=f"f{number}", file="deep.py") for number in range(5000))
    (tree,) = merge_tree([Group(key="a", activity="unknown", frames=deep, members=(Member(id=RankId(rank=0)),))])
    assert len(tree.frames) == 5000


def test_a_very_deep_stack_is_drawn_in_the_time_of_its_frames() -> None:
    """An earlier version compared each frame with all others, which took minutes of CPU time. The limit allows for slow
    machines.
    """
    frames = tuple(Frame(function="call", file="a.py", line=1) for _ in range(20_000))
    deep = [
        Group(key=f"k{rank}", activity="unknown", frames=frames, members=(Member(id=RankId(rank=rank)),))
        for rank in range(2)
    ]
    begin = time.process_time()
    (tree,) = merge_tree(deep)
    assert time.process_time() - begin < 60
    assert len(tree.frames) == 20_000
    assert len(tree.ends) == 2
