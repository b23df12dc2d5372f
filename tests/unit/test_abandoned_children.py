"""Limits on abandoned children, in total and per user.

An abandoned child is a helper process that cannot be ended. When it ends at last, it no longer counts.
"""

from collections.abc import Iterator

import pytest

from hangwatch.model import ProcessId
from hangwatch.probes.child import MOST_ABANDONED, MOST_ABANDONED_OF_SHARE, AbandonedChildren, Child
from tests.conftest import wait_for


@pytest.fixture
def child() -> Iterator[Child]:
    one = Child(["sleep", "600"])
    yield one
    assert one.end(10.0)


def target(number: int) -> ProcessId:
    return ProcessId(pid=number, start_ticks=1)


def fill(abandoned: AbandonedChildren, child: Child, share: int, count: int) -> int:
    """Abandon children of user `share`, at most `count`, until the limit is reached.

    Return the number of abandoned children.
    """
    for number in range(count):
        if not abandoned.begin(f"uid {share}", 0.0):
            return number
        abandoned.end(f"uid {share}", target(1000 * share + number), child)
    return count


def test_one_user_cannot_use_up_what_all_share(child: Child) -> None:
    left = AbandonedChildren()
    assert fill(left, child, 1, 100) == MOST_ABANDONED_OF_SHARE
    assert left.begin("uid 2", 0.0)


def test_there_is_a_bound_over_all(child: Child) -> None:
    left = AbandonedChildren()
    assert sum(fill(left, child, user, 100) for user in range(1, 20)) == MOST_ABANDONED == left.count()


def test_what_still_runs_counts_as_if_it_stayed(child: Child) -> None:
    left = AbandonedChildren()
    assert [left.begin("uid 1", 0.0) for _ in range(MOST_ABANDONED_OF_SHARE + 1)] == [
        True
    ] * MOST_ABANDONED_OF_SHARE + [False]
    left.end("uid 1", target(1), None)
    assert left.begin("uid 1", 0.0)


def test_those_that_end_are_reaped_and_forgotten(child: Child) -> None:
    left = AbandonedChildren()
    fill(left, child, 1, MOST_ABANDONED_OF_SHARE)
    assert left.pid_for(target(1000)) == child.pid
    child.kill()
    wait_for(lambda: left.count() == 0, "the child to be reaped")
    assert (left.pid_for(target(1000)), left.begin("uid 1", 0.0)) == (None, True)
