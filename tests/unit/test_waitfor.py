"""The wait-for graph in edge cases. tests/data/waitfor.toml has the expected results of real jobs."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch.collectives import wait_graph
from hangwatch.collectives.fronts import strongly_connected
from hangwatch.collectives.rank_records import MOST_GROUPS, drop_unneeded, merge_rounds
from hangwatch.collectives.wait_graph import Stance
from hangwatch.model import KernelFacts, Member, RankId, RecorderFacts
from hangwatch.model.flight_records import (
    FlightRecord,
    GroupMembers,
    GroupStatus,
    Progression,
    RankRecords,
    mark_batch_parts,
)
from hangwatch.verdict import second_round, sequence_rules
from hangwatch.verdict.sequence_rules import Answer
from tests.hangs import TABLE, rank_dumps

WORLD = "0"
Numbers = Mapping[str, tuple[int, int]]
"""Newest collective and first open collective of each group, by group name."""


def record(number: int, group: str = WORLD, **given: object) -> FlightRecord:
    values: dict[str, object] = {
        "id": number,
        "reset_epoch": 0,
        "group_id": 0 if group == WORLD else 1,
        "group_name": group,
        "group_description": "default_pg" if group == WORLD else "tp",
        "collective_seq": number,
        "p2p_seq": 0,
        "op_id": number,
        "is_p2p": False,
        "operation": "gloo:all_reduce",
        "state": "completed",
        "is_started": False,
        "is_retired": False,
        "created_unix_ns": number * 10**9,
        "timeout_ms": 600_000,
        **given,
    }
    return FlightRecord(**values)  # type: ignore[arg-type]


def recorder(*records: FlightRecord, **given: object) -> RankRecords:
    values: dict[str, object] = {
        "library": "gloo",
        "records": records,
        "next_id": len(records),
        "oldest_id": 0,
        "is_wrapped": False,
        "capacity": 2000,
        "layout": "2.13",
        "read_unix_seconds": 1000.0,
        **given,
    }
    return RankRecords(**values)  # type: ignore[arg-type]


def member(rank: int, *first: RankRecords, last: Sequence[RankRecords] | None = None, node: str = "a") -> Member:
    return Member(
        id=RankId(node=node, rank=rank),
        recorder=RecorderFacts(libraries=merge_rounds([first, first if last is None else last])),
    )


def standing(rank: int, numbers: Numbers) -> Member:
    """Return a rank with these (newest collective, oldest open one) by group. The newest are open."""
    order = count()
    found = [
        record(number, group, id=next(order), state="open" if number >= open_from else "completed")
        for group, (newest, open_from) in numbers.items()
        for number in range(max(1, newest - 2), newest + 1)
    ]
    return member(rank, recorder(*found))


def waits(number: int, group: str = WORLD) -> Numbers:
    return {group: (number, number)}


def done(number: int, group: str = WORLD) -> Numbers:
    return {group: (number, number + 1)}


def stances(**by_rank: Stance) -> Callable[[Member, str], Stance]:
    return lambda one, _thread: by_rank.get(f"r{one.id.rank}", "waits")


def judge(members: Sequence[Member], world_size: int | None = None, **by_rank: Stance) -> Answer:
    graph = wait_graph.build(members, stances(**by_rank), len(members) if world_size is None else world_size)
    return sequence_rules.decide(graph)


def three_and(numbers: Numbers) -> list[Member]:
    """Return ranks 0 to 2, which wait in collective 6 of the default group, and rank 3 with `numbers`."""
    return [*(standing(rank, waits(6)) for rank in range(3)), standing(3, numbers)]


# --- ranks that have not joined --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "stance", "kind", "named", "check_first"),
    [
        (done(5), "elsewhere", "NotJoined", (3,), ()),
        (done(5), "unclear", "NotJoined", (), (3,)),
        (done(5), "waits", "Unknown", (), ()),
        (done(5) | waits(2, "1"), "elsewhere", "NotJoined", (), (3,)),
        (done(6), "elsewhere", "AllJoined", (), ()),
        (waits(6), "waits", "AllJoined", (), ()),
        ({}, "elsewhere", "NotJoined", (3,), ()),
    ],
    ids=["elsewhere", "unclear", "in another wait", "with an open one", "gone on", "all come", "never came"],
)
def test_open_operations_and_place_of_a_rank_decide(
    numbers: Numbers, stance: Stance, kind: str, named: tuple[int, ...], check_first: tuple[int, ...]
) -> None:
    found = judge(three_and(numbers), r3=stance)
    assert (found.kind, found.named, found.check_first) == (kind, named, check_first)


def test_one_round_or_an_operation_that_ended_in_between_tells_nothing() -> None:
    before, after = recorder(record(6, state="open")), recorder(record(6), record(7, state="open"))
    moving = [member(rank, before, last=[after]) for rank in range(3)]
    assert judge([*moving, standing(3, done(5))], r3="elsewhere") == Answer("Unknown")
    unread = [Member(id=RankId(node="a", rank=rank)) for rank in range(4)]
    assert judge(unread, r3="elsewhere") == Answer("Unknown")


def test_of_several_awaited_ranks_only_those_outside_are_named() -> None:
    job = [standing(0, waits(6)), standing(1, waits(6)), *(standing(rank, done(5)) for rank in (2, 3, 4))]
    found = judge(job, r2="unclear", r3="elsewhere", r4="waits")
    assert (found.kind, found.named, found.check_first) == ("NotJoined", (3,), ())
    found = judge(job, r2="unclear", r3="unclear", r4="unclear")
    assert (found.kind, found.named, found.check_first) == ("NotJoined", (), ())


def test_more_ranks_than_wait_for_them_are_not_named() -> None:
    # One rank of four joined early, and the three others are still at work. Name no rank.
    job = [standing(0, waits(6)), *(standing(rank, done(5)) for rank in (1, 2, 3))]
    found = judge(job, r1="elsewhere", r2="elsewhere", r3="elsewhere")
    assert (found.kind, found.named, found.check_first) == ("NotJoined", (), ())
    assert judge(job, r1="elsewhere", r2="elsewhere").named == (1, 2)
    assert judge(job[:2], r1="elsewhere").named == (1,)


def test_blocked_rank_is_named_only_if_no_other_rank_may_block_it() -> None:
    job = [standing(0, waits(6)), standing(1, waits(6)), standing(2, done(5)), standing(3, done(5))]
    assert judge(job, r2="held", r3="elsewhere").named == (3,)
    assert judge(job, r2="held", r3="held").named == (2, 3)
    assert judge([*job[:2], standing(2, done(5) | waits(2, "1")), job[3]], r2="elsewhere", r3="held").named == (3,)


def test_unread_rank_makes_the_graph_partial_and_clears_no_suspect() -> None:
    job = three_and(done(5))
    assert not judge(job, r3="elsewhere").graph.is_partial
    found = judge([*job, Member(id=RankId(node="a", rank=4))], r3="elsewhere")
    assert (found.named, found.graph.is_partial) == ((3,), True)
    found = judge(job[:3], world_size=4)
    assert (found.kind, found.graph.pending[0].unknown) == ("Unknown", (3,))


def test_two_worlds_in_one_job_are_not_compared() -> None:
    job = three_and(done(5))
    assert judge([*job, standing(3, waits(9))], r3="elsewhere") == Answer("Unknown")


# --- operations that a buffer no longer shows ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("oldest_seconds", "node", "kind"),
    [(5, "a", "NotJoined"), (7, "a", "Unknown"), (5, "b", "Unknown")],
    ids=["reaches back", "begins later", "another clock"],
)
def test_a_wrapped_buffer_must_reach_back(oldest_seconds: int, node: str, kind: str) -> None:
    own = recorder(record(70, "own", created_unix_ns=oldest_seconds * 10**9), is_wrapped=True)
    found = judge([*three_and({})[:3], member(3, own, node=node)], r3="elsewhere")
    assert (found.kind, found.named) == (kind, (3,) if kind == "NotJoined" else ())


def test_another_clock_is_believed_within_a_minute() -> None:
    waiting = [member(rank, recorder(record(6, state="open", created_unix_ns=100 * 10**9))) for rank in range(3)]
    own = recorder(record(70, "own", created_unix_ns=39 * 10**9), is_wrapped=True)
    assert judge([*waiting, member(3, own, node="b")], r3="elsewhere").named == (3,)


def test_an_operation_that_has_lost_its_record_is_open() -> None:
    lost = recorder(
        record(5),
        is_wrapped=True,
        groups=(GroupStatus(group_id=0, last_enqueued=9, last_started=-1, last_completed=5),),
    )
    found = judge([*three_and({})[:3], member(3, lost)], r3="elsewhere")
    assert (found.kind, found.named, found.check_first) == ("NotJoined", (), (3,))


def test_what_torch_has_yet_to_count_is_not_open_where_its_record_shows_its_end() -> None:
    counted_late = recorder(
        *(record(number, "own", created_unix_ns=5 * 10**9) for number in (68, 69, 70)),
        is_wrapped=True,
        groups=(GroupStatus(group_id=1, last_enqueued=70, last_started=-1, last_completed=68),),
    )
    assert judge([*three_and({})[:3], member(3, counted_late)], r3="elsewhere").named == (3,)


def test_the_same_name_again_is_another_group() -> None:
    again = recorder(record(70), record(71), record(1, group_id=4, id=80), record(2, group_id=4, id=81, state="open"))
    once = recorder(record(70), record(71), record(1, group_id=7, id=80))
    found = judge([*(member(rank, again) for rank in range(3)), member(3, once)], r3="elsewhere")
    assert (found.kind, found.named) == ("NotJoined", (3,))
    before = recorder(record(70), record(71))
    assert judge([*(member(rank, again) for rank in range(3)), member(3, before)], r3="elsewhere").kind == "Unknown"


@pytest.mark.parametrize(("numbers", "kind"), [((7, 7), "Unknown"), ((6, 7), "AllJoined")])
def test_number_that_two_threads_share_is_not_compared(numbers: tuple[int, int], kind: str) -> None:
    def member_of_threads(rank: int, numbers: Sequence[int]) -> Member:
        operations = zip(numbers, ("gloo:all_reduce", "gloo:all_gather"), strict=True)
        return member(rank, recorder(*(record(number, operation=name, state="open") for number, name in operations)))

    assert judge([member_of_threads(0, (6, 7)), member_of_threads(1, numbers)]).kind == kind


@pytest.mark.parametrize(("later_seconds", "kind"), [(10, "AllJoined"), (500, "Unknown")])
def test_records_of_an_earlier_attempt_are_not_compared(later_seconds: int, kind: str) -> None:
    later = record(6, state="open", created_unix_ns=(1000 + later_seconds) * 10**9)
    job = [standing(0, waits(6)), member(1, recorder(later, read_unix_seconds=2000.0), node="b")]
    assert judge(job).kind == kind


def test_groups_without_a_name_are_not_compared() -> None:
    nameless = [
        member(rank, recorder(record(5 + (rank < 3), group_name="", state="open" if rank < 3 else "completed")))
        for rank in range(4)
    ]
    assert judge(nameless, r3="elsewhere") == Answer("Unknown")


# --- cycles ----------------------------------------------------------------------------------------------------------


def test_lone_member_of_a_cycle_is_checked_first() -> None:
    job = [
        standing(0, {WORLD: (10, 10), "1": (10, 11)}),
        standing(1, {WORLD: (9, 10), "1": (11, 11)}),
        standing(2, waits(10)),
        standing(3, waits(10)),
    ]
    found = judge(job)
    assert (found.kind, found.graph.cycle, found.check_first, found.named) == ("Cycle", (0, 1), (1,), ())


def test_cycle_of_two_lone_ranks_points_at_no_rank() -> None:
    job = [standing(0, {"1": (4, 4), "2": (3, 4)}), standing(1, {"1": (3, 4), "2": (4, 4)})]
    found = judge(job)
    assert (found.kind, found.graph.cycle, found.check_first) == ("Cycle", (0, 1), ())


def test_rank_that_is_alone_in_its_part_of_the_cycle_is_checked_first() -> None:
    """Rank 3 has left out a collective of its group, and waits where ranks of another group wait, too."""
    job = [standing(rank, {WORLD: (9, 10), "1": (11, 11)}) for rank in range(3)]
    job += [standing(rank, {WORLD: (10, 10), "1": (10, 11)}) for rank in (3,)]
    job += [standing(rank, waits(10)) for rank in range(4, 7)]
    found = judge(job)
    assert (found.kind, found.graph.cycle, found.check_first) == ("Cycle", (0, 1, 2, 3), (3,))


def test_ring_of_groups_is_a_cycle_and_the_rank_ahead_is_not_checked_first() -> None:
    pairs: list[Numbers] = [
        {"1": (4, 4), "3": (3, 4)},
        {"1": (3, 4), "2": (4, 4)},
        {"2": (3, 4), "3": (4, 4)},
    ]
    job = [*(standing(rank, done(9) | pair) for rank, pair in enumerate(pairs)), standing(3, waits(10))]
    found = judge(job)
    assert (found.kind, found.graph.cycle, found.check_first, found.named) == ("Cycle", (0, 1, 2), (), ())


def test_rank_waiting_for_a_cycle_is_not_in_it() -> None:
    job = [
        standing(0, {"1": (4, 4), "2": (3, 4)}),
        standing(1, {"1": (3, 4), "2": (4, 4)}),
        standing(2, {"3": (9, 9)}),
        standing(3, {"3": (8, 9), "2": (4, 4)}),
    ]
    assert judge(job).graph.cycle == (0, 1)


# --- mismatches ------------------------------------------------------------------------------------------------------


def test_another_operation_under_the_same_number() -> None:
    job = three_and({})
    job[3] = member(3, recorder(record(5), record(6, operation="gloo:barrier", state="open")))
    found = judge(job)
    assert (found.kind, found.check_first, found.named) == ("Mismatch", (3,), ())
    assert found.graph.mismatches == ((("all_reduce", (0, 1, 2)), ("barrier", (3,))),)


@pytest.mark.parametrize(
    ("operation", "size", "dtype", "kind"),
    [
        ("all_reduce", (4, 5), "Float", "Mismatch"),
        ("scatter", (4, 5), "Float", "AllJoined"),
        ("broadcast", (4, 4), "Half", "Mismatch"),
        ("broadcast", (4, 4), "Int", "AllJoined"),
        ("broadcast", (64,), "Byte", "AllJoined"),
        ("broadcast", (64,), "Bits", "Mismatch"),
    ],
)
def test_tensors_differ_only_where_they_should_have_equal_bytes(
    operation: str, size: tuple[int, ...], dtype: str, kind: str
) -> None:
    def recorded(size: tuple[int, ...], dtype: str) -> RankRecords:
        given = {"input_sizes": (size,), "input_dtypes": (dtype,)}
        return recorder(record(6, operation=f"nccl:{operation}", state="open", **given))

    job = [member(rank, recorded(size, dtype) if rank == 2 else recorded((4, 4), "Float")) for rank in range(4)]
    found = judge(job)
    assert (found.kind, found.check_first) == (kind, (2,) if kind == "Mismatch" else ())


def nccl(*records: FlightRecord, names: Sequence[str] = ("1", "2")) -> RankRecords:
    listed = tuple(GroupMembers(name=name, description="tp", ranks=(Progression(0, 3),)) for name in names)
    return recorder(*records, library="nccl", members=listed)


def test_another_order_of_the_same_operations() -> None:
    ordered = [record(3, "1", id=1, state="open"), record(5, "2", id=2, group_id=2, state="open")]
    turned = [record(5, "2", id=1, group_id=2, state="open"), record(3, "1", id=2, state="open")]
    job = [member(rank, nccl(*(turned if rank == 1 else ordered))) for rank in range(4)]
    found = judge(job)
    assert (found.kind, found.check_first) == ("Mismatch", (1,))
    assert judge([member(rank, nccl(*ordered)) for rank in range(4)]).kind == "AllJoined"


AHEAD = (waits(7), waits(6), waits(8), waits(6))
"""Progress of four ranks that have joined 6. Ranks 1 and 3 are still in it; rank 2 has completed 6 and 7."""


def test_to_what_all_have_come_and_some_are_still_in() -> None:
    job = [standing(rank, numbers) for rank, numbers in enumerate(AHEAD)]
    found = judge(job)
    assert (found.kind, found.named, found.check_first) == ("AllJoined", (), ())
    assert found.is_still_open
    assert (found.graph.pending[0].number, found.graph.pending[0].waiting) == (6, (1, 3))
    assert [one.number for one in found.graph.pending] == [6, 7, 8]


def test_it_is_not_told_of_ranks_that_do_something_else_nor_where_not_all_are_known() -> None:
    job = [standing(rank, numbers) for rank, numbers in enumerate(AHEAD)]
    assert judge(job, world_size=8).kind == "Unknown"
    assert judge(job, r3="elsewhere").kind == "NotJoined"
    assert judge(job, r3="unclear").kind == "Unknown"
    assert judge([*job[:3], standing(3, done(6))]).kind == "Unknown", (
        "it is done with 6, and waits in what no record shows"
    )
    assert judge([standing(0, waits(7)), standing(1, waits(7)), *job[2:]]).kind == "Unknown", "3 alone is still in it"
    assert judge([*job[:3], standing(3, done(5))]).kind == "Unknown", "it has not joined number 6"


def test_all_have_joined_only_if_all_members_are_known() -> None:
    assert judge([standing(rank, waits(3, "1")) for rank in range(4)]).kind == "Unknown"
    assert judge([standing(rank, waits(6)) for rank in range(4)], world_size=8).kind == "Unknown"
    assert judge([standing(rank, waits(6)) for rank in range(4)]).kind == "AllJoined"


# --- NCCL's own traits ------------------------------------------------------------------------------------------------


def test_parts_of_a_batch_are_never_open() -> None:
    part = record(6, is_coalesced_part=True, state="open", is_p2p=True)
    closing = record(6, id=7, operation="nccl:coalesced", is_p2p=True)
    assert judge([member(rank, nccl(part, closing)) for rank in range(4)]) == Answer("Unknown")


def test_point_to_point_numbers_are_not_compared() -> None:
    job = [member(rank, nccl(record(6, "1", state="open", is_p2p=True))) for rank in range(3)]
    assert judge([*job, member(3, nccl(record(2, "1")))], r3="elsewhere") == Answer("Unknown")


def transfer(name: str, state: str = "open") -> RankRecords:
    return nccl(record(0, "1", p2p_seq=1, op_id=1, is_p2p=True, operation=f"nccl:{name}", state=state))


@pytest.mark.parametrize(
    ("stance", "kind", "named", "check_first"),
    [
        ("elsewhere", "NotJoined", (1,), ()),
        ("unclear", "NotJoined", (), (1,)),
        ("waits", "Unknown", (), ()),
    ],
)
def test_pipeline_of_sends_waits_for_the_stage_without_an_open_one(
    stance: Stance, kind: str, named: tuple[int, ...], check_first: tuple[int, ...]
) -> None:
    stages = [transfer("send 0->1"), transfer("recv 1<-0", "completed"), transfer("recv 2<-1"), transfer("recv 3<-2")]
    answer = judge([member(rank, stage) for rank, stage in enumerate(stages)], r1=stance)
    assert (answer.kind, answer.named, answer.check_first) == (kind, named, check_first)
    assert [(one.operation, one.waiting, one.missing) for one in answer.graph.pending] == [
        ("send", (0,), (1,)),
        ("recv", (2,), (1,)),
        ("recv", (3,), (2,)),
    ]


def test_stage_without_a_dump_is_not_known_to_be_missing() -> None:
    answer = judge([member(2, transfer("recv 2<-1")), member(3, transfer("recv 3<-2"))], world_size=4)
    assert answer.kind == "Unknown" and [one.unknown for one in answer.graph.pending] == [(1,), ()]


def test_two_halves_of_a_transfer_blame_nobody_and_two_receivers_are_a_cycle() -> None:
    assert judge([member(0, transfer("recv 0<-1")), member(1, transfer("send 1->0"))]).kind == "Unknown"
    assert judge([member(0, transfer("recv 0<-1")), member(1, transfer("recv 1<-0"))]).kind == "Cycle"


def exchange(rank: int, *states: str) -> RankRecords:
    """Return batches of NCCL, each with a send and a recv of both neighbours in a ring of four ranks."""
    names = [f"{kind}{(rank + way) % 4}" for way in (1, -1) for kind in (f"send {rank}->", f"recv {rank}<-")]
    records = []
    for number, state in enumerate(states, 1):
        for part, name in enumerate((*names, "coalesced")):
            given = {"id": 5 * number + part, "operation": f"nccl:{name}", "state": state if part == 4 else "open"}
            records.append(record(0, "1", p2p_seq=number, is_p2p=True, **given))
    return drop_unneeded(nccl(*mark_batch_parts(records)))


@pytest.mark.parametrize("third", [["open"], []])
def test_rank_that_stops_between_two_exchanges_of_a_ring_is_the_end(third: list[str]) -> None:
    """Rank 2 has enqueued one exchange, the others two, and rank 0 has completed the second."""
    states = [("completed", "completed", *third), ("completed", "open"), ("completed",), ("completed", "open")]
    answer = judge([member(rank, exchange(rank, *of_rank)) for rank, of_rank in enumerate(states)], r2="unclear")
    assert answer.graph.programs == (2,)
    assert not third or (answer.kind, answer.check_first) == ("NotJoined", (2,))


def test_send_that_is_not_received_holds_the_collective_after_it() -> None:
    send = record(0, "1", id=1, p2p_seq=1, is_p2p=True, operation="nccl:send 0->2", state="open")
    joined = record(7, "3", id=2, group_id=2, operation="nccl:all_reduce", state="open")
    received = record(0, "1", p2p_seq=1, is_p2p=True, operation="nccl:recv 2<-0")
    job = [nccl(send, joined), nccl(joined), nccl(received)]
    answer = judge([member(rank, of_rank) for rank, of_rank in enumerate(job)], r2="elsewhere")
    assert (answer.kind, answer.named, answer.graph.is_settled) == ("NotJoined", (2,), True)


def test_rank_that_is_ahead_of_a_ring_is_not_checked_first() -> None:
    """Rank 0 alone waits in the collective after the exchange, which it has completed, and the others have not."""
    rings = [replace(exchange(rank, "open"), members=()) for rank in range(4)]
    after = record(7, id=90, operation="nccl:all_reduce", state="open")
    rings[0] = replace(rings[0], records=(*exchange(0, "completed").records, after))
    rings[1:] = [
        replace(one, records=(record(6, id=1, operation="nccl:all_reduce"), *one.records)) for one in rings[1:]
    ]
    answer = judge([member(rank, ring) for rank, ring in enumerate(rings)])
    assert (answer.kind, answer.check_first) == ("Cycle", ())


def test_stage_for_which_others_wait_only_in_recvs_has_not_joined() -> None:
    """All ranks have joined the collectives, which are open on ranks 1 and 2, because they were enqueued ahead."""

    def stage(rank: int) -> RankRecords:
        receive = record(0, "1", id=1, p2p_seq=1, is_p2p=True, operation=f"nccl:recv {rank}<-{rank - 1}", state="open")
        return nccl(
            receive, record(7, str(rank + 2), id=2, group_id=rank + 2, operation="nccl:all_gather", state="open")
        )

    job = [nccl(record(0, "1", id=1, p2p_seq=1, is_p2p=True, operation="nccl:send 0->1")), stage(1), stage(2)]
    answer = judge([member(rank, of_rank) for rank, of_rank in enumerate(job)], r0="elsewhere")
    assert (answer.kind, answer.named) == ("NotJoined", (0,))
    assert [(one.operation, one.missing) for one in answer.graph.pending if one.missing] == [("recv", (0,))]


# --- what holds for all jobs -----------------------------------------------------------------------------------------

STANCES = st.sampled_from(["elsewhere", "held", "waits", "unclear"])
STANDS = st.dictionaries(
    st.sampled_from([WORLD, "1", "2"]), st.tuples(st.integers(1, 4), st.integers(1, 5)), max_size=3
)
JOBS = st.lists(st.tuples(STANDS, STANCES, st.booleans()), min_size=2, max_size=7)
Drawn = list[tuple[Numbers, Stance, bool]]


def drawn(job: Drawn) -> tuple[list[Member], dict[str, Stance]]:
    members = [
        standing(rank, numbers) if is_read else Member(id=RankId(node="a", rank=rank))
        for rank, (numbers, _, is_read) in enumerate(job)
    ]
    return members, {f"r{rank}": stance for rank, (_, stance, _) in enumerate(job)}


@given(JOBS, st.randoms(use_true_random=False))
def test_the_order_of_ranks_does_not_matter(job: Drawn, random: object) -> None:
    members, by_rank = drawn(job)
    mixed = list(members)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert judge(members, **by_rank) == judge(mixed, **by_rank)


@given(JOBS)
def test_unread_or_waiting_rank_is_never_named(job: Drawn) -> None:
    members, by_rank = drawn(job)
    found = judge(members, **by_rank)
    assert all(job[rank][2] for rank in (*found.named, *found.check_first, *found.graph.cycle))
    assert all(by_rank[f"r{rank}"] in ("elsewhere", "held") for rank in found.named)
    assert not set(found.named) & set(found.check_first)


@given(JOBS)
def test_a_rank_that_is_not_read_never_makes_the_answer_surer(job: Drawn) -> None:
    members, by_rank = drawn(job)
    found = judge(members, **by_rank)
    for rank in range(len(members)):
        fewer = [Member(id=RankId(node="a", rank=one.id.rank)) if one.id.rank == rank else one for one in members]
        less = judge(fewer, **by_rank)
        assert set(less.named) <= set(range(len(members))) - {rank}
        assert less.graph.is_partial or less == Answer("Unknown")
        if less.kind == "AllJoined":
            raise AssertionError(found)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=8), STANCES)
def test_healthy_job_with_any_numbers_names_no_rank(numbers: list[int], stance: Stance) -> None:
    """Judge a healthy job with any numbers. No collective stays open."""
    members = [standing(rank, done(number)) for rank, number in enumerate(numbers)]
    assert judge(members, **{f"r{rank}": stance for rank in range(len(numbers))}) == Answer("Unknown")


def all_in_one(ranks: int) -> list[Member]:
    return [standing(rank, {WORLD: (6, 6), str(1 + rank // 8): (3 + (rank % 8 == 0), 4)}) for rank in range(ranks)]


def ring(ranks: int) -> list[Member]:
    return [standing(rank, {f"a{rank}": (3, 3), f"a{(rank + 1) % ranks}": (2, 3)}) for rank in range(ranks)]


def half_unread(ranks: int) -> list[Member]:
    return [standing(rank, waits(6)) if rank % 2 else Member(id=RankId(node="a", rank=rank)) for rank in range(ranks)]


def half_behind(ranks: int) -> list[Member]:
    """Return ranks of which every other GPU has completed a collective less."""

    def on_gpu(rank: int) -> RankRecords:
        states = ["completed", "open" if rank % 2 else "completed", "open"]
        records = (record(number, id=number, state=state) for number, state in enumerate(states, 1))
        return recorder(*(replace(each, operation="nccl:all_reduce") for each in records), library="nccl")

    return [member(rank, on_gpu(rank)) for rank in range(ranks)]


@pytest.mark.parametrize("shape", [all_in_one, ring, half_unread, half_behind])
def test_the_graph_is_linear(shape: Callable[[int], list[Member]]) -> None:
    def seconds(ranks: int) -> float:
        """Return the best time of three runs, in seconds: other load makes a run slower, never faster."""
        job, turns = shape(ranks), []
        for _ in range(3):
            began = time.process_time()
            judge(job)
            turns.append(time.process_time() - began)
        return min(turns)

    small, large = seconds(500), seconds(4_000)
    assert large < 40 * max(small, 0.01), "quadratic would be 64 times"


def test_what_is_kept_of_a_buffer_is_bounded_and_judged_alike() -> None:
    many = [record(number, str(number % 100 + 1), group_id=number % 100, id=number) for number in range(2000)]
    still_open = [record(7, str(99), group_id=98, id=-1, state="open")]
    kept = drop_unneeded(recorder(*still_open, *many))
    assert len(kept.records) <= 13 * MOST_GROUPS and kept.records[0].id == -1
    full = three_and({})
    job = [
        member(rank, drop_unneeded(recorder(*(record(n, state="open" if n == 40 else "completed") for n in range(41)))))
        for rank in range(3)
    ]
    assert judge([*job, standing(3, done(39))], r3="elsewhere").named == (3,) and full


def test_stopped_rank_has_not_joined_despite_open_operations() -> None:
    held = replace(standing(3, {WORLD: (5, 5)}), kernel=KernelFacts(state="T"))
    assert judge([*three_and({})[:3], held], r3="elsewhere").named == (3,)


ALL_REDUCE = "all_reduce (torch/distributed/distributed_c10d.py:2501)"
LOADER = ["get (queue.py:180)", "_try_get_data (torch/utils/data/dataloader.py:1131)"]
SAVE = "save (torch/serialization.py:965)"


def is_needed(**stand: Any) -> bool:
    waiting = {"ranks": "0-2", "utilization": 1.0, "frames": [ALL_REDUCE, "train (train.py:50)"]}
    return bool(second_round.find_reason(rank_dumps({"stands": [waiting, {"ranks": "3", **stand}]}), TABLE))


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([ALL_REDUCE], False),
        ([SAVE], True),
        (LOADER, True),
        (["update_cache (cache.py:21)"], True),
        (["synchronize (torch/cuda/__init__.py:800)"], True),
        (["write_text (pathlib.py:1015)"], True),
        (["wait (threading.py:320)"], True),
    ],
)
def test_second_round_is_needed_for_a_rank_outside_a_wait_for_ranks(frames: list[str], expected: bool) -> None:
    assert is_needed(frames=[*frames, "train (train.py:40)"], utilization=0.0) is expected


def test_second_round_is_needed_for_a_rank_with_a_flight_recorder() -> None:
    waiting = rank_dumps({"stands": [{"ranks": "0-3", "utilization": 1.0, "frames": [ALL_REDUCE]}]})
    assert not second_round.find_reason(waiting, TABLE)
    last = replace(waiting[0].rounds[-1], recorders=(recorder(record(3)),))
    assert second_round.find_reason([replace(waiting[0], rounds=(last,)), *waiting[1:]], TABLE)


def test_rank_without_stack_needs_no_second_round() -> None:
    assert not is_needed(gone=True)
    assert not is_needed(fault=["ProcessGone", "the process has ended", "target"])


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
