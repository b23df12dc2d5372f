"""Progress of ranks by the collectives that they complete: groups that count, open operations, and the whole job."""

from typing import Any

import pytest
from msgspec.structs import replace

from hangwatch.model import CollectiveProgress, Group, Grouping, KernelFacts, Member, Motion, Signature, Usage
from hangwatch.model.flight_records import FlightRecord, GroupStatus
from hangwatch.stacks import completed_collectives
from hangwatch.stacks.grouping import merge_groups
from hangwatch.verdict.judge import judge
from tests.unit.test_waitfor import WORLD, member, record, recorder

MAIN, BEAT = 140_001, 140_002
Round = tuple[FlightRecord, ...]


def by(thread_id: int, number: int, state: str = "completed", **given: object) -> FlightRecord:
    return record(number, WORLD if thread_id == MAIN else "1", id=number, thread_id=thread_id, state=state, **given)


def measure(*rounds: Round, main: int | None = MAIN) -> CollectiveProgress | None:
    return completed_collectives.measure(
        [[recorder(*records, reset_epoch=records[0].reset_epoch)] if records else [] for records in rounds], main
    )


ROUNDS = {
    "all completed": ([(by(MAIN, 6),), (by(MAIN, 9),)], 3, False),
    "waits in the newest": ([(by(MAIN, 5), by(MAIN, 6, "open")), (by(MAIN, 8), by(MAIN, 9, "open"))], 3, False),
    "enqueued ahead": ([(by(MAIN, 6, "open"),), (by(MAIN, 6, "open"), by(MAIN, 9, "open"))], 0, True),
    "completed behind an open one": ([(by(MAIN, 6, "open"), by(MAIN, 7)), (by(MAIN, 6, "open"), by(MAIN, 9))], 0, True),
    "heartbeat of another thread": ([(by(MAIN, 6), by(BEAT, 3)), (by(MAIN, 6), by(BEAT, 9))], 0, False),
    "autograd": (
        [(by(MAIN, 6), by(BEAT, 3, thread="autograd")), (by(MAIN, 6), by(BEAT, 9, thread="autograd"))],
        6,
        False,
    ),
    "unknown threads": ([(record(3, id=3),), (record(5, id=5),)], 2, False),
    "recorder made anew": ([(by(MAIN, 6, reset_epoch=0),), (by(MAIN, 9, reset_epoch=1),)], 0, False),
    "send and recv": ([(by(MAIN, 6, p2p_seq=2),), (by(MAIN, 6, p2p_seq=7, is_p2p=True),)], 5, False),
    "one round": ([(by(MAIN, 6),)], None, False),
}


@pytest.mark.parametrize(("rounds", "completed", "stays_open"), ROUNDS.values(), ids=ROUNDS)
def test_operations_before_the_open_are_done(rounds: list[Round], completed: int | None, *, stays_open: bool) -> None:
    measured = measure(*rounds)
    assert (measured.completed, measured.stays_open) == (completed, stays_open)


STANDS = {
    "keeps it": ([(by(MAIN, 6, "open"),), (by(MAIN, 6, "open"),)], True),
    "another one": ([(by(MAIN, 6, "open"),), (by(MAIN, 6), by(MAIN, 7, "open"))], False),
    "a hook's thread keeps it": ([(by(MAIN, 2), by(BEAT, 6, "open")), (by(MAIN, 2), by(BEAT, 6, "open"))], True),
    "a side thread goes on": ([(by(MAIN, 2), by(BEAT, 6, "open")), (by(MAIN, 2), by(BEAT, 7, "open"))], False),
    "a side thread goes on in a hang": (
        [(by(BEAT, 2, "open"), by(MAIN, 6, "open")), (by(BEAT, 9, "open"), by(MAIN, 6, "open"))],
        True,
    ),
    "a checkpoint is open while the main thread goes on": (
        [(by(MAIN, 5), by(BEAT, 6, "open")), (by(BEAT, 6, "open"), by(MAIN, 8))],
        False,
    ),
    "standing counters": ([(by(MAIN, 6),), (by(MAIN, 6),)], False),
    "one round": ([(by(MAIN, 6, "open"),)], False),
    "none before": ([(), (by(MAIN, 6, "open"),)], False),
}


@pytest.mark.parametrize(("rounds", "is_standing"), STANDS.values(), ids=STANDS)
def test_rank_with_the_same_oldest_open_operation_stands(rounds: list[Round], *, is_standing: bool) -> None:
    measured = measure(*rounds)
    assert measured is not None and measured.is_standing is is_standing


def test_recorder_without_a_counting_group_shows_no_progress() -> None:
    assert measure((by(BEAT, 3),), (by(BEAT, 9),)) is None
    assert measure((), ()) is None


def test_usual_gap_is_the_shortest_of_the_groups_that_count() -> None:
    status = {"last_enqueued": 9, "last_started": -1, "last_completed": 9}
    groups = tuple(GroupStatus(group_id=number, usual_gap_seconds=20.0 - number, **status) for number in range(2))
    read = recorder(by(MAIN, 990), by(BEAT, 999, group_id=1), groups=groups)
    measured = completed_collectives.measure([[read]], MAIN)
    assert (measured.idle_seconds, measured.usual_gap_seconds) == (10.0, 20.0)


def rank(number: int, completed: int | None = 40, **given: Any) -> Member:
    values = {"completed": completed, "idle_seconds": 2.0, "seconds": 5.04, "usual_gap_seconds": 1.0, **given}
    made = member(number)
    return replace(
        made,
        motion=Motion.FROZEN,
        signature=Signature.BLOCKED,
        recorder=replace(made.recorder, progress=CollectiveProgress(**values)),
    )


def grouping(*members: Member) -> Grouping:
    return merge_groups([Group(key="a", activity="sleep", members=members)], len(members), ())


def test_job_works_if_every_rank_completed_a_collective() -> None:
    working = grouping(rank(0), rank(1, 47), rank(2))
    assert {each.motion for each in working.members} == {Motion.MOVING}
    verdict = judge(working)
    assert (verdict.kind, verdict.next_step) == ("Moving", "nothing: the job works")
    assert verdict.message == "No hang: every rank completed 40 to 47 collectives in the 5 s between two rounds."


@pytest.mark.parametrize(
    "last",
    [
        rank(2, 0),
        rank(2, stays_open=True),
        replace(rank(2), signature=Signature.STOPPED),
        replace(rank(2), kernel=KernelFacts(is_held_outside=True), usage=Usage(switches_per_second=0.0)),
        member(2),
    ],
    ids=["completed none", "keeps one open", "is stopped", "is held in one call", "has no recorder"],
)
def test_job_with_one_rank_that_completes_nothing_is_judged_by_its_stacks(last: Member) -> None:
    judged = grouping(rank(0), rank(1), last)
    assert Motion.MOVING not in {each.motion for each in judged.members}
    assert judge(judged).kind not in {"Moving", "NoHangSeen"}


def test_job_without_an_overdue_rank_is_not_said_to_hang() -> None:
    resting = {"completed": 0, "idle_seconds": 12.0, "usual_gap_seconds": 20.0}
    paused = grouping(rank(0, **resting), rank(1, **resting))
    assert {each.motion for each in paused.members} == {Motion.UNKNOWN}
    verdict = judge(paused)
    assert verdict.kind == "NoHangSeen"
    assert verdict.message == "No hang seen: last collective 12 s ago, usual gap 20 s."
    overdue = grouping(rank(0, **resting), rank(1, **{**resting, "idle_seconds": 21.0}))
    assert judge(overdue).kind != "NoHangSeen"
