"""Sentences of a verdict that a reader could take for something else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hangwatch.hang import activity, wording
from hangwatch.hang.culprit import judge
from hangwatch.model import Frame, Group, Grouping, Member, Motion, RankId


def group(name: str, ranks: range, *functions: str, node: str = "n1") -> Group:
    return Group(
        key=f"{name}{ranks.start}",
        activity=name,
        waits_for=activity.known(name).waits_for,
        operation="barrier" if name == "collective_wait" else None,
        frames=tuple(Frame(function=one, file="train.py", line=1) for one in functions),
        members=tuple(Member(id=RankId(node=node, rank=rank), motion=Motion.FROZEN, rounds=3) for rank in ranks),
    )


def test_two_are_both() -> None:
    assert wording.others_wait([group("collective_wait", range(2))]) == "both other ranks wait in barrier"
    assert wording.others_wait([group("collective_wait", range(3))]) == "all 3 other ranks wait in barrier"
    assert judge(Grouping(groups=(group("collective_wait", range(2)),))).message.startswith("Both ranks that answered")


def test_who_waits_for_locks_waits_for_locks_and_not_for_something_else() -> None:
    assert wording.others_wait([group("lock", range(3))]).startswith("all 3 other ranks wait for a lock")
    two = wording.others_wait([group("lock", range(3)), group("thread_wait", range(3, 4))])
    assert two.startswith("all 4 other ranks wait for locks or threads: lock (3 ranks) and thread wait (1 rank)")


@pytest.mark.parametrize(("inner", "told"), [("save", "save (train.py:1)"), ("load", "load (train.py:1)")])
def test_of_two_groups_with_the_same_words_the_first_frame_that_differs_is_told(inner: str, told: str) -> None:
    one, two = group("unknown", range(2), "read", inner, "main"), group("unknown", range(2, 4), "read", "other", "main")
    first, second = wording.each([one, two])
    assert first.endswith(f" in {told}") and second.endswith(" in other (train.py:1)")
    assert not wording.each([one])[0].endswith(told)


def test_that_nobody_waits_is_said_of_waits_that_are_known() -> None:
    message = judge(Grouping(groups=(group("unknown", range(2), "a"), group("unknown", range(2, 4), "b")))).message
    assert message.startswith("No rank is in a wait for others that is known")


@pytest.mark.parametrize(
    ("odd", "said"),
    [(range(4, 8), " These are all ranks of n2: look at the node."), (range(4, 7), ""), (range(4, 5), "")],
    ids=["a whole node", "all but one", "one of a node"],
)
def test_a_node_that_is_odd_as_a_whole_is_told(odd: range, said: str) -> None:
    here = group("collective_wait", range(4))
    waiting = group("collective_wait", range(odd.stop, 9 if odd.stop < 8 else 8), node="n2")
    there = group("storage", odd, node="n2")
    members = (*here.members, *waiting.members)
    found = Grouping(groups=(replace(here, members=members), there))
    named = list(there.members)
    assert wording.whole_nodes(named, found) == said
    assert wording.whole_nodes(named, Grouping(groups=(there,))) == "", "nothing else is in view"
