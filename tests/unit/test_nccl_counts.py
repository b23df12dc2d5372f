"""Late and slow ranks by the counts of NCCL, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from hangwatch.collectives import nccl_counts
from hangwatch.fleet.merge import merge
from hangwatch.formats.nccl_ras_status import RasStatus, parse
from hangwatch.model import (
    Confidence,
    Frame,
    Group,
    Grouping,
    Member,
    Motion,
    ProcessId,
    RankId,
    RecorderFacts,
    Verdict,
)
from hangwatch.verdict import judge
from tests import nccl_ras
from tests.nccl_ras import as_json, communicator, missing, rank

WAIT = Frame(function="all_reduce", file="torch/distributed/distributed_c10d.py", line=9)
OWN = Frame(function="write_metrics", file="metrics.py", line=31)
HERE = [ProcessId(pid=100 + number, start_ticks=1) for number in range(4)]
NAMES = {("10.0.0.1", process.pid): process for process in HERE}


def status(counts: Sequence[int], *, operation: str = "AllReduce", lost: Sequence[int] = ()) -> RasStatus:
    ranks = [
        rank(number, 100 + number, "10.0.0.1", **{operation: count})
        for number, count in enumerate(counts)
        if number not in lost
    ]
    return parse(as_json(communicator(ranks, [missing(number, 100 + number, "10.0.0.1") for number in lost])).encode())


def members(*statuses: RasStatus, world_size: int | None = 4) -> list[Member]:
    said = nccl_counts.counts_by_rank([(10.0 * at, one) for at, one in enumerate(statuses)], NAMES, HERE, world_size)
    return [
        Member(
            id=RankId(node="gpu01", rank=number, local_rank=number, pid=process.pid),
            motion=Motion.FROZEN,
            rounds=3,
            recorder=RecorderFacts(nccl_ras=said.get(process)),
        )
        for number, process in enumerate(HERE)
    ]


def waiting(*of: Member, key: str = "w") -> Group:
    frames = (WAIT, Frame(function="main", file="train.py", line=3))
    return Group(
        key=key, activity="collective_wait", operation="all_reduce", waits_for="ranks", frames=frames, members=of
    )


def outside(*of: Member) -> Group:
    own = tuple(structs.replace(member, stack=structs.replace(member.stack, user_frames=(OWN,))) for member in of)
    return Group(key="o", activity="unknown", waits_for="unknown", frames=(OWN,), members=own)


def judged(*groups: Group, world_size: int = 4) -> Verdict:
    return judge.judge(Grouping(groups=groups, world_size=world_size))


def quoted(verdict: Verdict) -> list[str]:
    return [vote.message for vote in verdict.evidence if vote.kind == "nccl_ras"]


def test_rank_behind_in_counts_and_outside_the_collective_is_named() -> None:
    first, *rest, last = members(*[status([7, 7, 7, 6])] * 3)
    verdict = judged(waiting(first, *rest), outside(last))
    assert (verdict.kind, [one.rank for one in verdict.named]) == ("NotJoined", [3])
    assert verdict.confidence is Confidence.HIGH
    assert "It has not joined AllReduce #7 of communicator 0x27a079b828ff1a75 of ranks 0-3" in verdict.message
    assert "metrics.py:31" in verdict.message
    assert quoted(verdict) == [
        "NCCL 2.28.9 (RAS), unchanged in 3 answers over 20 s: communicator 0x27a079b828ff1a75 with 4 ranks: "
        "rank 3 has launched 6 AllReduce; ranks 0-2 have launched 7 AllReduce"
    ]
    assert (
        judged(
            waiting(first, *rest),
            outside(structs.replace(last, recorder=structs.replace(last.recorder, nccl_ras=None))),
        ).kind
        != "NotJoined"
    )


def test_rank_behind_in_counts_with_equal_stack_is_checked_first() -> None:
    verdict = judged(waiting(*members(*[status([7, 6, 7, 7])] * 3)))
    assert (verdict.named, [one.rank for one in verdict.check_first]) == ((), [1])
    assert "Its stack shows a wait, too" in verdict.message


@pytest.mark.parametrize(
    "statuses",
    [
        [status([7, 6, 7, 7]), status([7, 7, 7, 7]), status([8, 7, 8, 8])],
        [status([7, 6, 7, 7]), status([7, 6, 7, 7]), status([8, 7, 8, 8])],
        [status([7, 6, 7, 7], operation="Send")] * 3,
        [status([6, 6, 6, 7])] * 3,
    ],
    ids=["rise", "rise at last", "stages of a pipeline", "more are behind than ahead"],
)
def test_ambiguous_nccl_counts_point_at_no_rank(statuses: list[RasStatus]) -> None:
    verdict = judged(waiting(*members(*statuses)))
    assert (verdict.named, verdict.check_first) == ((), ())


def test_equal_nccl_counts_mean_that_all_ranks_joined() -> None:
    verdict = judged(waiting(*members(*[status([7, 7, 7, 7])] * 3)))
    assert (verdict.kind, verdict.named, verdict.check_first) == ("AllJoined", (), ())
    assert (
        "According to NCCL's own counts, all ranks have launched the same number of operations in each communicator"
        in verdict.message
    )
    assert "all ranks of each communicator have launched the same number of operations" in quoted(verdict)[0]


def test_equal_nccl_counts_do_not_clear_a_rank_suspected_by_its_stack() -> None:
    """Name the rank by its stack although all counts are equal.

    The other ranks may wait for something outside NCCL: a barrier of the store, or another library.
    """
    first, *rest, last = members(*[status([7, 7, 7, 7])] * 3)
    loads = structs.replace(outside(last), activity="data_loading", waits_for="nothing")
    verdict = judged(waiting(first, *rest), loads)
    assert (verdict.kind, [one.rank for one in verdict.named]) == ("OutsideCollective", [3])


def test_rank_that_nccl_does_not_reach_is_checked_first() -> None:
    verdict = judged(waiting(*members(*[status([7, 7, 7, 7], lost=[2])] * 3)))
    assert (verdict.kind, verdict.named, [one.rank for one in verdict.check_first]) == ("NotReached", (), [2])
    assert "rank 2 does not respond" in quoted(verdict)[0]


def test_counts_name_no_rank_if_one_did_not_respond() -> None:
    """Name no rank by counts if one rank did not respond: perhaps only NCCL cannot reach it."""
    first, second, third, last = members(*[status([7, 7, 7, 6], lost=[2])] * 3)
    verdict = judged(waiting(first, second, third), outside(last))
    assert verdict.kind == "OutsideCollective", "so its stack alone, which is low"
    assert verdict.confidence is Confidence.LOW
    assert "rank 2 does not respond" in quoted(verdict)[0]


def test_rank_behind_on_another_node_is_in_the_evidence() -> None:
    ranks = [rank(number, 100 + number, "10.0.0.1", AllReduce=7) for number in range(4)]
    far = rank(4, 4711, "10.0.0.2", AllReduce=6)
    answer = parse(as_json(communicator([*ranks, far])).encode())
    verdict = judged(waiting(*members(answer, answer, world_size=5)), world_size=5)
    assert (verdict.named, verdict.check_first) == ((), ())
    assert "others 6: its rank 4 (process 4711 at 10.0.0.2)" in quoted(verdict)[0]


def test_merged_counts_name_the_rank_that_is_behind() -> None:
    """Merge two nodes. Each was queried separately and returned the same counts."""
    halves = members(*[status([7, 7, 7, 6])] * 3)
    apart = [
        structs.replace(member, id=structs.replace(member.id, node=f"gpu0{number // 2}"))
        for number, member in enumerate(halves)
    ]
    nodes = [
        Grouping(groups=(waiting(*apart[:2]),), world_size=4),
        Grouping(groups=(waiting(apart[2]), outside(apart[3])), world_size=4),
    ]
    verdict = judge.judge(merge(*nodes))
    assert [one.rank for one in verdict.named] == [3]


def test_ranks_that_the_text_omits_have_the_common_count() -> None:
    text = parse(nccl_ras.TEXT.format(pid=103, host="10.0.0.1").encode())
    first, *rest, last = members(text, text)
    assert [one.rank for one in judged(waiting(first, *rest), outside(last)).named] == [3]
    assert all(member.recorder.nccl_ras is None for member in members(text, text, world_size=8)[:3]), (
        "it may be of others"
    )


def test_ranks_with_the_same_identity_have_no_counts() -> None:
    said = nccl_counts.counts_by_rank([(0.0, status([7, 7, 7, 6])), (1.0, status([7, 7, 7, 6]))], {}, HERE, 4)
    assert said == {}
