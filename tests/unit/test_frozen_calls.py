"""Ranks that the kernel holds in one call while GPUs draw full power: frozen only if sequence numbers name them."""

from typing import Any

import pytest
from msgspec import structs

from hangwatch.model import (
    FileLock,
    Frame,
    Group,
    Grouping,
    KernelCall,
    KernelFacts,
    Member,
    Motion,
    Signature,
    StackFacts,
    Usage,
    Waits,
)
from hangwatch.verdict.frozen_calls import with_frozen_ranks
from tests.unit.test_waitfor import WORLD, done, standing, waits

AWAITS_CHILD = KernelCall(name="wait4", says="wait4() for", rounds=3, child_pid=9, child_state="T")
OWN = Frame(function="read_shard", file="train.py", line=3)
FIFO: dict[str, Any] = {"waits": Waits(object="file"), "kernel": KernelFacts(wchan="wait_for_partner")}


def at_work(member: Member, **given: Any) -> Member:
    usage = Usage(switches_per_second=0.0)
    values = {
        "usage": usage,
        "stack": StackFacts(user_frames=(OWN,)),
        "rounds": 3,
        "signature": Signature.GPU_WORKS,
        "motion": Motion.MOVING,
        **given,
    }
    return structs.replace(member, **values)


def job(odd: Member, *, others: int = 3, **given: Any) -> Grouping:
    waiting = tuple(at_work(standing(rank, waits(6)), **given) for rank in range(others))
    return Grouping(
        groups=(
            Group(key="w", activity="collective_wait", waits_for="ranks", members=waiting),
            Group(key="o", activity="unknown", frames=(OWN,), members=(odd,)),
        ),
        world_size=4,
    )


def motions(grouping: Grouping) -> set[Motion]:
    return {member.motion for member in with_frozen_ranks(grouping).members}


@pytest.mark.parametrize(
    "held",
    [
        FIFO,
        {"waits": Waits(file_lock=FileLock(path="/data/lock", holder_pid=77))},
        {"kernel": KernelFacts(call=AWAITS_CHILD), "waits": Waits(object="child")},
        {**FIFO, "signature": Signature.BLOCKED, "motion": Motion.FROZEN},
    ],
    ids=["a FIFO", "a lock of another process", "a stopped child", "only the others' GPUs are at work"],
)
def test_rank_held_in_a_call_is_frozen_with_the_ranks_that_wait_for_it(held: dict[str, Any]) -> None:
    assert motions(job(at_work(standing(3, done(5)), **held))) == {Motion.FROZEN}


@pytest.mark.parametrize(
    ("main_cpu_ratio", "motion"), [(0.01, Motion.FROZEN), (0.6, Motion.MOVING), (None, Motion.MOVING)]
)
def test_rank_that_tries_its_collective_again_progresses_only_if_it_computes(
    main_cpu_ratio: float | None, motion: Motion
) -> None:
    odd = at_work(standing(3, done(5)), **FIFO, signature=Signature.BLOCKED, motion=Motion.FROZEN)
    usage = Usage(switches_per_second=9.0, main_cpu_ratio=main_cpu_ratio)
    tried = with_frozen_ranks(job(odd, signature=Signature.COMPUTES, usage=usage))
    assert [member.motion for member in tried.members] == [*[motion] * 3, Motion.FROZEN]


MAY_STILL_JOIN = {
    "it evaluates": at_work(standing(3, done(5))),
    "it returns from its calls": at_work(standing(3, done(5)), **{**FIFO, "usage": Usage(switches_per_second=0.4)}),
    "switches were not counted": at_work(standing(3, done(5)), **{**FIFO, "usage": Usage()}),
    "it reads a slow mount in one call": at_work(
        standing(3, done(5)), waits=Waits(object="file"), kernel=KernelFacts(wchan="folio_wait_bit")
    ),
    "it receives from outside": at_work(standing(3, done(5)), waits=Waits(object="socket", awaited=None)),
    "it waits for a child that works": at_work(
        standing(3, done(5)), waits=Waits(object="child"), kernel=KernelFacts(wchan="do_wait")
    ),
    "the holder of its lock is unknown": at_work(
        standing(3, done(5)), waits=Waits(file_lock=FileLock(path="/data/lock"))
    ),
    "it has joined": at_work(standing(3, {WORLD: (6, 6)}), **FIFO),
}


@pytest.mark.parametrize("odd", MAY_STILL_JOIN.values(), ids=MAY_STILL_JOIN)
def test_rank_that_may_still_join_keeps_the_motion_that_power_shows(odd: Member) -> None:
    assert motions(job(odd)) == {Motion.MOVING}


def test_rank_is_not_frozen_if_another_rank_of_the_job_is_unknown() -> None:
    assert motions(job(at_work(standing(3, done(5)), **FIFO), others=2)) == {Motion.MOVING}
