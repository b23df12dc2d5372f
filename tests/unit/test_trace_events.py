"""The trace of the last collectives: it follows the Trace Event Format, and shows what the recorders hold."""

import json
from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch.model import GpuSample, GpuSweep, ProcessId, Rank
from hangwatch.model.flight_records import FlightRecord
from hangwatch.tools import trace_events
from hangwatch.tools.trace_events import RankTrace
from tests.unit.test_waitfor import record, recorder

Event = dict[str, Any]
READ_SECONDS = 1000.0


def check_format(trace: bytes) -> list[Event]:
    """Return the events of a trace that follows the Trace Event Format, as Perfetto reads it.

    Each operation is on a named track of a named process. The operations of a track are nested, so none overlaps the
    end of another one.
    """
    events: list[Event] = json.loads(trace)
    named = {(one["name"], one["pid"], one.get("tid")) for one in events if one["ph"] == "M" and "name" in one["args"]}
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for one in events:
        assert one["ph"] in ("M", "X", "C") and one["name"].isprintable(), one
        assert ("process_name", one["pid"], None) in named, one
        if one["ph"] == "M":
            continue
        assert isinstance(one["ts"], int) and one["ts"] >= 0, one
        if one["ph"] == "C":
            assert all(isinstance(value, float) for value in one["args"].values()), one
            continue
        assert isinstance(one["dur"], int) and one["dur"] >= 0, one
        assert ("thread_name", one["pid"], one["tid"]) in named, one
        tracks[one["pid"], one["tid"]].append(one)
    for track in tracks.values():
        ends: list[int] = []
        for one in sorted(track, key=lambda one: (one["ts"], -one["dur"])):
            while ends and ends[-1] <= one["ts"]:
                ends.pop()
            assert not ends or one["ts"] + one["dur"] <= ends[-1], one
            ends.append(one["ts"] + one["dur"])
    timed = [one["ts"] for one in events if "ts" in one]
    assert not timed or min(timed) == 0
    return events


def operations(events: list[Event], pid: int = 100) -> list[tuple[int, str, int, int]]:
    """Return the operations of a rank: track, name, start and length in whole seconds."""
    shown = [one for one in events if one["ph"] == "X" and one["pid"] == pid]
    return [(one["tid"], one["name"], one["ts"] // 10**6, one["dur"] // 10**6) for one in shown]


def ends(events: list[Event]) -> list[str]:
    """Return the reasons for the ends of all operations."""
    return [one["args"]["end"] for one in events if one["ph"] == "X"]


def a_trace(*records: FlightRecord, rank: int | None = 0, **given: object) -> RankTrace:
    identity = ProcessId(pid=100 + (rank or 0), start_ticks=1)
    return RankTrace(Rank(id=identity, rank=rank, local_rank=rank), [recorder(*records, **given)])


def test_completed_operation_ends_at_the_next_enqueue_of_its_group() -> None:
    records = record(1), record(2), record(5, group="1"), record(9)
    events = check_format(trace_events.render([a_trace(*records)]))
    assert operations(events) == [
        (1, "all_reduce #1", 0, 1),
        (1, "all_reduce #2", 1, 7),
        (1, "all_reduce #9", 8, 0),
        (2, "all_reduce #5", 4, 0),
    ]
    names = {one.get("tid"): one["args"]["name"] for one in events if one["name"].endswith("_name")}
    assert names == {None: "rank 0", 1: "default_pg 0 (gloo)", 2: "tp 1 (gloo)"}


def test_open_operation_ends_when_it_was_read_and_is_marked() -> None:
    records = record(990, state="open"), record(992), record(996, state="open")
    events = check_format(trace_events.render([a_trace(*records, read_unix_seconds=READ_SECONDS)]))
    assert operations(events) == [
        (1, "all_reduce #990 (open)", 0, 10),
        (1, "all_reduce #992", 2, 4),
        (1, "all_reduce #996 (open)", 6, 4),
    ]
    assert ends(events) == ["open when read", "next enqueue", "open when read"]


def test_operation_ends_when_nccl_saw_its_completion() -> None:
    """A completion before the enqueue, or after the reading, is not possible."""
    seen = {1: 1.5, 2: 3.5, 3: 2.5, 4: 9.5}
    records = (record(number, completed_unix_ns=int(second * 1e9)) for number, second in seen.items())
    events = check_format(trace_events.render([a_trace(*records, library="nccl", read_unix_seconds=8.0)]))
    assert [one["dur"] for one in events if one["ph"] == "X"] == [500_000, 1_000_000, 1_000_000, 4_000_000]
    assert ends(events) == ["completion", "next enqueue", "next enqueue", "completion"]


def test_part_of_a_batch_is_not_open() -> None:
    part = record(1, state="open", is_coalesced_part=True)
    assert operations(check_format(trace_events.render([a_trace(part, record(3))])))[0] == (1, "all_reduce #1", 0, 2)


def test_times_of_all_ranks_count_from_the_first_event_of_the_job() -> None:
    traces = [a_trace(record(5)), a_trace(record(2), rank=1)]
    events = check_format(trace_events.render(traces))
    assert operations(events) == [(1, "all_reduce #5", 3, 0)]
    assert operations(events, pid=101) == [(1, "all_reduce #2", 0, 0)]
    assert [one["args"]["enqueued"] for one in events if one["ph"] == "X"] == [
        "1970-01-01 00:00:05.000000 UTC",
        "1970-01-01 00:00:02.000000 UTC",
    ]


def test_power_of_the_gpus_of_a_rank_is_a_counter() -> None:
    def taken(second: float, watts: float | None) -> GpuSweep:
        gpus = (
            GpuSample(index=0, uuid="GPU-0", power_watts=watts),
            GpuSample(index=1, uuid="GPU-1", power_watts=300.0, pids=(101,)),
        )
        return GpuSweep(taken_monotonic_seconds=second, taken_unix_seconds=second, gpus=gpus)

    rank = Rank(id=ProcessId(pid=100, start_ticks=1), rank=0, local_rank=0, gpu_uuids=("GPU-0",))
    traces = [RankTrace(rank, [recorder(record(2))]), a_trace(record(2), rank=1)]
    events = check_format(trace_events.render(traces, [taken(1.5, None), taken(3.5, 650.0)]))
    assert [(one["pid"], one["name"], one["ts"], one["args"]) for one in events if one["ph"] == "C"] == [
        (100, "power of GPU 0", 2_000_000, {"watts": 650.0}),
        (101, "power of GPU 1", 0, {"watts": 300.0}),
        (101, "power of GPU 1", 2_000_000, {"watts": 300.0}),
    ]


def test_names_of_a_hostile_job_are_bounded_and_escaped() -> None:
    hostile = '"},\n\x1b[2J\u202e</script>\ud800' + "x" * 100_000
    huge = tuple((2**52,) * 64 for _ in range(1024))
    names = {"operation": hostile, "group_name": hostile, "group_description": hostile}
    records = (replace(record(number, input_sizes=huge), **names) for number in (1, 2))
    trace = trace_events.render([a_trace(*records)])
    events = check_format(trace)
    assert len(trace) < 10_000
    assert max(len(one["name"]) for one in events) < 150
    assert not any(character in trace.decode() for character in "\x1b\u202e\ud800")


def test_newest_records_and_older_open_ones_are_kept() -> None:
    records = record(1), record(2, state="open"), record(3), record(4), record(5)
    assert [one.id for one in trace_events.keep_newest(recorder(*records), 2).records] == [2, 4, 5]


def test_ranks_without_records_give_an_empty_trace() -> None:
    assert check_format(trace_events.render([a_trace()])) == []


drawn = st.builds(
    record,
    st.integers(1, 50),
    group=st.sampled_from(["0", "1"]),
    state=st.sampled_from(["open", "completed"]),
    created_unix_ns=st.integers(1_420_000_000 * 10**9, 1_420_000_001 * 10**9),
    completed_unix_ns=st.just(0) | st.integers(1_420_000_000 * 10**9, 1_420_000_003 * 10**9),
    is_coalesced_part=st.booleans(),
)


@given(st.lists(st.lists(drawn, max_size=12), min_size=1, max_size=3), st.floats(1_419_999_999, 1_420_000_002))
def test_any_records_give_a_trace_of_nested_operations(ranks: list[list[FlightRecord]], read_seconds: float) -> None:
    traces = [a_trace(*records, rank=rank, read_unix_seconds=read_seconds) for rank, records in enumerate(ranks)]
    events = check_format(trace_events.render(traces))
    assert sum(one["ph"] == "X" for one in events) == sum(map(len, ranks))
