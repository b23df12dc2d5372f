"""The node that is late as a whole: by simulated records, clocks that are off, and replies of nodes."""

import random
import time
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from hangwatch.collectives.arrival import Enqueued
from hangwatch.collectives.node_arrivals import NodeOrder, NodeTimes, compare_nodes, find_median_times
from hangwatch.model import ProcessId
from hangwatch.tools.commands.slow_nodes import describe
from hangwatch.tools.fleet.node_records import JobRecords, NodeRecords, Replies, compare
from hangwatch.tools.fleet.remote_run import Reply

STEP_SECONDS = 0.1
START_NS = 1_700_000_000 * 10**9
NODES = ("gpu-1", "gpu-2", "gpu-3", "gpu-4")


def times_of(
    nodes: Sequence[str], late: Mapping[str, float], shift: Mapping[str, float], steps: int = 100
) -> dict[str, list[list[Enqueued]]]:
    """Return the collectives of two ranks on each node. `late` and `shift` are seconds: of the ranks, of the clock."""
    rng, ranks = random.Random(1), dict[str, list[list[Enqueued]]]()
    for node in nodes:
        offset = late.get(node, 0.0) + shift.get(node, 0.0)
        times = [[step * STEP_SECONDS + offset + rng.gauss(0, 0.0005) for step in range(steps)] for _ in range(2)]
        ranks[node] = [
            [
                Enqueued("nccl", "0", "all_reduce", ((8,),), step, START_NS + round(1e9 * seconds))
                for step, seconds in enumerate(of_rank)
            ]
            for of_rank in times
        ]
    return ranks


def order_of(
    late: Mapping[str, float] = {},
    shift: Mapping[str, float] = {},
    errors: Mapping[str, float | None] = {},
    nodes: Sequence[str] = NODES,
    steps: int = 100,
) -> NodeOrder:
    """Compare nodes with clocks that are right within 1 ms, unless `errors` has another value in seconds."""
    times = times_of(nodes, late, shift, steps)
    return compare_nodes(
        [
            NodeTimes(
                node=node,
                clock_error_seconds=errors.get(node, 0.001),
                places=find_median_times(
                    {ProcessId(pid=rank, start_ticks=1): each for rank, each in enumerate(times[node])}
                ),
            )
            for node in nodes
        ]
    )


@pytest.mark.parametrize("nodes", [NODES, NODES[:2]])
def test_node_that_is_late_by_more_than_the_clocks_explain_is_named(nodes: Sequence[str]) -> None:
    order = order_of(late={"gpu-2": 0.010}, nodes=nodes)
    assert (order.reason, order.latest) == ("", "gpu-2")
    assert order.lateness_seconds["gpu-2"] == pytest.approx(0.010, abs=0.001)
    assert order.step_seconds == pytest.approx(STEP_SECONDS, rel=0.05) and order.clock_error_seconds == 0.004
    assert "gpu-2 is late by 10 ms" in describe(order).replace("9.9", "10").replace("10.1", "10")


@pytest.mark.parametrize(("error", "reason"), [(0.003, "WithinClockError"), (0.0015, "")])
def test_clock_that_is_off_is_reported_only_beyond_its_bound(error: float, reason: str) -> None:
    """A clock is 10 ms ahead. Twice the sum of two errors is 12 ms, or 6 ms."""
    errors = dict.fromkeys(NODES, error)
    order = order_of(shift={"gpu-3": 0.010}, errors=errors)
    assert (order.reason, order.latest) == (reason, "gpu-3")
    assert order.clock_error_seconds == pytest.approx(4 * error)


def test_only_one_clock_with_a_large_error_is_enough_to_name_no_node() -> None:
    assert order_of(late={"gpu-2": 0.010}, errors={"gpu-4": 0.02}).reason == "WithinClockError"
    assert "clocks may explain 42 ms" in describe(order_of(late={"gpu-2": 0.010}, errors={"gpu-4": 0.02}))


def test_node_without_a_synchronized_clock_is_not_compared() -> None:
    order = order_of(late={"gpu-2": 0.010}, shift={"gpu-1": 5.0}, errors={"gpu-1": None})
    assert (order.reason, order.latest, order.without_clock) == ("", "gpu-2", ("gpu-1",))
    assert set(order.lateness_seconds) == {"gpu-2", "gpu-3", "gpu-4"}
    assert "Not compared: gpu-1: the clock is not synchronized" in describe(order)
    for alone in (order_of(errors=dict.fromkeys(NODES[1:])), order_of(nodes=NODES[:1])):
        assert (alone.reason, alone.latest) == ("NoRecords", None)
        said = "no node is named: fewer than two nodes with a synchronized clock hold the same collectives"
        assert describe(alone).startswith(said)


def test_level_nodes_and_few_steps_name_no_node() -> None:
    assert order_of().reason == "NoneLate"
    assert order_of(late={"gpu-2": 0.010}, steps=30).reason == "TooFewRecords"
    assert order_of(late={"gpu-2": 0.010, "gpu-3": 0.010}).reason == "NoneLate"


def test_median_times_are_of_collectives_that_all_ranks_of_the_node_hold() -> None:
    def rank(*rows: tuple[int, int]) -> list[Enqueued]:
        return [Enqueued("gloo", "0", "all_reduce", (), number, unix_ns) for number, unix_ns in rows]

    by_rank = {
        ProcessId(pid=1, start_ticks=1): rank((1, 10), (2, 20)),
        ProcessId(pid=2, start_ticks=1): rank((2, 24), (3, 30)),
    }
    (place,) = find_median_times(by_rank)
    assert (place.numbers, place.unix_ns) == ((2,), (20,))


def reply(node: str, records: object) -> Reply:
    return Reply(
        node=node, status=0, output=msgspec.json.encode(records), asked_unix_seconds=100.0, ended_unix_seconds=101.0
    )


def test_replies_of_nodes_have_the_name_that_the_user_gave() -> None:
    replies, answers = Replies(), {}
    times = times_of(NODES, {"gpu-4": 0.02}, {})
    for node in NODES:
        places = find_median_times({ProcessId(pid=rank, start_ticks=1): each for rank, each in enumerate(times[node])})
        job = JobRecords(job_id="train", job_key="k1", places=places)
        records = NodeRecords(node="localhost", printed_unix_seconds=100.5, clock_error_seconds=0.0001, jobs=(job,))
        answers[node] = replies.take(reply(node, records))
    assert None not in answers.values()
    assert compare({node: records for node, records in answers.items() if records})["k1"].latest == "gpu-4"


@pytest.mark.parametrize(
    "output",
    [
        b"{}",
        b'{"node": "a", "printed_unix_seconds": 1, "clock_error_seconds": -1, "jobs": []}',
        b'{"node": "a", "printed_unix_seconds": 1, "clock_error_seconds": 0, "jobs": [{"job_id": "a", "job_key": "b",'
        b' "places": [{"library": "nccl", "group": "0", "operation": "", "sizes": [], "numbers": [1], "unix_ns": []}]}]}',
    ],
)
def test_reply_that_does_not_fit_is_an_error_of_its_node(output: bytes) -> None:
    replies = Replies()
    bad = Reply(node="gpu-1", status=0, output=output, asked_unix_seconds=1.0, ended_unix_seconds=1.0)
    assert replies.take(bad) is None and [nodes for _, nodes in replies.failed] == [["gpu-1"]]


@pytest.mark.machines
def test_reply_as_large_as_the_limit_is_compared_in_time() -> None:
    place = {"library": "x", "group": "", "operation": "", "sizes": [], "numbers": [1], "unix_ns": [1]}
    job = {"job_id": "", "job_key": "k1", "places": [place | {"group": str(number)} for number in range(330_000)]}
    records = {"node": "a", "printed_unix_seconds": 1.0, "clock_error_seconds": 0.0, "jobs": [job]}
    began, replies = time.process_time(), Replies()
    answers = {node: replies.take(reply(node, records)) for node in NODES[:2]}
    assert compare({node: records for node, records in answers.items() if records})["k1"].reason == "NoRecords"
    assert time.process_time() - began < 30
