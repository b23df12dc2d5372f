"""The late rank of a job on the board: what /status and the metrics show, and that the state of the job stays."""

import pytest
from msgspec.structs import replace
from rich.console import Console

from hangwatch import config
from hangwatch.cli.status import print_status
from hangwatch.cli.top import LastAnswer, frame
from hangwatch.collectives.arrival import ArrivalOrder, Place, list_collectives
from hangwatch.detector import job_watch
from hangwatch.metrics.collector import families
from hangwatch.model import ArrivalStatus, Job, ProcessId, Rank
from hangwatch.model.flight_records import FlightRecord, Library, RankRecords
from hangwatch.state import status, steps
from hangwatch.state.board import JobEntry, Snapshot

RANKS = tuple(Rank(id=ProcessId(pid=100 + rank, start_ticks=1), rank=8 + rank, local_rank=rank) for rank in range(4))
JOB = Job(job_id="train", job_key="k1", launcher="torchrun", launcher_id=None, ranks=RANKS)
LATENESS = {rank.id: 0.004 if rank.rank == 10 else 0.0001 for rank in RANKS}


def make_order(library: Library = "gloo", **changes: object) -> ArrivalOrder:
    place = Place(library=library, group="0", operation="all_reduce", sizes=((8,),), position=0)
    order = ArrivalOrder(
        reason="",
        latest=RANKS[2].id,
        place=place,
        records=320,
        step_seconds=0.04,
        lateness_seconds=LATENESS,
        lateness_ratio=0.1,
        standard_errors=9.0,
        last_ratio=0.98,
    )
    return replace(order, **changes)


def record(*orders: ArrivalOrder) -> Snapshot:
    """Return a board with a job after these readings."""
    snapshot = Snapshot().with_job(JobEntry(job=JOB, watch=job_watch.begin_watch(JOB, 5.0)))
    for order in orders:
        snapshot = steps.record_arrival_orders(snapshot, {"k1": order})
    return snapshot


def shown(snapshot: Snapshot) -> ArrivalStatus:
    (job,) = status.build_status(snapshot, "n1", 10.0).jobs
    assert job.arrival is not None
    return job.arrival


def series(snapshot: Snapshot, name: str) -> dict[str, float]:
    """Return the values of a metric by rank, or by "" if it has no label for it."""
    every = families(snapshot, 10.0, config.Detector())
    samples = (one for family in every for one in family.samples if one.name == name)
    return {one.labels.get("rank", ""): one.value for one in samples}


def test_named_rank_is_shown_and_the_job_keeps_its_state() -> None:
    snapshot = record(make_order())
    assert shown(snapshot).is_named and shown(snapshot).ranks[0].rank == 10
    assert shown(snapshot).message == (
        "Rank 10 (pid 102) is late by 4 ms (10.0% of a step of 40 ms): it enqueues all_reduce of group 0 after the 3"
        " other ranks, last in 98% of 320 steps. With gloo this is all that the rank does in a step: loader, forward and"
        " backward pass."
    )
    assert series(snapshot, "hangwatch_job_straggler_lateness_ratio") == {"10": 0.1}
    assert series(snapshot, "hangwatch_job_step_seconds") == {"": 0.04}
    assert series(snapshot, "hangwatch_rank_lateness_seconds") == {"8": 0.0001, "9": 0.0001, "10": 0.004, "11": 0.0001}
    assert snapshot.jobs["k1"].watch == job_watch.begin_watch(JOB, 5.0) and not snapshot.jobs["k1"].page


def test_differences_of_the_named_rank_are_shown() -> None:
    said = ("its main thread waited 25% of the time for a core, those of the others at most 1%",)
    assert shown(record(make_order(differences=said))).differences == said


def test_status_and_top_tell_who_is_late(capsys: pytest.CaptureFixture[str]) -> None:
    late = "rank 10 is late by 10% of each step"
    for order, count in ((make_order(), 1), (make_order(reason="NoneLate"), 0)):
        seen = status.build_status(record(order), "n1", 10.0)
        print_status(seen)
        assert capsys.readouterr().out.count(late) == count
        Console(width=200).print(frame(LastAnswer(seen), 0.0, 0.0))
        assert capsys.readouterr().out.count(late) == count


def test_place_within_the_step_is_said() -> None:
    order = make_order()
    assert order.place is not None
    message = shown(record(replace(order, place=replace(order.place, position=2)))).message
    assert "it enqueues all_reduce of group 0 (number 3 in the step) after the 3 other ranks" in message


def test_nccl_is_said_to_show_only_the_cpu() -> None:
    assert (
        "A slow GPU does not show here: see `hangwatch check gpu_speed`." in shown(record(make_order("nccl"))).message
    )
    assert "A slow GPU" not in shown(record(make_order("gloo"))).message


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (make_order(reason="NoneLate"), "No rank is late. The latest is rank 10 (pid 102), by 4 ms"),
        (make_order(reason="LateByRole"), "No rank is named: rank 10 (pid 102) is late by 4 ms"),
        (ArrivalOrder(reason="NoRecords"), "No rank can be compared"),
        (ArrivalOrder(reason="TooFewRecords", records=120), "120 of at least 300 at one place; the time is known"),
        (ArrivalOrder(reason="TooFewRecords", records=9, ready_in_seconds=90), "at one place; enough in 1 min 30 s"),
    ],
)
def test_reason_without_a_name_is_said(order: ArrivalOrder, message: str) -> None:
    snapshot = record(order)
    assert message in shown(snapshot).message and not shown(snapshot).is_named
    assert series(snapshot, "hangwatch_job_straggler_lateness_ratio") == {}


def test_job_that_is_no_longer_read_loses_its_late_rank() -> None:
    snapshot = steps.record_arrival_orders(record(make_order()), {})
    assert snapshot.jobs["k1"].arrival_order is None
    assert series(snapshot, "hangwatch_rank_lateness_seconds") == {}


def make_record(number: int, group_id: int = 1, name: str = "0", **changes: object) -> FlightRecord:
    made = FlightRecord(
        id=number,
        reset_epoch=0,
        group_id=group_id,
        group_name=name,
        group_description="",
        collective_seq=number,
        p2p_seq=0,
        op_id=number,
        is_p2p=False,
        operation="gloo:all_reduce",
        state="completed",
        is_started=True,
        is_retired=True,
        created_unix_ns=10**18 + number,
        timeout_ms=-1,
        input_sizes=((8,),),
    )
    return replace(made, **changes)


def test_collectives_are_those_of_the_newest_group_that_counts() -> None:
    records = (
        make_record(1),
        make_record(2, group_id=3),
        make_record(3, group_id=3, is_p2p=True),
        make_record(4, group_id=3, is_coalesced_part=True),
        make_record(5, group_id=4, name="1"),
        make_record(6, group_id=5, name=""),
        make_record(7, group_id=3),
    )
    recorder = RankRecords(
        library="gloo",
        records=records,
        next_id=7,
        oldest_id=0,
        is_wrapped=False,
        capacity=2000,
        layout="2.13",
        read_unix_seconds=1.0,
    )
    assert [(one.group, one.number, one.operation) for one in list_collectives(recorder, {4})] == [
        ("0", 2, "all_reduce"),
        ("0", 7, "all_reduce"),
    ]
    assert [one.number for one in list_collectives(recorder, ())] == [2, 5, 7]
