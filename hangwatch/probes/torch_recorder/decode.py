"""Decode a flight recorder in the memory of a process, live or recorded. Pure.

The writer holds a mutex that no other process can take. So the counters are read before and after the records. Records
that the writer may have touched in between are dropped. If the buffer itself moved, everything is read again.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from hangwatch.limits import MOST_RANKS
from hangwatch.model import list_by_key
from hangwatch.model.flight_records import (
    EARLIEST_UNIX_NS,
    LATEST_UNIX_NS,
    MOST_GROUPS,
    MOST_SEQUENCE,
    GroupMembers,
    GroupStatus,
    Library,
    RankRecords,
    find_progressions,
    mark_batch_parts,
)
from hangwatch.probes.process.memory_image import (
    VALUE_OFFSET,
    Image,
    Place,
    Read,
    UnreadableError,
    content,
    map_nodes,
    require,
    text_at,
    vector,
)
from hangwatch.probes.torch_recorder.layouts import MAP_BYTES, Layout
from hangwatch.probes.torch_recorder.rows import Mark, Rows, Shapes, Texts, Unpacked, record

MOST_RECORDS = 4096  # the newest of a larger buffer
_USUAL_RATIO = 0.75  # of the time between operations
MOST_COUNTED_GROUPS = 64  # of a progress counter
MOST_MEMBERS = 1 << 17
TRIES = 4
_MOST_EPOCHS = 1 << 32
# After two bools, in every version; its first byte is not 0 while the mutex is held
_MUTEX = 8


class _Head(NamedTuple):
    """The counters of a recorder."""

    begin: int
    records: int
    capacity: int
    next: int
    next_id: int
    epoch: int
    is_locked: bool


def _head(raw: bytes, layout: Layout) -> _Head:
    """Parse the counters. Raises UnreadableError if they are impossible, or if the recorder is off.

    A writer that holds the lock changes them one after the other: then counters that do not fit each other may pass.
    """
    enabled, captures = raw[layout.enabled], raw[layout.enabled + 1]
    begin, end, reserved = struct.unpack_from("<QQQ", raw, layout.entries)
    capacity, following, next_id = (
        int.from_bytes(raw[offset : offset + 8], "little") for offset in (layout.capacity, layout.next, layout.next_id)
    )
    epoch = int.from_bytes(raw[layout.reset_epoch : layout.reset_epoch + 8], "little") if layout.reset_epoch > 0 else 0
    require(enabled < 2 and captures < 2, "a flag is neither true nor false")
    if not enabled:
        require(not any((begin, end, reserved, capacity, following, next_id, epoch)), "it is off, but holds records")
        raise UnreadableError("RecorderOff", "the flight recorder is off: its buffer has no capacity")
    require(begin <= end <= reserved and not begin % 8, "its buffer ends before it begins")
    count, remainder = divmod(end - begin, layout.record_bytes)
    require(not remainder and not (reserved - begin) % layout.record_bytes, "its buffer does not hold whole records")
    require(capacity > 0 and count <= capacity, "it holds more records than its capacity")
    is_next = following < capacity if count == capacity else following == count * layout.moves_while_filling
    require(epoch < _MOST_EPOCHS and next_id < MOST_SEQUENCE, "a counter is out of its range")
    is_locked = raw[_MUTEX] != 0
    is_counted = epoch > 0 or (
        next_id == count if count < capacity else next_id >= count and next_id % capacity == following
    )
    if not (is_next and is_counted):
        reason = "ChangedWhileRead" if is_locked else "UnknownLayout"
        raise UnreadableError(reason, "its counters do not match its records")
    return _Head(begin, count, capacity, following, next_id, epoch, is_locked)


def could_be(raw: bytes, address: int, layout: Layout) -> bool:
    """True if these bytes at this address can be an active recorder. The search by shape uses this test."""
    try:
        _head(raw, layout)
        for offset in (layout.statuses, layout.members):
            root, left, right, count = struct.unpack_from("<QQQQ", raw, offset + 16)
            header = address + offset + 8
            require((root == 0 and left == right == header) if not count else bool(root and left and right), "a map")
            require(struct.unpack_from("<I", raw, offset + 8)[0] == 0 and count <= MOST_GROUPS, "a map")
    except UnreadableError:
        return False
    return True


def _marks(entries: Sequence[_Entry], head: _Head, layout: Layout) -> list[Mark]:
    """Parse the marks of all records. Raises UnreadableError if a mark contradicts the counters."""
    wanted = (
        (layout.record_id, "Q"),
        (layout.record_epoch, "Q"),
        (layout.group_id, "Q"),
        (layout.collective_seq, "Q"),
        (layout.p2p_seq, "Q"),
        (layout.created, "q"),
        (layout.is_p2p, "B"),
        (layout.completed + 8, "B"),
        (layout.retired, "B"),
    )
    unpack = Unpacked(wanted, layout.record_bytes).unpack
    marks = [Mark._make(unpack(raw)) for raw, _ in entries]
    for number, mark in enumerate(marks, head.next_id - len(marks)):
        require(mark.id == number and mark.epoch == head.epoch, "records are not in sequence")
        require(max(mark.is_p2p, mark.is_completed, mark.is_retired) < 2, "a flag is neither true nor false")
        require(EARLIEST_UNIX_NS < mark.created < LATEST_UNIX_NS, "the time of a record is out of its range")
        require(mark.collective < MOST_SEQUENCE and mark.p2p < MOST_SEQUENCE, "a number is out of its range")
    return marks


def _select(marks: Sequence[Mark], library: Library, newest: int | None) -> Iterable[int]:
    """Return the indexes of the records to read completely.

    Without `newest` these are all records. Otherwise they are the oldest one, the open ones, and the newest of each
    group. For an open record, all records with its number are included: one of them may close its batch.
    """
    if newest is None:
        return range(len(marks))
    is_nccl = library == "nccl"
    selected = {index for index, mark in enumerate(marks) if not (mark.is_completed if is_nccl else mark.is_retired)}
    batches = {marks[index].batch for index in selected}
    counts = Counter[int]()
    for index in range(len(marks) - 1, -1, -1):
        mark = marks[index]
        if counts[mark.group] < newest or (batches and mark.batch in batches):
            selected.add(index)
        counts[mark.group] += 1
    return sorted(selected | set(range(min(1, len(marks)))))


def _find_usual_gaps(marks: Iterable[Mark]) -> dict[int, float]:
    """Return for each group the time between two operations that makes up three quarters of the time, with longer ones.

    The longest is left out unless it is the only one: it may be a single pause.
    """
    created = list_by_key((mark.group, mark.created) for mark in marks)
    return {group: _find_usual([late - early for early, late in pairwise(times)]) for group, times in created.items()}


def _find_usual(gaps_ns: Sequence[int]) -> float:
    longest_first = sorted(gaps_ns, reverse=True)
    longest_first = longest_first[1:] or longest_first
    left = _USUAL_RATIO * sum(longest_first)
    for gap in longest_first:
        left -= gap
        if left <= 0:
            return gap / 1e9
    return 0.0


def read(
    read_memory: Read,
    address: int,
    layout: Layout,
    library: Library,
    now: Callable[[], float],
    *,
    newest: int | None = None,
    tries: int = TRIES,
) -> RankRecords:
    """Return the records of the recorder at `address`. With `newest`, completed records are omitted, see `_select`.

    Raises only UnreadableError.
    """
    error = UnreadableError("ChangedWhileRead", "the buffer moved each time it was read")
    for _ in range(tries):
        try:
            return _read_once(Image(read_memory), address, layout, library, newest=newest, now=now())
        except UnreadableError as new_error:
            error = new_error
            if new_error.reason not in ("UnknownLayout", "ChangedWhileRead"):
                break
    raise error


def _read_once(
    image: Image, address: int, layout: Layout, library: Library, *, newest: int | None, now: float
) -> RankRecords:
    def head() -> tuple[_Head, bytes]:
        (raw,) = image.take([(address, layout.recorder_bytes)])
        return _head(raw, layout), raw

    before, raw = head()
    entries = _entries(image, before, layout)
    entries = _stable(entries, before, head()[0])
    marks = _marks(entries, before, layout)
    parse_row, texts, shapes = Rows(layout).parse, Texts(), Shapes(layout)
    rows = [(marks[index], parse_row(*entries[index])) for index in _select(marks, library, newest)]
    contents = image.take_parts(part for _, row in rows for part in (*row.texts, *row.tensors))
    first_id = before.next_id - len(_stable(entries, before, head()[0]))
    usual_gaps = _find_usual_gaps(marks)
    statuses = tuple(
        replace(status, usual_gap_seconds=usual_gaps.get(status.group_id, 0.0))
        for status in _statuses(image, address, raw, layout)
    )
    known_groups = {status.group_id for status in statuses}
    records = [
        record(
            mark,
            row,
            [texts.decode(part, contents) for part in row.texts],
            shapes.parse(row.tensors, contents),
            library,
        )
        for mark, row in rows
        if mark.id >= first_id
    ]
    require(known_groups.issuperset(mark.group for mark in marks), "a record belongs to an unknown group")
    return RankRecords(
        library=library,
        records=mark_batch_parts(records),
        groups=statuses,
        members=_members(image, address, raw, layout) if library != "gloo" else (),
        next_id=before.next_id,
        oldest_id=first_id,
        is_wrapped=first_id > 0,
        reset_epoch=before.epoch,
        capacity=min(before.capacity, 1 << 31),
        library_version=_version(image, address, raw, layout),
        layout=layout.name,
        read_unix_seconds=now,
    )


class GroupTable(NamedTuple):
    """The table of groups as it was read and checked: its header and nodes, and the place of each group's number."""

    header: bytes = b""
    nodes: tuple[Place, ...] = ()
    contents: list[bytes] = []  # noqa: RUF012 - never changed; compared with what `Image.take` returns
    numbers: tuple[tuple[int, Place], ...] = ()


class Counts(NamedTuple):
    """The last enqueued number of each group (-1 for none), and the epoch of the recorder."""

    epoch: int
    by_group: dict[int, int]
    table: GroupTable


def last_enqueued(read_memory: Read, address: int, layout: Layout, checked: GroupTable | None = None) -> Counts:
    """Return the numbers of the groups of the recorder at `address`, without its records. Raises UnreadableError.

    The table is read each time. If it has the same bytes as the table `checked`, it is not checked again.
    """
    image = Image(read_memory)
    (raw,) = image.take([(address, layout.recorder_bytes)])
    header = raw[layout.statuses : layout.statuses + MAP_BYTES]
    contents = [] if checked is None or header != checked.header else list(image.take(checked.nodes))
    table = checked if checked is not None and contents and contents == checked.contents else None
    if table is None:
        _head(raw, layout)
        nodes = map_nodes(image, address + layout.statuses, header, _STATUS.size, MOST_COUNTED_GROUPS)
        rows = [_STATUS.unpack(node.value) for node in nodes]
        require(len({group for group, _ in rows}) == len(rows), "a map has a key twice")
        places = tuple((node.address, VALUE_OFFSET + _STATUS.size) for node in nodes)
        numbers = tuple((group, (status + layout.enqueued, 8)) for group, status in rows)
        table = GroupTable(header, places, list(image.take(places)), numbers)
    pieces = image.take([place for _, place in table.numbers])
    by_group = {group: _SIGNED.unpack(piece)[0] for (group, _), piece in zip(table.numbers, pieces, strict=True)}
    require(all(-1 <= number < MOST_SEQUENCE for number in by_group.values()), "a number is out of its range")
    at = layout.reset_epoch
    return Counts(int.from_bytes(raw[at : at + 8], "little") if at >= 0 else 0, by_group, table)


_Entry: TypeAlias = tuple[bytes, int]
"""The bytes of a record, and its address."""


def _entries(image: Image, head: _Head, layout: Layout) -> list[_Entry]:
    """Return the newest records of the newest epoch, oldest first."""
    wanted = min(head.next_id, head.records, MOST_RECORDS)
    start, size = head.next - wanted, layout.record_bytes
    runs = [(start, wanted)] if start >= 0 else [(head.records + start, -start), (0, head.next)]
    places = [(head.begin + first * size, many * size) for first, many in runs if many]
    return [
        (raw[at : at + size], first + at)
        for (first, _), raw in zip(places, image.take(places), strict=True)
        for at in range(0, len(raw), size)
    ]


def _stable(entries: list[_Entry], before: _Head, after: _Head) -> list[_Entry]:
    """Return the records that the writer cannot have touched between the two readings of the counters.

    One record may have been in progress. Raises UnreadableError if the buffer moved.
    """
    if (before.begin, before.capacity, before.epoch) != (after.begin, after.capacity, after.epoch):
        raise UnreadableError("ChangedWhileRead", "the buffer moved while it was read")
    written = after.next_id - before.next_id
    if written < 0:
        raise UnreadableError("ChangedWhileRead", "it restarted its counters while it was read")
    in_progress = 1 if written or before.is_locked or after.is_locked else 0
    return entries[max(0, written + in_progress - (before.capacity - len(entries))) :]


def _statuses(image: Image, address: int, raw: bytes, layout: Layout) -> tuple[GroupStatus, ...]:
    at = layout.statuses
    nodes = map_nodes(image, address + at, raw[at : at + MAP_BYTES], _STATUS.size, MOST_GROUPS)
    rows = [_STATUS.unpack(node.value) for node in nodes]
    size = max(layout.enqueued, layout.status_started, layout.status_completed) + 8
    statuses = []
    for (group, _), status in zip(rows, image.take([(place, size) for _, place in rows]), strict=True):
        numbers = [
            int(_SIGNED.unpack_from(status, offset)[0])
            for offset in (layout.enqueued, layout.status_started, layout.status_completed)
        ]
        require(all(-1 <= number < MOST_SEQUENCE for number in numbers), "the counts of a group are out of their range")
        statuses.append(
            GroupStatus(group_id=group, last_enqueued=numbers[0], last_started=numbers[1], last_completed=numbers[2])
        )
    require(len({group for group, _ in rows}) == len(rows), "a map has a key twice")
    return tuple(sorted(statuses, key=lambda status: status.group_id))


def _members(image: Image, address: int, raw: bytes, layout: Layout) -> tuple[GroupMembers, ...]:
    at = layout.members
    nodes = map_nodes(image, address + at, raw[at : at + MAP_BYTES], _NAMES_BYTES + _RANKS.size, MOST_GROUPS)
    rows = []
    for node in nodes:
        start = node.address + VALUE_OFFSET
        description, name = (text_at(node.value, offset, start) for offset in (0, 32))
        ranks = vector(_RANKS.unpack_from(node.value, _NAMES_BYTES))
        require(not ranks[0][1] % 8, "a list of ranks does not hold whole numbers")
        if ranks[0][1] <= MOST_MEMBERS * 8:
            rows.append((name, description, ranks))
    contents = image.take_parts(part for row in rows for part in row)
    members, texts = [], Texts()
    for name, description, ranks in rows:
        raw_ranks = content(ranks, contents)
        numbers = sorted(struct.unpack(f"<{len(raw_ranks) // 8}Q", raw_ranks))
        require(not numbers or numbers[-1] < MOST_RANKS, "a rank is out of its range")
        require(len(set(numbers)) == len(numbers), "a group lists a rank twice")
        name_text, description_text = (texts.decode(part, contents) for part in (name, description))
        members.append(GroupMembers(name=name_text, description=description_text, ranks=find_progressions(numbers)))
    return tuple(sorted(members, key=lambda group: (group.name, group.description)))


def _version(image: Image, address: int, raw: bytes, layout: Layout) -> str:
    at = layout.library_version
    if at < 0:
        return ""
    part = text_at(raw, at, address)
    return Texts().decode(part, image.take_parts([part]))


_STATUS = struct.Struct("<QQ")  # the id of a group, and the address of its status
_SIGNED, _RANKS, _NAMES_BYTES = struct.Struct("<q"), struct.Struct("<QQQ"), 64
