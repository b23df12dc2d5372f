"""The last collectives of the ranks of a job as a trace: a JSON array of the Trace Event Format.

chrome://tracing and ui.perfetto.dev open it. Each rank is a process of the trace, and each of its groups a thread.
Times are microseconds since the first event.

A recorder holds when an operation was enqueued. With NCCL it also holds when the watchdog saw the completion. A
completed operation ends then or at the next enqueue of its group, whichever is first; without both it has no length. An
open operation ends when the recorder was read. Sorted by time, these operations are nested, as the format requires.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from hangwatch import words
from hangwatch.collectives.rank_records import MOST_DIMENSIONS
from hangwatch.model import GpuSweep, Rank, list_by_key
from hangwatch.model.flight_records import MOST_NAME, FlightRecord, RankRecords
from hangwatch.verdict.wording.sequence_numbers import NO_DESCRIPTION

_NS_PER_SECOND = 10**9


class RankTrace(NamedTuple):
    """A rank and its flight recorders."""

    rank: Rank
    recorders: Sequence[RankRecords]


def render(traces: Sequence[RankTrace], sweeps: Sequence[GpuSweep] = ()) -> bytes:
    """Return the trace of these ranks, with the power of their GPUs in these sweeps. Without records it is empty."""
    enqueued = [record.created_unix_ns for trace in traces for each in trace.recorders for record in each.records]
    if not enqueued:
        return b"[]\n"
    sampled = [round(sweep.taken_unix_seconds * _NS_PER_SECOND) for sweep in sweeps]
    first_unix_ns = min(enqueued + sampled)
    events = (event for trace in traces for event in _rank_events(trace, sweeps, first_unix_ns))
    return b"[\n" + b",\n".join(map(msgspec.json.encode, events)) + b"\n]\n"


def keep_newest(recorder: RankRecords, most: int) -> RankRecords:
    """Return the flight recorder with its newest records, `most` of them, and older open ones."""
    older, newest = recorder.records[:-most], recorder.records[-most:]
    return msgspec.structs.replace(recorder, records=(*(record for record in older if record.counts_as_open), *newest))


def _rank_events(trace: RankTrace, sweeps: Sequence[GpuSweep], first_unix_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank: its name, the operations of each group, and the power of its GPUs."""
    rank, pid = trace.rank, trace.rank.id.pid
    name = f"rank {rank.rank}" if rank.rank is not None else words.elided(rank.title or "process", MOST_NAME)
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    if rank.rank is not None:
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": rank.rank}}
    track = 0
    for recorder in trace.recorders:
        for records in list_by_key((record.group_id, record) for record in recorder.records).values():
            track += 1
            shown = {"pid": pid, "tid": track}
            description = records[-1].group_description
            group = "group" if description in ("", NO_DESCRIPTION) else description
            label = f"{group} {records[-1].group_name} ({recorder.library})"
            yield {"ph": "M", "name": "thread_name", **shown, "args": {"name": words.elided(label, MOST_NAME)}}
            for event in _operations(records, recorder, first_unix_ns):
                yield {**event, **shown}
    for sweep in sweeps:
        for gpu in sweep.gpus:
            if (gpu.uuid in rank.gpu_uuids or pid in gpu.pids) and gpu.power_watts is not None:
                at = _microseconds(round(sweep.taken_unix_seconds * _NS_PER_SECOND) - first_unix_ns)
                power = {"watts": gpu.power_watts}
                yield {"ph": "C", "name": f"power of GPU {gpu.index}", "ts": at, "pid": pid, "args": power}


def _operations(records: Sequence[FlightRecord], recorder: RankRecords, first_unix_ns: int) -> Iterator[dict[str, Any]]:
    """Yield an event for each operation of a group, without its track."""
    records = sorted(records, key=lambda record: record.created_unix_ns)
    read_unix_ns = max(round(recorder.read_unix_seconds * _NS_PER_SECOND), records[-1].created_unix_ns)
    for record, following in zip_longest(records, records[1:]):
        enqueued = record.created_unix_ns
        end, reason = _find_end(record, following, read_unix_ns)
        start = _microseconds(enqueued - first_unix_ns)
        number = record.p2p_seq if record.is_p2p else record.collective_seq
        operation = words.elided(record.operation.rpartition(":")[2], MOST_NAME)
        yield {
            "ph": "X",
            "name": f"{operation} #{number}{' (open)' if record.counts_as_open else ''}",
            "cat": recorder.library,
            "ts": start,
            "dur": _microseconds(end - first_unix_ns) - start,
            "args": {
                "end": reason,
                "enqueued": words.utc(enqueued / _NS_PER_SECOND, "%Y-%m-%d %H:%M:%S.%f UTC"),
                "sizes": _sizes(record),
            },
        }


def _find_end(record: FlightRecord, following: FlightRecord | None, read_unix_ns: int) -> tuple[int, str]:
    """Return the time at which the bar of an operation ends, and the reason."""
    if record.counts_as_open:
        return read_unix_ns, "open when read"
    ends = [] if following is None else [(following.created_unix_ns, "next enqueue")]
    if record.completed_unix_ns >= record.created_unix_ns:
        ends.append((min(record.completed_unix_ns, read_unix_ns), "completion"))
    return min(ends, default=(record.created_unix_ns, "unknown"))


def _sizes(record: FlightRecord) -> str:
    """Return the sizes of the first inputs: `4x1024, 16`."""
    tensors = ("x".join(map(str, size[:MOST_DIMENSIONS])) for size in record.input_sizes[:MOST_DIMENSIONS])
    return ", ".join(tensors)


def _microseconds(nanoseconds: int) -> int:
    """Return whole microseconds. With fractions, rounding could make two operations overlap."""
    return nanoseconds // 1000
