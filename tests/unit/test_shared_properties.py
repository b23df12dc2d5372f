"""Properties that suspects on several nodes share. They are reported only if chance is unlikely to explain them."""

from collections.abc import Mapping
from itertools import combinations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch.formats import sighting
from hangwatch.formats.sighting import SWITCH_ADDRESS, Sighting
from hangwatch.model import Group, Grouping, GroupRecords, Member, RankId, RecorderFacts, RecorderState
from hangwatch.tools.fleet import cross_node
from hangwatch.tools.fleet.merge import SightingCollector, find_leaf_switch
from tests import samples

NODES, LOCAL = 16, 8
BY_SLURM = {f"n{node}": f"s{node // 4}" for node in range(NODES)}


def member(rank: int, groups: Mapping[str, frozenset[int]], nodes: int = NODES) -> Member:
    own = tuple(
        GroupRecords(library="torch", name=name, description="TENSOR", number=3)
        for name, ranks in groups.items()
        if rank in ranks
    )
    return Member(
        id=RankId(node=f"n{rank // LOCAL}", rank=rank, local_rank=rank % LOCAL, pid=100 + rank),
        rounds=3,
        recorder=RecorderFacts(libraries=(RecorderState(library="torch", groups=own),) if own else ()),
    )


def find_shared(
    odd: set[int],
    leaves: Mapping[str, str] = BY_SLURM,
    groups: Mapping[str, frozenset[int]] | None = None,
    nodes: int = NODES,
) -> dict[str, str]:
    """Return the reported properties, if the ranks `odd` load data while all other ranks wait."""
    ranks = range(nodes * LOCAL)
    loads = tuple(member(rank, groups or {}) for rank in ranks if rank in odd)
    waits = tuple(member(rank, groups or {}) for rank in ranks if rank not in odd)
    grouping = Grouping(
        groups=(
            Group(key="w", activity="collective_wait", waits_for="ranks", members=waits),
            Group(key="l", activity="data_loading", waits_for="nothing", members=loads),
        ),
        world_size=len(ranks),
    )
    verdict = cross_node.judge(grouping, leaves=leaves)
    assert {rank.rank for rank in verdict.named} == odd
    return {one.kind: one.message for one in verdict.evidence if one.kind.startswith("shared_")}


RAIL = {3, 3 + LOCAL * 5, 3 + LOCAL * 9, 3 + LOCAL * 14}
LEAF = {1, 2 + LOCAL, 7 + LOCAL * 2, 4 + LOCAL * 3}
TENSOR = {"7": frozenset({0, 9, 18, 27, 36, 45, 54, 63}), "8": frozenset({1, 10, 19}), "0": frozenset(range(128))}


def test_a_rail() -> None:
    assert find_shared(RAIL) == {
        "shared_rail": "all 4 suspects are on one rail, local rank 3, which has 16 of the 128 ranks; "
        "its 12 other ranks are not suspects"
    }


def test_shared_leaf_switch_is_reported_with_its_source() -> None:
    assert find_shared(LEAF, nodes=64)["shared_leaf_switch"] == (
        "all 4 suspects are on leaf switch s0 (by SLURM_TOPOLOGY_ADDR), which has 32 of the 512 ranks; "
        "its 28 other ranks are not suspects"
    )
    assert find_shared(LEAF, {}, nodes=64) == {}


def test_a_process_group_of_the_recorders() -> None:
    assert find_shared({9, 27, 45}, groups=TENSOR) == {
        "shared_process_group": "all 3 suspects are in process group TENSOR 7, which has 8 of the 128 ranks; "
        "its 5 other ranks are not suspects"
    }


def test_of_one_node_neither_its_switch_nor_a_group_around_it_is_said() -> None:
    around = {"1": frozenset(range(16)), "2": frozenset(range(8))}
    assert set(find_shared({0, 3, 5, 6}, groups=around)) == {"shared_node"}
    assert set(find_shared({0, 3}, groups={"2": frozenset({0, 3})})) == {"shared_node", "shared_process_group"}


@pytest.mark.parametrize(
    ("odd", "nodes"),
    [
        ({3, 3 + LOCAL * 5}, NODES),  # two ranks of a rail: by chance one in eight pairs
        ({1, 2 + LOCAL, 7 + LOCAL * 2, 4 + LOCAL * 3}, 8),  # all on one of two switches
        ({0, 9, 18 + LOCAL, 100}, NODES),
    ],
)
def test_what_chance_does_is_not_said(odd: set[int], nodes: int) -> None:
    assert find_shared(odd, nodes=nodes) == {}


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 31), min_size=2, max_size=6), st.frozensets(st.integers(0, 31), min_size=1))
def test_a_group_is_said_exactly_where_few_draws_would_fall_into_it(odd: set[int], group: frozenset[int]) -> None:
    """Count all sets of this many ranks: at most 1 % may lie inside it."""
    said = find_shared(odd, {}, {"g": group}, nodes=4)
    blind = sum(1 for drawn in combinations(sorted(group), len(odd)))
    rare = blind <= 0.01 * comb(32, len(odd))
    one_node = len({rank // LOCAL for rank in odd}) == 1
    if not odd <= group or not rare:
        assert "shared_process_group" not in said
    elif not one_node and len({rank % LOCAL for rank in odd}) > 1:
        assert "shared_process_group" in said


@pytest.mark.parametrize(
    ("address", "switch"),
    [
        ("s0.s2.node12", "s2"),
        ("leaf.node1", "leaf"),
        ("node1", ""),
        ("", ""),
        ("...", ""),
        (".node1", ""),
        ("s" * 200 + ".node", "s" * 63 + "…"),
        ("s\x1b[31m.node", "s\\x1b[31m"),
    ],
)
def test_what_slurm_says(address: str, switch: str) -> None:
    assert find_leaf_switch(address) == switch


def test_the_variable_travels_with_what_a_node_saw() -> None:
    job = replace(samples.job(range(4), None), job_key="k", environ={SWITCH_ADDRESS: "s0.s2.n1", "NCCL_ALGO": "Ring"})
    gathering = SightingCollector()
    gathering.add(Sighting(node="n1", job=job, opened_unix_seconds=0.0, grouping=Grouping(groups=())))
    assert gathering.leaves(["k"]) == {"n1": "s2"}
    incident = samples.loader_hang()
    sent = sighting.make_sighting(replace(incident, job=replace(incident.job, environ=job.environ)))
    assert sent.job.environ == {SWITCH_ADDRESS: "s0.s2.n1"}, "and nothing else of the environment"
