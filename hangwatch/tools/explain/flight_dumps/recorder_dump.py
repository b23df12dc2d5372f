"""Parser for flight recorder dumps of torch. The records are those that `probes.torch_recorder` reads of a process.

Pure. The watchdog writes a dump as a pickle when an operation times out. The file's name is TORCH_FR_DUMP_TEMP_FILE
(formerly TORCH_NCCL_DEBUG_INFO_TEMP_FILE) plus the rank. A program writes one with `_dump_fr_trace()`, or as JSON with
`_dump_fr_trace_json()`. The format by version: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, before torch 2.7
NCCLUtils.hpp. The content is not trusted.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from hangwatch import words
from hangwatch.collectives.process_groups import DEFAULT_GROUP
from hangwatch.formats import decoding, pyspy_json
from hangwatch.limits import MOST_RANKS
from hangwatch.model import Frame, list_by_key
from hangwatch.model.flight_records import (
    BACKEND_NAME,
    MOST_BACKENDS,
    MOST_NAME,
    FlightRecord,
    GroupMembers,
    GroupStatus,
    Library,
    Progression,
    RankRecords,
    find_progressions,
    list_ranks,
    mark_batch_parts,
)
from hangwatch.tools.explain.flight_dumps.dump_values import (
    read_as,
    read_integer,
    read_text,
    read_time,
)
from hangwatch.tools.explain.flight_dumps.older_torch import count_batches, modernize_row
from hangwatch.tools.explain.flight_dumps.safe_pickle import load_plain_values

MOST_BYTES = 64 << 20
_MOST_VALUES = 4_000_000  # of JSON: about as many as a file of this size has
# Characters of all groups together, because groups of a pickle may have the same text
_LONGEST_RANKS = 1 << 24
_MOST_SIZES = 8
_MOST_FRAMES = 256
_LONGEST_PATH = 4096  # PATH_MAX of linux/limits.h

_KEY = re.compile(
    rb"profiling_name|comm_lib_version|nccl_version|nccl_comm_state|pg_config|pg_status|collective_seq_id"
)
_OPENS = re.compile(rb"^\s*\{\s*\"")
_PICKLED = re.compile(rb"^\x80[\x02-\x05]")
_VERSION = re.compile(r"^[12]\.\d{1,4}$")
_PEERS = re.compile(r"^[a-z0-9_.-]+:(?:send|recv) (\d{1,7})(?:->|<-)\d{1,7}$")
_RANKS = re.compile(r"^\[?[\d, ]*\]?$", re.ASCII)


class LastEnqueued(NamedTuple):
    """The newest operation of a process, and the innermost frame of the program that enqueued it; None if unknown."""

    operation: str
    number: int
    group_description: str
    frame: Frame | None


class FlightDump(NamedTuple):
    """The dump of one process. `version` is the version of the format.

    `possible_ranks` are the global ranks that are members of all groups with operations in the dump, as in
    `GroupMembers`; None if the groups have no list of members. The dump was written after `newest_unix_seconds`, which
    is the latest time in it.
    """

    recorders: tuple[RankRecords, ...]
    version: str
    newest_unix_seconds: float
    world_size: int | None = None
    possible_ranks: tuple[Progression, ...] | None = None
    last: LastEnqueued | None = None


def begins_so(head: bytes) -> bool:
    """True if a file begins like a dump: with a pickle, or with a JSON object that has a key of a dump."""
    return (
        (_PICKLED.match(head) or _OPENS.match(head)) is not None
        and _KEY.search(head) is not None
        and b"cuda_runtime_version" not in head  # ncclras -f json
    )


def parse(content: bytes) -> FlightDump:
    """Parse a dump of at most `MOST_BYTES`. Raises ValueError with the reason."""
    values, version = _load_values(content)
    rows: list[Mapping[object, object]] = [
        read_as(dict, row, "entry") for row in read_as(list, values.get("entries", []), "entries")
    ]
    if version.startswith("1."):
        rows = [modernize_row(row, number) for number, row in enumerate(rows)]
    by_library: dict[Library, list[FlightRecord]] = defaultdict(list)
    newest = 0
    for row in rows:
        record, library, latest = _parse_record(row)
        if by_library[library] and record.id <= by_library[library][-1].id:
            raise ValueError("has entries that are not in the order in which they were recorded")
        by_library[library].append(record)
        if len(by_library) > MOST_BACKENDS:
            raise ValueError(f"has operations of more than {MOST_BACKENDS} backends")
        newest = max(newest, latest)
    statuses = tuple(_read_statuses(values.get("pg_status", {})))
    members = tuple(_read_members(values.get("pg_config", {})))
    library_version = read_text(values.get("comm_lib_version", values.get("nccl_version", "")), "comm_lib_version")
    if not rows and statuses and library_version:
        by_library["nccl"] = []  # TORCH_INCLUDE_ONLY_ACTIVE: all operations have completed
    counted = {library: _leave_out_launching(records, statuses) for library, records in by_library.items()}
    recorders = tuple(
        RankRecords(
            library=library,
            records=mark_batch_parts(count_batches(_reopen_aborted(records)) if library == "nccl" else records),
            groups=statuses,
            members=members if library != "gloo" else (),
            next_id=records[-1].id + 1 if records else 0,
            oldest_id=_find_complete_start(records, statuses),
            is_wrapped=_has_lost(records, statuses),
            capacity=len(records),
            library_version=library_version,
            layout=f"dump {version}",
            read_unix_seconds=newest / 1e9,
        )
        for library, records in sorted(counted.items())
    )
    world = next((group.ranks for group in members if (group.name, group.description) == DEFAULT_GROUP), ())
    return FlightDump(
        recorders=recorders,
        version=version,
        newest_unix_seconds=newest / 1e9,
        world_size=world[0].last + 1 if len(world) == 1 and world[0].ranks == range(world[0].last + 1) else None,
        possible_ranks=_find_possible_ranks(by_library.get("nccl", ()), members),
        last=LastEnqueued(
            operation=record.operation.rpartition(":")[2],
            number=record.collective_seq,
            group_description=record.group_description,
            frame=_find_user_frame(rows[-1].get("frames", ())),
        )
        if rows
        else None,
    )


def _load_values(content: bytes) -> tuple[dict[object, object], str]:
    """Return the values of a dump, and the version of its format. Raises ValueError."""
    if len(content) > MOST_BYTES:
        raise ValueError(f"is larger than {MOST_BYTES >> 20} MiB")
    values = load_plain_values(content) if _PICKLED.match(content) else _decode_json(content)
    if isinstance(values, list):
        values = {"version": "1.0", "entries": values}
    if not isinstance(values, dict) or "version" not in values:
        raise ValueError("is not a flight recorder dump: it has no version")
    version = values["version"]
    if not isinstance(version, str) or not _VERSION.match(version):
        raise ValueError(f"has the unknown format {words.elided(str(version)[:MOST_NAME], 16)}; known are 1.x and 2.x")
    return values, version


def _decode_json(content: bytes) -> object:
    """Decode JSON. Raises ValueError if the content is not JSON or may take more memory than a dump."""
    if sum(map(content.count, (b"[", b"{", b","))) > _MOST_VALUES:
        raise ValueError("holds more values than the dump of a flight recorder can hold")
    try:
        return decoding.decode_plain_json(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"is not complete JSON: {words.elided(str(error), MOST_NAME)}") from None


def _leave_out_launching(records: Sequence[FlightRecord], statuses: Sequence[GroupStatus]) -> Sequence[FlightRecord]:
    """Return the records without a last collective that torch has not counted: the rank is inside its launch.

    torch records a collective, launches it, then counts it in its group. It counts batches and transfers otherwise.
    """
    last = records[-1] if records else None
    if last is None or any(
        record.group_id == last.group_id and (record.is_p2p or record.operation.endswith("coalesced"))
        for record in records
    ):
        return records
    counts = (status.last_enqueued for status in statuses if status.group_id == last.group_id)
    return records[:-1] if last.collective_seq - 1 in counts else records


def _reopen_aborted(records: Sequence[FlightRecord]) -> list[FlightRecord]:
    """Return the records; those that ended when the watchdog aborted their communicator are open.

    They took longer than their timeout, and their group has completed no operation that was enqueued after that.
    """
    newest_ns: dict[int, int] = {}  # when the newest completed operation of each group was enqueued
    kept = []
    for record in reversed(records):
        ended_ns = record.completed_unix_ns
        is_late = 0 < record.timeout_ms * 10**6 <= ended_ns - record.created_unix_ns
        is_aborted = is_late and newest_ns.get(record.group_id, 0) < ended_ns
        if not (is_aborted or record.is_open):
            newest_ns.setdefault(record.group_id, record.created_unix_ns)
        kept.append(replace(record, state="open", is_started=False) if is_aborted else record)
    return kept[::-1]


def _parse_record(row: Mapping[object, object]) -> tuple[FlightRecord, Library, int]:
    """Parse one operation. Return it with its library and the latest time in it."""
    operation = read_text(row.get("profiling_name"), "profiling_name")
    library, colon, _ = operation.partition(":")
    if not colon or not re.fullmatch(BACKEND_NAME, library):
        raise ValueError(f"has an operation without its backend, as in nccl:all_reduce: {words.elided(operation, 32)}")
    names = row.get("process_group")
    if not isinstance(names, (list, tuple)) or len(names) != 2:
        raise ValueError("has a process_group that is not a pair of name and description")
    state, is_retired = row.get("state"), read_as(bool, row.get("retired"), "retired")
    if state not in ("scheduled", "started", "completed"):
        raise ValueError("has an unknown state")
    created = read_time(row.get("time_created_ns"), "time_created_ns")
    if not created:
        raise ValueError("has an entry without a time")
    started, completed = (
        read_time(row.get(key), key) for key in ("time_discovered_started_ns", "time_discovered_completed_ns")
    )
    is_p2p = row.get("is_p2p", operation.partition(":")[2].startswith(("send", "recv")))
    thread_id = row.get("thread_id", "")
    record = FlightRecord(
        id=read_integer(row.get("record_id"), "record_id"),
        reset_epoch=0,
        group_id=read_integer(row.get("pg_id"), "pg_id"),
        group_name=read_text(names[0], "process_group"),
        group_description=read_text(names[1], "process_group"),
        collective_seq=read_integer(row.get("collective_seq_id"), "collective_seq_id"),
        p2p_seq=read_integer(row.get("p2p_seq_id"), "p2p_seq_id"),
        op_id=read_integer(row.get("op_id"), "op_id"),
        is_p2p=read_as(bool, is_p2p, "is_p2p"),
        operation=operation,
        state="completed" if (state == "completed" if library == "nccl" else is_retired) else "open",
        is_started=state != "scheduled",
        is_retired=is_retired,
        created_unix_ns=created,
        completed_unix_ns=completed,
        timeout_ms=read_integer(row.get("timeout_ms", -1), "timeout_ms", -1),
        input_sizes=_read_sizes(row.get("input_sizes", [])),
        output_sizes=_read_sizes(row.get("output_sizes", [])),
        input_dtypes=_read_types(row.get("input_dtypes", [])),
        output_dtypes=_read_types(row.get("output_dtypes", [])),
        thread_id=int(thread_id) if isinstance(thread_id, str) and re.fullmatch(r"[0-9]{1,20}", thread_id) else 0,
        thread_name=read_text(row.get("thread_name", ""), "thread_name"),
    )
    return record, library, max(created, started, completed)


def _read_sizes(value: object) -> tuple[tuple[int, ...], ...]:
    """Return the first dimensions of the first tensors: as many as are compared between ranks."""
    return tuple(
        tuple(read_integer(number, "size") for number in size[:_MOST_SIZES])
        for size in read_as(list, value, "sizes")[:_MOST_SIZES]
        if isinstance(size, (list, tuple))
    )


def _read_types(value: object) -> tuple[str, ...]:
    return tuple(read_text(name, "type") for name in read_as(list, value, "types")[:_MOST_SIZES])


def _read_statuses(value: object) -> Iterator[GroupStatus]:
    for group, status in read_as(dict, value, "pg_status").items():
        told = read_as(dict, status, "pg_status")
        enqueued, started, completed = (
            read_integer(told.get(f"last_{what}_collective", -1), "pg_status", -1)
            for what in ("enqueued", "started", "completed")
        )
        yield GroupStatus(
            group_id=read_integer(group, "pg_status"),
            last_enqueued=enqueued,
            last_started=started,
            last_completed=completed,
        )


def _read_members(value: object) -> Iterator[GroupMembers]:
    """Yield the members of named groups. The entry of gloo has no name and is skipped: each new group overwrites it."""
    characters_left = _LONGEST_RANKS
    for name, config in read_as(dict, value, "pg_config").items():
        group_config = read_as(dict, config, "pg_config")
        if not name:
            continue
        text = group_config.get("ranks")
        if not isinstance(text, str) or len(text) > characters_left:
            raise ValueError("has a list of ranks that is not a text, or is too long")
        characters_left -= len(text)
        yield GroupMembers(
            name=read_text(name, "pg_config"),
            description=read_text(group_config.get("desc", ""), "pg_config"),
            ranks=_parse_ranks(text),
        )


@lru_cache(maxsize=32)  # the list of all ranks is the same in all dumps
def _parse_ranks(text: str) -> tuple[Progression, ...]:
    """Parse a list of ranks in the form of torch's ranks_str: `[0, 1, 2]`, or without the brackets."""
    if not _RANKS.match(text):
        raise ValueError("has an invalid list of ranks")
    numbers = sorted({int(number[0]) for number in re.finditer(r"\d{1,9}", text)})
    if numbers and numbers[-1] >= MOST_RANKS:
        raise ValueError("has a rank out of its range")
    return find_progressions(numbers)


def _find_complete_start(records: Sequence[FlightRecord], statuses: Sequence[GroupStatus]) -> int:
    """Return the lowest id after which no operation is missing.

    A dump may contain only open operations, although others have completed (TORCH_INCLUDE_ONLY_ACTIVE).
    """
    if all(record.state == "open" for record in records) and any(status.last_completed > 0 for status in statuses):
        return records[-1].id + 1 if records else 0
    first = records[-1].id if records else 0
    for record in reversed(records):
        if record.id < first - 1:
            break
        first = record.id
    return first


def _has_lost(records: Sequence[FlightRecord], statuses: Sequence[GroupStatus]) -> bool:
    """True if earlier operations are missing: the first id is not 0, or the numbers of a group begin above 1.

    They begin above 1 after a reset of the flight recorder, which a dump does not report.
    """
    numbers = list_by_key((record.group_id, record.collective_seq) for record in records if not record.is_p2p)
    return _find_complete_start(records, statuses) > 0 or any(min(of_group) > 1 for of_group in numbers.values())


def _find_possible_ranks(
    records: Sequence[FlightRecord], members: Sequence[GroupMembers]
) -> tuple[Progression, ...] | None:
    """Return the ranks that are in all groups with operations.

    None if they are unknown. A send or recv contains the index of the rank that called it.
    """
    listed = {group.name: group.ranks for group in members}
    possible: set[int] | None = None
    places: dict[str, str] = {}
    for record in records:
        if record.group_name not in places or _PEERS.match(record.operation):
            places[record.group_name] = record.operation
    for name in places.keys() & listed.keys():
        ranks = list_ranks(listed[name])
        peers = _PEERS.match(places[name])
        if peers and int(peers.group(1)) < len(ranks):
            ranks = [ranks[int(peers.group(1))]]
        possible = set(ranks) if possible is None else possible & set(ranks)
    return None if possible is None else find_progressions(sorted(possible))


def _find_user_frame(frames: object) -> Frame | None:
    """Return the innermost frame outside installed packages; None if there is none."""
    for frame in frames[:_MOST_FRAMES] if isinstance(frames, (list, tuple)) else ():
        fields = read_as(dict, frame, "frames")
        file, line = fields.get("filename"), fields.get("line")
        if (
            isinstance(file, str)
            and len(file) <= _LONGEST_PATH
            and not pyspy_json.is_installed(file)
            and file.endswith(".py")
        ):
            return Frame(
                function=read_text(fields.get("name"), "frames"),
                file=read_text(file.rpartition("/")[2], "frames"),
                line=line if isinstance(line, int) and 0 < line < 1 << 31 else None,
            )
    return None
