"""The records of a rank's flight recorder that count, read once or in several rounds; see `wait_graph`. Pure."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from hangwatch.model import EnqueuedOperation, Fault, GroupRecords, RecorderState, list_by_key
from hangwatch.model.flight_records import FlightRecord, GroupStatus, Library, RankRecords

MOST_GROUPS = 64
NEWEST_KEPT = 4
_OPEN_KEPT = 8
_PARTS_KEPT = 32  # sends and receives of all open batches of a group
MOST_DIMENSIONS = 8

# Operations with equal sizes on all ranks: of the input, of the output, and of both together for all ranks.
# torch/distributed/flight_recorder/components/types.py, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
_EQUAL_INPUTS = frozenset(
    {
        "all_reduce", "allreduce_coalesced", "broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "gather",
        "all_gather", "_all_gather_base", "all_gather_into_tensor", "all_gather_into_tensor_coalesced",
        "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
    }
)  # fmt: skip
_EQUAL_OUTPUTS = frozenset({"scatter"})
_EQUAL_TOTALS = frozenset({"all_to_all"})


def drop_unneeded(records: RankRecords) -> RankRecords:
    """Return the flight recorder with only the records that a rule needs: the oldest record, and a few of each group.

    The oldest is the first record after which none is missing. Of each group, the newest and the oldest open records
    are kept. If there are more than 64 groups, the last used ones are kept.
    """
    by_group = _split_by_group(records.records)
    last_used = sorted(by_group.values(), key=lambda of_group: of_group[-1].id)[-MOST_GROUPS:]
    whole = (record for record in records.records if record.id >= records.oldest_id)
    kept = {record.id: record for record in itertools.islice(whole, 1)}
    for of_group in last_used:
        still_open = [record for record in of_group if record.counts_as_open]
        for record in (*still_open[:_OPEN_KEPT], *of_group[-NEWEST_KEPT:]):
            kept[record.id] = record
        transfers = {record.p2p_seq for record in still_open[:_OPEN_KEPT] if record.is_p2p}
        parts = [part for part in of_group if part.is_p2p and part.is_coalesced_part and part.p2p_seq in transfers]
        kept |= {part.id: part for part in parts[:_PARTS_KEPT]}
    shown = {record.group_id for record in kept.values()}
    idle = [status for status in records.groups if status.group_id not in shown]
    return replace(
        records,
        records=tuple(kept[number] for number in sorted(kept)),
        groups=(*(status for status in records.groups if status.group_id in shown), *idle[:MOST_GROUPS]),
        members=records.members[:MOST_GROUPS],
    )


def merge_rounds(
    rounds: Sequence[Sequence[RankRecords]], threads: Mapping[int, str] = MappingProxyType({})
) -> tuple[RecorderState, ...]:
    """Return the records that count, from the flight recorders of one process in each round.

    For each library these are the records of the last round in which it was read. An operation stays open if it was
    also open in the first round. A flight recorder that was read in only one round does not count. If a library has two
    flight recorders (two copies of torch), the last one counts. `threads` are the names of the process's threads by
    `model.Thread.pthread_id`, "" for the main thread; empty if unknown.
    """
    if not any(rounds):
        return ()
    read = list_by_key(
        item for recorders in rounds for item in {records.library: records for records in recorders}.items()
    )
    states = (_merge_recorders(each[0], each[-1], threads) for _, each in sorted(read.items()) if len(each) > 1)
    return tuple(state for state in states if state is not None)


def faults(rounds: Sequence[Sequence[Fault]], usable: Iterable[RecorderState]) -> tuple[Fault, ...]:
    """Return the reasons why flight recorders were not read in the last round.

    Libraries in `usable` are left out, because their flight recorders were read in two other rounds.
    """
    last = next(filter(None, reversed(rounds)), None)
    if last is None:
        return ()
    read = {one.library for one in usable}
    return tuple(fault for fault in last if not read or find_library(fault) not in {None, *read})


def find_library(fault: Fault) -> Library | None:
    """Return the library with the flight recorder that caused a fault; None if the fault is about the whole process."""
    _, _, library = fault.subject.removeprefix("pid ").partition(" ")
    return library or None


def read_single_round(recorders: Sequence[RankRecords], *, counts_open: bool) -> tuple[RecorderState, ...]:
    """Return the records that count, from flight recorders that were read once. Without `counts_open`, none is open.

    Timeouts are left out, because they have expired. The time of reading is not known.
    """

    def of_one(recorder: RankRecords) -> RecorderState:
        opened = {_make_identity(record) for record in recorder.records if counts_open and record.counts_as_open}
        recorder = replace(recorder, read_unix_seconds=0.0)
        return _mark_open(recorder, recorder, opened, {})

    return tuple(sorted(map(of_one, recorders), key=lambda state: state.library))


def _merge_recorders(first: RankRecords, last: RankRecords, threads: Mapping[int, str]) -> RecorderState | None:
    if first.reset_epoch != last.reset_epoch or last.next_id < first.next_id:
        return None  # it was emptied or replaced between the rounds
    stays_open = {_make_identity(record) for record in first.records if record.counts_as_open}
    return _mark_open(first, last, stays_open, threads)


def _split_by_group(records: Iterable[FlightRecord]) -> dict[tuple[str, int], list[FlightRecord]]:
    """Return the records of each group, by its name and its number in the process."""
    return list_by_key(((record.group_name, record.group_id), record) for record in records)


def _mark_open(
    first: RankRecords, last: RankRecords, stays_open: set[tuple[int, int, int]], threads: Mapping[int, str]
) -> RecorderState:
    """Return the records of a flight recorder by group. An open operation in `stays_open` is marked as staying open."""
    by_group = _split_by_group(last.records)
    first_by_group = by_group if first is last else _split_by_group(first.records)
    # The name is "" under TORCH_DISTRIBUTED_DEBUG=DETAIL: groups cannot be distinguished.
    generations = list_by_key(key for key in sorted(by_group) if key[0])
    whole = (record for record in last.records if record.id >= last.oldest_id)
    groups = []
    for name, ids in generations.items():
        records, earlier = by_group[name, ids[-1]], first_by_group.get((name, ids[-1]), ())
        operations = tuple(
            _convert_record(record, last.read_unix_seconds, stays_open, threads) for record in _expand_batches(records)
        )
        groups.append(
            GroupRecords(
                library=last.library,
                name=name,
                description=records[-1].group_description,
                number=max([record.collective_seq for record in records]),
                generation=len(ids),
                operations=operations,
                has_lost_open=last.is_wrapped and _has_lost_open(last.groups, ids[-1], records),
                ranks=next((listed.ranks for listed in last.members if listed.name == name), ()),
                completed=_find_completed(earlier),
                thread=threads.get(records[-1].thread_id, ""),
            )
        )
    return RecorderState(
        library=last.library,
        is_wrapped=last.is_wrapped or last.reset_epoch > 0,
        oldest_unix_seconds=next((record.created_unix_ns / 1e9 for record in whole), None),
        groups=tuple(groups),
        idle=tuple(_find_idle(last, {group_id: name for name, group_id in by_group})),
    )


def _expand_batches(records: Iterable[FlightRecord]) -> Iterator[FlightRecord]:
    """Yield the records, with the sends and receives of a batch instead of the record that closes the batch.

    They have its id and its state, because they begin and complete together. The parts of other batches are left out.
    """
    parts: dict[int, list[FlightRecord]] = {}
    for record in records:
        if record.is_p2p and record.is_coalesced_part:
            parts.setdefault(record.p2p_seq, []).append(record)
        elif not record.is_coalesced_part:
            batch = parts.pop(record.p2p_seq, ()) if record.is_p2p else ()
            told = {"id": record.id, "state": record.state, "is_started": record.is_started, "is_coalesced_part": False}
            yield from (replace(part, **told) for part in batch)
            if not batch:
                yield record


def _find_idle(recorder: RankRecords, names: Mapping[int, str]) -> Iterator[tuple[str, int]]:
    """Yield the name and the last collective of each group without a record in which all operations have completed.

    `names` are those of the groups with records. A process counts its groups in the order in which they were created,
    and so do their names. Without a list of the groups (dumps of gloo), the first group is the default group.
    """
    created = sorted((one.name for one in recorder.members if one.name.isdecimal()), key=int)
    statuses = sorted(recorder.groups, key=lambda status: status.group_id)
    ids = [status.group_id for status in statuses]
    by_id = dict(zip(ids, created, strict=False)) if created else {0: "0", **names}
    is_complete = len(created or by_id) == len(statuses) == len(set(by_id.values())) and by_id.keys() == {*ids}
    if is_complete and all(by_id.get(group_id) == name for group_id, name in names.items()):
        for status in statuses:
            if status.group_id not in names and status.last_completed == status.last_enqueued:
                yield by_id[status.group_id], max(0, status.last_completed)  # torch: -1 before the first


def _find_completed(records: Sequence[FlightRecord]) -> int:
    """Return the number up to which a group has completed its collectives; -1 if none. It completes them in order."""
    opened: list[int] = []
    completed = [-1]
    for record in records:
        if not record.is_p2p and not record.is_coalesced_part:
            (completed if record.state == "completed" else opened).append(record.collective_seq)
    return min(opened) - 1 if opened else max(completed)


def _has_lost_open(statuses: Iterable[GroupStatus], group_id: int, records: Sequence[FlightRecord]) -> bool:
    """True if the group no longer has a record of an operation that torch does not count as completed.

    Gloo completes operations in several threads. So the last completed operation may be older than the last enqueued
    one. Backends that record through hooks count no completed operation (torch 2.15).
    """
    status = next((status for status in statuses if status.group_id == group_id), None)
    if status is None or status.last_completed < 0 or any(record.is_open for record in records):
        return False
    not_counted = range(status.last_completed + 1, status.last_enqueued + 1)
    shown = {record.collective_seq for record in records if record.collective_seq in not_counted}
    return len(not_counted) > len(shown)


def _convert_record(
    record: FlightRecord, read_unix_seconds: float, stays_open: set[tuple[int, int, int]], threads: Mapping[int, str]
) -> EnqueuedOperation:
    """Return an operation. Its timeout is left out if the time of reading is not known."""
    operation = record.operation.rpartition(":")[2]
    created, is_open = record.created_unix_ns / 1e9, record.state == "open"
    dtypes, sizes = _select_compared(record, operation)
    return EnqueuedOperation(
        number=record.p2p_seq if record.is_p2p else record.collective_seq,
        operation=operation,
        order=record.id,
        created_unix_seconds=created,
        open_seconds=max(0.0, read_unix_seconds - created) if is_open else 0.0,
        stays_open=is_open and not record.is_coalesced_part and _make_identity(record) in stays_open,
        is_p2p=record.is_p2p,
        dtypes=dtypes[:MOST_DIMENSIONS],
        sizes=tuple(size[:MOST_DIMENSIONS] for size in sizes[:MOST_DIMENSIONS]) if sizes else (),
        timeout_seconds=record.timeout_ms / 1e3 if record.timeout_ms > 0 and read_unix_seconds else None,
        by_main=not threads or not record.thread_id or threads.get(record.thread_id) == "",
        is_started=record.is_started,
    )


def _select_compared(record: FlightRecord, operation: str) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return the types and sizes of an operation that must match on all ranks. For all_to_all: elements in and out."""
    if operation in _EQUAL_INPUTS:
        return record.input_dtypes, record.input_sizes
    if operation in _EQUAL_OUTPUTS:
        return record.output_dtypes, record.output_sizes
    if operation in _EQUAL_TOTALS and max(len(record.input_sizes), len(record.output_sizes)) < MOST_DIMENSIONS:
        elements = (sum(map(math.prod, sizes)) for sizes in (record.input_sizes, record.output_sizes))
        return record.input_dtypes, tuple((total,) for total in elements)
    return (), ()


def _make_identity(record: FlightRecord) -> tuple[int, int, int]:
    return record.id, record.group_id, record.collective_seq
