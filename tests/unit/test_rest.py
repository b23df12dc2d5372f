"""When a job rests: what one rank more or less, one connection or one other signature makes of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hangwatch.hang.culprit import judge
from hangwatch.hang.rest import resting_state
from hangwatch.model import Fault, Group, Grouping, JobState, Member, RankId, Signature

LINGERS = Member(id=RankId(node="n1"), signature=Signature.BLOCKED, motion=Signature.BLOCKED.motion, state="S", peers=0)
STOPPED = replace(LINGERS, signature=Signature.STOPPED, state="T")
GONE = replace(LINGERS, signature=Signature.GONE, peers=None)


def resting(*members: Member, world_size: int | None = 2) -> JobState | None:
    seated = tuple(
        replace(one, id=RankId(node="n1", rank=rank), motion=one.signature.motion) for rank, one in enumerate(members)
    )
    group = Group(key="k", activity="unknown", members=seated)
    return resting_state(Grouping(groups=(group,), world_size=world_size))


@pytest.mark.parametrize(
    ("name", "members", "expected"),
    [
        ("all stopped", (STOPPED, STOPPED), JobState.SUSPENDED),
        ("one stopped", (STOPPED, LINGERS), None),
        ("all linger", (LINGERS, LINGERS), JobState.OVER),
        ("rank 0 alone is left", (LINGERS, GONE), JobState.OVER),
        ("nobody is left", (GONE, GONE), None),
        ("one is connected to another", (LINGERS, replace(LINGERS, peers=1)), None),
        ("of one nobody knows", (LINGERS, replace(LINGERS, peers=None)), None),
        ("one spins", (LINGERS, replace(LINGERS, signature=Signature.SPINS)), None),
        ("one stands behind its GPU", (LINGERS, replace(LINGERS, signature=Signature.BEHIND_GPU)), None),
        ("one is blocked in the kernel", (LINGERS, replace(LINGERS, state="D")), None),
        ("one GPU is in use", (LINGERS, replace(LINGERS, utilization_ratio=0.05)), None),
        ("one uploads", (LINGERS, replace(LINGERS, signature=Signature.TRANSFERS)), JobState.OVER),
        ("two of three compute", (LINGERS, *[replace(LINGERS, signature=Signature.COMPUTES)] * 2), None),
    ],
)
def test_who_rests(name: str, members: tuple[Member, ...], expected: JobState | None) -> None:
    assert resting(*members) is expected, name


@pytest.mark.parametrize("world_size", [None, 1])
def test_a_job_of_one_rank_and_one_of_which_nothing_says_how_many_there_are_is_never_over(
    world_size: int | None,
) -> None:
    assert resting(LINGERS, world_size=world_size) is None


def test_of_a_rank_without_a_stack_nobody_knows_what_it_waits_for() -> None:
    fault = Fault(subject="pid 1", reason="DumperStuck", detail="py-spy hangs")
    groups = tuple(
        Group(
            key=str(rank), activity="unknown", members=(replace(LINGERS, id=RankId(node="n1", rank=rank)),), fault=why
        )
        for rank, why in enumerate((None, fault))
    )
    assert resting_state(Grouping(groups=groups, world_size=2)) is None
    assert resting_state(Grouping(groups=(groups[0], replace(groups[1], fault=None)), world_size=2)) is JobState.OVER


def test_a_job_at_rest_accuses_nobody() -> None:
    members = tuple(replace(STOPPED, id=RankId(node="n1", rank=rank)) for rank in range(8))
    verdict = judge(Grouping(groups=(Group(key="k", activity="unknown", members=members),), world_size=8))
    assert (verdict.kind, verdict.named) == ("Suspended", ())
    assert verdict.message.startswith("All 8 ranks are stopped: scontrol suspend")
