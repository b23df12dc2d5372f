"""Ranks in a state that cannot end by itself, while other ranks wait for them."""

import pytest
from msgspec.structs import replace

from hangwatch.model import CallTarget, Group, Grouping, KernelCall, KernelFacts, Signature, Verdict, Waits
from hangwatch.verdict import judge
from hangwatch.verdict.permanence import find_permanent, find_waiting
from tests import samples
from tests.unit.test_waitfor import done, standing, waits


def with_odd(signature: Signature, kernel: KernelFacts | None = None, waits_facts: Waits | None = None) -> Grouping:
    """Return a grouping in which all ranks except rank 3 wait in a collective."""
    odd = replace(samples.member(3), signature=signature, kernel=kernel or KernelFacts(), waits=waits_facts or Waits())
    group = Group(key="odd", activity="unknown", waits_for="nothing", members=(odd,), gone=signature is Signature.GONE)
    return Grouping(groups=(samples.waiting(rank for rank in range(8) if rank != 3), group), world_size=8)


def permanent(grouping: Grouping) -> list[int | None]:
    odd = grouping.groups[-1].members[0].id
    named = Verdict(kind="OutsideCollective", message="Rank 3.", named=(odd,))
    return [rank.rank for rank in find_permanent(grouping, named)]


def reading(state: str, kind: str = "pipe") -> KernelFacts:
    target = CallTarget(kind=kind, what="pipe:[7]", other_pid=9, other_comm="loader", other_state=state)  # type: ignore[arg-type]
    return KernelFacts(call=KernelCall(name="read", says="read from", rounds=3, descriptors=1, behind=(target,)))


@pytest.mark.parametrize(
    ("grouping", "is_permanent"),
    [
        (with_odd(Signature.GONE), True),
        (with_odd(Signature.STOPPED), True),
        (with_odd(Signature.STOPPED, waits_facts=Waits(tracer="gdb (pid 8)")), False),
        (with_odd(Signature.STOPPED, waits_facts=Waits(frozen_cgroup="/pod")), False),
        (with_odd(Signature.BLOCKED), False),
        (with_odd(Signature.BLOCKED, reading("T")), True),
        (with_odd(Signature.BLOCKED, reading("S")), False),
        (with_odd(Signature.BLOCKED, reading("T", "connection")), False),
    ],
    ids=["gone", "stopped", "traced", "frozen", "blocked", "stopped peer", "living peer", "connection"],
)
def test_named_rank_is_permanent_by_its_state(grouping: Grouping, is_permanent: bool) -> None:
    assert permanent(grouping) == ([3] if is_permanent else [])


def test_no_rank_is_permanent_if_none_waits_for_it() -> None:
    grouping = with_odd(Signature.STOPPED)
    alone = replace(grouping, groups=grouping.groups[1:])
    assert not list(find_waiting(alone)) and permanent(alone) == []


def test_rank_that_ended_while_others_leave_the_job_is_not_permanent() -> None:
    grouping = with_odd(Signature.GONE)
    leaving = replace(grouping.groups[0], activity="leaving")
    assert permanent(replace(grouping, groups=(leaving, grouping.groups[1]))) == []


def test_rank_that_is_not_named_is_not_permanent() -> None:
    grouping = with_odd(Signature.STOPPED)
    assert find_permanent(grouping, Verdict(kind="CannotTell", message="No rank can be named.")) == frozenset()


def test_cycle_by_sequence_numbers_is_permanent() -> None:
    """Rank 0 waits in its group for rank 1, which waits in the default group for rank 0."""
    first = standing(0, waits(3, "1") | done(2))
    second = standing(1, waits(3) | done(2, "1"))
    grouping = Grouping(
        groups=(Group(key="w", activity="collective_wait", waits_for="ranks", members=(first, second)),), world_size=2
    )
    verdict = judge.judge(grouping)
    assert verdict.kind == "Cycle", verdict
    assert {rank.rank for rank in find_permanent(grouping, verdict)} == {0, 1}
