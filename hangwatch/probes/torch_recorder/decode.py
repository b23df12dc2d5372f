"""A flight recorder in somebody's memory -> its records: pure, and the same for a live rank and a recorded memory.

The writer holds a mutex that nobody outside can take. So the counters are read before and after: what the writer may
have touched in between is left out, and where the buffer itself moved, all is read again.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from hangwatch.model.flight_records import (
    EARLIEST_UNIX_NS,
    LATEST_UNIX_NS,
    GroupMembers,
    GroupStatus,
    Library,
    RankRecords,
    with_batches,
)
from hangwatch.probes.torch_recorder.layouts import MAP_BYTES, Layout
from hangwatch.probes.torch_recorder.memory_image import (
    VALUE_OFFSET,
    Image,
    Read,
    UnreadableError,
    content,
    fits,
    spans,
    text_at,
    tree,
    vector,
)
from hangwatch.probes.torch_recorder.rows import MOST_SEQUENCE, Rows, Shapes, Texts, Unpacked, record

MOST_RECORDS = 4096  # the newest of a larger buffer
MOST_GROUPS = 4096
MOST_MEMBERS = 1 << 17
MOST_RANK = 1 << 24
TRIES = 4
_MOST_EPOCHS = 1 << 32
_MUTEX = 8  # after two bools, in every version; its first byte is not 0 while somebody holds it


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
    """The counters. Raises UnreadableError where they are not those of a recorder, or it is off."""
    enabled, captures = raw[layout.enabled], raw[layout.enabled + 1]
    begin, end, reserved = struct.unpack_from("<QQQ", raw, layout.entries)
    capacity, following, next_id = (
        int.from_bytes(raw[offset : offset + 8], "little") for offset in (layout.capacity, layout.next, layout.next_id)
    )
    epoch = int.from_bytes(raw[layout.reset_epoch : layout.reset_epoch + 8], "little") if layout.reset_epoch > 0 else 0
    fits(enabled < 2 and captures < 2, "a flag is neither true nor false")
    if not enabled:
        fits(not any((begin, end, reserved, capacity, following, next_id, epoch)), "it is off and holds records")
        raise UnreadableError("RecorderOff", "the flight recorder is off: its buffer has no room for a record")
    fits(begin <= end <= reserved and not begin % 8, "its buffer ends before it begins")
    count, odd = divmod(end - begin, layout.record_bytes)
    fits(not odd and not (reserved - begin) % layout.record_bytes, "its buffer holds no whole records")
    fits(capacity > 0 and count <= capacity, "it holds more records than it may")
    is_next = following < capacity if count == capacity else following == count * layout.moves_while_filling
    fits(is_next, "its next place is not the next one")
    fits(epoch < _MOST_EPOCHS and next_id < MOST_SEQUENCE, "it has counted too far")
    if not epoch:
        fits(next_id == count if count < capacity else next_id % capacity == following, "it counts another number")
        fits(next_id >= count, "it holds more records than it counted")
    return _Head(begin, count, capacity, following, next_id, epoch, raw[_MUTEX] != 0)


def could_be(raw: bytes, address: int, layout: Layout) -> bool:
    """Whether these bytes at this address can be a recorder that is on: what a search by shape asks of each object."""
    try:
        _head(raw, layout)
        for offset in (layout.statuses, layout.members):
            root, left, right, count = struct.unpack_from("<QQQQ", raw, offset + 16)
            header = address + offset + 8
            fits((root == 0 and left == right == header) if not count else bool(root and left and right), "a map")
            fits(struct.unpack_from("<I", raw, offset + 8)[0] == 0 and count <= MOST_GROUPS, "a map")
    except UnreadableError:
        return False
    return True


class _Mark(NamedTuple):
    """What tells a record from others, and whether it is open: read of every record."""

    id: int
    epoch: int
    group: int
    collective: int
    p2p: int
    created: int
    is_p2p: int
    is_completed: int
    is_retired: int

    @property
    def batch(self) -> tuple[int, int, int]:
        """What the parts of a coalesced batch and the record that closes it have in common."""
        return self.group, self.is_p2p, self.p2p if self.is_p2p else self.collective


def _marks(entries: Sequence[_Entry], head: _Head, layout: Layout) -> list[_Mark]:
    """Of each record. Raises UnreadableError where one cannot be what the counters say it is."""
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
    unpack = Unpacked(wanted, layout.record_bytes).of
    marks = [_Mark._make(unpack(raw)) for raw, _ in entries]
    for number, mark in enumerate(marks, head.next_id - len(marks)):
        fits(mark.id == number and mark.epoch == head.epoch, "a record is not the next")
        fits(max(mark.is_p2p, mark.is_completed, mark.is_retired) < 2, "a flag is neither true nor false")
        fits(EARLIEST_UNIX_NS < mark.created < LATEST_UNIX_NS, "a record is of no time")
        fits(mark.collective < MOST_SEQUENCE and mark.p2p < MOST_SEQUENCE, "a number is out of its range")
    return marks


def _asked_for(marks: Sequence[_Mark], library: Library, newest: int | None) -> Iterable[int]:
    """Which records are read whole: all, or the oldest one, those that are open, and the newest of each group.

    With an open one of NCCL come all of its number: one of them may close the batch that it is a part of.
    """
    if newest is None:
        return range(len(marks))
    is_nccl = library == "nccl"
    opened = {place for place, mark in enumerate(marks) if not (mark.is_completed if is_nccl else mark.is_retired)}
    batches = {marks[place].batch for place in opened} if is_nccl else set()
    seen = Counter[int]()
    for place in range(len(marks) - 1, -1, -1):
        mark = marks[place]
        if seen[mark.group] < newest or (batches and mark.batch in batches):
            opened.add(place)
        seen[mark.group] += 1
    return sorted(opened | set(range(min(1, len(marks)))))


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
    """The records of the recorder that lies at `address`; of those that are done the `newest` of each group at least.

    Raises UnreadableError, and nothing else.
    """
    error = UnreadableError("ChangedWhileRead", "the buffer moved while it was read, each time")
    for _ in range(tries):
        try:
            return _read_once(Image(read_memory), address, layout, library, newest=newest, now=now())
        except UnreadableError as reason:
            error = reason
            if reason.reason not in ("UnknownLayout", "ChangedWhileRead"):
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
    entries = _untouched(entries, before, head()[0])
    marks = _marks(entries, before, layout)
    parse, texts, shapes = Rows(layout).of, Texts(), Shapes(layout)
    rows = [parse(*entries[place]) for place in _asked_for(marks, library, newest)]
    found = image.take_parts(part for row in rows for part in (*row.texts, *row.tensors))
    left = _untouched(entries, before, head()[0])
    first_id = before.next_id - len(left)
    statuses = _statuses(image, address, raw, layout)
    known = {status.group_id for status in statuses}
    records = [
        record(row, [texts.of(part, found) for part in row.texts], shapes.of(row.tensors, found), library)
        for row in rows
        if row.id >= first_id
    ]
    fits(known.issuperset(mark.group for mark in marks), "a record is of a group that it does not know")
    return RankRecords(
        library=library,
        records=with_batches(records) if library == "nccl" else tuple(records),
        groups=statuses,
        members=_members(image, address, raw, layout) if library == "nccl" else (),
        next_id=before.next_id,
        oldest_id=first_id,
        is_wrapped=first_id > 0,
        reset_epoch=before.epoch,
        capacity=min(before.capacity, 1 << 31),
        library_version=_version(image, address, raw, layout),
        layout=layout.name,
        read_unix_seconds=now,
    )


_Entry: TypeAlias = tuple[bytes, int]
"""The bytes of a record, and where it lies."""


def _entries(image: Image, head: _Head, layout: Layout) -> list[_Entry]:
    """The newest records of the newest epoch, oldest first."""
    wanted = min(head.next_id, head.records, MOST_RECORDS)
    start, size = head.next - wanted, layout.record_bytes
    runs = [(start, wanted)] if start >= 0 else [(head.records + start, -start), (0, head.next)]
    places = [(head.begin + first * size, many * size) for first, many in runs if many]
    return [
        (raw[at : at + size], first + at)
        for (first, _), raw in zip(places, image.take(places), strict=True)
        for at in range(0, len(raw), size)
    ]


def _untouched(entries: list[_Entry], before: _Head, after: _Head) -> list[_Entry]:
    """Those that the writer cannot have touched in between; one more may be under way. Raises UnreadableError."""
    if (before.begin, before.capacity, before.epoch) != (after.begin, after.capacity, after.epoch):
        raise UnreadableError("ChangedWhileRead", "the buffer moved while it was read")
    written = after.next_id - before.next_id
    if written < 0:
        raise UnreadableError("ChangedWhileRead", "it began to count anew while it was read")
    under_way = 1 if written or before.is_locked or after.is_locked else 0
    return entries[max(0, written + under_way - (before.capacity - len(entries))) :]


def _statuses(image: Image, address: int, raw: bytes, layout: Layout) -> tuple[GroupStatus, ...]:
    at = layout.statuses
    nodes = tree(image, address + at, raw[at : at + MAP_BYTES], 16, MOST_GROUPS)
    rows = [struct.unpack("<QQ", node.value) for node in nodes]
    size = max(layout.enqueued, layout.status_started, layout.status_completed) + 8
    statuses = []
    for (group, _), status in zip(rows, image.take([(place, size) for _, place in rows]), strict=True):
        numbers = [
            int(_SIGNED.unpack_from(status, offset)[0])
            for offset in (layout.enqueued, layout.status_started, layout.status_completed)
        ]
        fits(all(-1 <= number < MOST_SEQUENCE for number in numbers), "the counts of a group are out of their range")
        statuses.append(
            GroupStatus(group_id=group, last_enqueued=numbers[0], last_started=numbers[1], last_completed=numbers[2])
        )
    fits(len({group for group, _ in rows}) == len(rows), "a map holds a key twice")
    return tuple(sorted(statuses, key=lambda status: status.group_id))


def _members(image: Image, address: int, raw: bytes, layout: Layout) -> tuple[GroupMembers, ...]:
    at = layout.members
    nodes = tree(image, address + at, raw[at : at + MAP_BYTES], _NAMES_BYTES + _RANKS.size, MOST_GROUPS)
    rows = []
    for node in nodes:
        start = node.address + VALUE_OFFSET
        description, name = (text_at(node.value, offset, start) for offset in (0, 32))
        ranks = vector(_RANKS.unpack_from(node.value, _NAMES_BYTES))
        fits(not ranks[0][1] % 8, "a list of ranks holds no whole ones")
        if ranks[0][1] <= MOST_MEMBERS * 8:
            rows.append((name, description, ranks))
    found = image.take_parts(part for row in rows for part in row)
    members, texts = [], Texts()
    for name, description, ranks in rows:
        raw_ranks = content(ranks, found)
        numbers = sorted(struct.unpack(f"<{len(raw_ranks) // 8}Q", raw_ranks))
        fits(not numbers or numbers[-1] < MOST_RANK, "a rank is out of its range")
        fits(len(set(numbers)) == len(numbers), "a rank is twice in a group")
        said = GroupMembers(name=texts.of(name, found), description=texts.of(description, found), ranks=spans(numbers))
        members.append(said)
    return tuple(sorted(members, key=lambda group: (group.name, group.description)))


def _version(image: Image, address: int, raw: bytes, layout: Layout) -> str:
    at = layout.library_version
    if at < 0:
        return ""
    part = text_at(raw, at, address)
    return Texts().of(part, image.take_parts([part]))


_SIGNED, _RANKS, _NAMES_BYTES = struct.Struct("<q"), struct.Struct("<QQQ"), 64
