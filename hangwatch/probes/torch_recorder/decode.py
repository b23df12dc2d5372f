"""A flight recorder in somebody's memory -> its records: pure, and the same for a live rank and a recorded memory.

The writer holds a mutex that nobody outside can take. So the counters are read before and after: what the writer may
have touched in between is left out, and where the buffer itself moved, all is read again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from hangwatch import words
from hangwatch.flight_record import FlightRecord, GroupMembers, GroupStatus, Library, RankRecords
from hangwatch.probes.torch_recorder import layouts
from hangwatch.probes.torch_recorder.layouts import Layout
from hangwatch.probes.torch_recorder.memory_image import (
    MAP_BYTES,
    VALUE_OFFSET,
    Image,
    Place,
    Read,
    Text,
    UnreadableError,
    fits,
    spans,
    text_at,
    tree,
)

MOST_RECORDS = 4096  # the newest of a larger buffer
MOST_GROUPS = 4096
MOST_TENSORS = 1024  # of one operation; sizes and types of one with more are not told
MOST_DIMENSIONS = 64  # of a tensor: c10's limit
MOST_MEMBERS = 1 << 17
MOST_RANK = 1 << 24
MOST_NAME = 128  # characters that are told of a name
TRIES = 4
EARLIEST_UNIX_NS, LATEST_UNIX_NS = 1_420_000_000 * 10**9, 4_102_444_800 * 10**9  # 2015 to 2100
_MOST_EPOCHS = 1 << 32
_MOST_SEQUENCE = 1 << 53
_COALESCED = "coalesced"
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
    fits(following < capacity if count == capacity else following == count, "its next place is not the next one")
    fits(epoch < _MOST_EPOCHS and next_id < _MOST_SEQUENCE, "it has counted too far")
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


_Part: TypeAlias = tuple[Place, bytes]
"""Where a list lies, and its bytes where it lies in the record itself: then the place is empty."""


class _Entry:
    """The bytes of one record, and where they lie. Raises UnreadableError where a field cannot be."""

    def __init__(self, raw: bytes, address: int, layout: Layout) -> None:
        self._raw, self._address, self._layout = raw, address, layout

    def number(self, offset: int) -> int:
        """A size_t; 0 where this version has no such field."""
        return _NUMBER.unpack_from(self._raw, offset)[0] if offset >= 0 else 0

    def signed(self, offset: int) -> int:
        """An int64_t."""
        return int(_SIGNED.unpack_from(self._raw, offset)[0])

    def flag(self, offset: int) -> bool:
        """A bool, or whether a std::optional has a value."""
        byte = self._raw[offset]
        fits(byte < 2, "a flag is neither true nor false")
        return byte == 1

    def text(self, offset: int) -> Text:
        """A std::string; an empty one where this version has no such field."""
        if offset < 0:
            return Text(16, 0, b"", 0)
        return text_at(self._raw, offset, self._address)

    def texts(self) -> tuple[Text, ...]:
        """Description and name of the group, name of the operation and of the thread."""
        layout = self._layout
        # libstdc++ lays a tuple out backwards: the description stands before the name
        return tuple(
            map(self.text, (layout.group_names, layout.group_names + 32, layout.operation, layout.thread_name))
        )

    def types(self, offset: int) -> Place:
        """Where a std::vector of one byte for each tensor has its elements."""
        begin, end, reserved = _VECTOR.unpack_from(self._raw, offset)
        fits(begin <= end <= reserved, "a list ends before it begins")
        return begin, end - begin

    def small(self, offset: int, element_bytes: int, inline: int) -> _Part:
        """Where a SmallVector has its elements, and those that lie in itself."""
        begin, size, room = _SMALL.unpack_from(self._raw, offset)
        fits(size <= room, "a list is longer than its place")
        place = begin, size * element_bytes
        if begin != self._address + offset + _SMALL.size:
            return place, b""
        fits(size <= inline, "a list is longer than its place")
        start = offset + _SMALL.size
        return (0, 0), self._raw[start : start + size * element_bytes]


_NUMBER, _SIGNED = struct.Struct("<Q"), struct.Struct("<q")
_VECTOR, _SMALL = struct.Struct("<QQQ"), struct.Struct("<QII")


class _Texts:
    """Names, bounded and printable; most repeat, and are kept once."""

    def __init__(self) -> None:
        self._known: dict[bytes, str] = {}

    def of(self, text: Text, found: dict[Place, bytes]) -> str:
        """What it says, where what lies outside of it has been read."""
        raw = text.bytes(found)
        if raw not in self._known:
            self._known[raw] = words.elided(raw.decode("utf-8", "replace"), MOST_NAME)
        return self._known[raw]


class _Shapes:
    """Sizes and types of the tensors of an operation; of most operations they are the same, and are kept once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[tuple[bytes, ...], _Tensors] = {}

    def parts(self, entry: _Entry) -> list[_Part]:
        """The dimensions of its inputs and outputs, their sizes, their types; nothing of one with too many tensors."""
        layout = self._layout
        types = [(entry.types(layout.input_dtypes), b""), (entry.types(layout.output_dtypes), b"")]
        sizes = entry.small(layout.sizes, 8, 8)
        if types[0][0][1] + types[1][0][1] > MOST_TENSORS or sizes[0][1] > MOST_TENSORS * MOST_DIMENSIONS * 8:
            return []
        dims = [entry.small(offset, layout.dim_bytes, 4) for offset in (layout.input_dims, layout.output_dims)]
        return [*dims, sizes, *types]

    def of(self, parts: Sequence[_Part], found: dict[Place, bytes]) -> _Tensors:
        """What they are, where everything that they need has been read."""
        if not parts:
            return _NOT_TOLD
        key = tuple([found[place] if place[1] else inline for place, inline in parts])
        if key not in self._known:
            self._known[key] = self._tensors(*key)
        return self._known[key]

    def _tensors(
        self, inputs: bytes, outputs: bytes, sizes: bytes, input_types: bytes, output_types: bytes
    ) -> _Tensors:
        code = "i" if self._layout.dim_bytes == 4 else "q"
        dims = [struct.unpack(f"<{len(raw) // self._layout.dim_bytes}{code}", raw) for raw in (inputs, outputs)]
        numbers = struct.unpack(f"<{len(sizes) // 8}q", sizes)
        fits(all(0 <= dim <= MOST_DIMENSIONS for row in dims for dim in row), "a tensor has too many dimensions")
        fits(sum(map(sum, dims)) == len(numbers), "sizes and dimensions of tensors differ")
        fits(all(0 <= number < _MOST_SEQUENCE for number in numbers), "a tensor has a negative size")
        fits([len(row) for row in dims] == [len(input_types), len(output_types)], "a tensor has no type")
        shapes, at = [], 0
        for row in dims:
            shape = []
            for dim in row:
                shape.append(numbers[at : at + dim])
                at += dim
            shapes.append(tuple(shape))
        return _Tensors(shapes[0], shapes[1], _type_names(input_types), _type_names(output_types))


class _Tensors(NamedTuple):
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]


_NOT_TOLD = _Tensors((), (), (), ())


def _type_names(raw: bytes) -> tuple[str, ...]:
    names = layouts.dtypes()
    fits(all(number <= len(names) for number in raw), "a tensor has an unknown type")
    return tuple(names[number] if number < len(names) else "Undefined" for number in raw)


def read(read_memory: Read, address: int, layout: Layout, library: Library, now: Callable[[], float]) -> RankRecords:
    """The records of the recorder that lies at `address`. Raises UnreadableError, and nothing else."""
    error = UnreadableError("ChangedWhileRead", "the buffer moved while it was read, each time")
    for _ in range(TRIES):
        try:
            return _read_once(Image(read_memory), address, layout, library, now())
        except UnreadableError as reason:
            error = reason
            if reason.reason not in ("UnknownLayout", "ChangedWhileRead"):
                break
    raise error


def _read_once(image: Image, address: int, layout: Layout, library: Library, now: float) -> RankRecords:
    def head() -> tuple[_Head, bytes]:
        (raw,) = image.take([(address, layout.recorder_bytes)])
        return _head(raw, layout), raw

    before, raw = head()
    entries = _entries(image, before, layout)
    entries = _untouched(entries, before, head()[0])
    shapes, texts = _Shapes(layout), _Texts()
    rows = [(entry, entry.texts(), shapes.parts(entry)) for entry in entries]
    found = image.take_scattered(
        place
        for _, names, parts in rows
        for place in (*(name.outside for name in names), *(place for place, _ in parts))
        if place is not None and place[1]
    )
    rows = rows[len(rows) - len(_untouched(entries, before, head()[0])) :]
    statuses = _statuses(image, address, raw, layout)
    known = {status.group_id for status in statuses}
    first_id = before.next_id - len(rows)
    records = [
        _record(
            entry,
            [texts.of(name, found) for name in names],
            shapes.of(parts, found),
            number=number,
            epoch=before.epoch,
            layout=layout,
            library=library,
        )
        for number, (entry, names, parts) in enumerate(rows, first_id)
    ]
    fits(known.issuperset(record.group_id for record in records), "a record is of a group that it does not know")
    return RankRecords(
        library=library,
        records=_with_batches(records) if library == "nccl" else tuple(records),
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


def _entries(image: Image, head: _Head, layout: Layout) -> list[_Entry]:
    """The newest records of the newest epoch, oldest first."""
    wanted = min(head.next_id, head.records, MOST_RECORDS)
    start, size = head.next - wanted, layout.record_bytes
    runs = [(start, wanted)] if start >= 0 else [(head.records + start, -start), (0, head.next)]
    places = [(head.begin + first * size, many * size) for first, many in runs if many]
    return [
        _Entry(raw[at : at + size], first + at, layout)
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


def _record(
    entry: _Entry,
    names: Sequence[str],
    tensors: _Tensors,
    *,
    number: int,
    epoch: int,
    layout: Layout,
    library: Library,
) -> FlightRecord:
    fits(
        entry.number(layout.record_id) == number and entry.number(layout.record_epoch) == epoch,
        "a record is not the next",
    )
    created, timeout = entry.signed(layout.created), entry.signed(layout.timeout)
    collective, p2p, op = map(entry.number, (layout.collective_seq, layout.p2p_seq, layout.op_id))
    fits(EARLIEST_UNIX_NS < created < LATEST_UNIX_NS, "a record is of no time")
    fits(timeout >= -1 and max(collective, p2p, op) < _MOST_SEQUENCE, "a number of a record is out of its range")
    is_retired, is_seen_completed = entry.flag(layout.retired), entry.flag(layout.completed + 8)
    is_completed = is_seen_completed if library == "nccl" else is_retired
    description, name, operation, thread_name = names
    return FlightRecord(
        id=number,
        reset_epoch=epoch,
        group_id=entry.number(layout.group_id),
        group_name=name,
        group_description=description,
        collective_seq=collective,
        p2p_seq=p2p,
        op_id=op,
        is_p2p=entry.flag(layout.is_p2p),
        operation=operation,
        state="completed" if is_completed else "open",
        is_started=entry.flag(layout.started + 8),
        is_retired=is_retired,
        created_unix_ns=created,
        timeout_ms=timeout,
        input_sizes=tensors.input_sizes,
        output_sizes=tensors.output_sizes,
        input_dtypes=tensors.input_dtypes,
        output_dtypes=tensors.output_dtypes,
        thread_id=entry.number(layout.thread_id),
        thread_name=thread_name,
    )


def _with_batches(records: Sequence[FlightRecord]) -> tuple[FlightRecord, ...]:
    """With the parts of coalesced batches marked: a later record of the same group and number closes them."""
    closed: set[tuple[int, bool, int]] = set()
    marked = []
    for record in reversed(records):
        key = record.group_id, record.is_p2p, record.p2p_seq if record.is_p2p else record.collective_seq
        marked.append(msgspec.structs.replace(record, is_coalesced_part=True) if key in closed else record)
        if record.operation.endswith(_COALESCED):
            closed.add(key)
    return tuple(reversed(marked))


def _statuses(image: Image, address: int, raw: bytes, layout: Layout) -> tuple[GroupStatus, ...]:
    at = layout.statuses
    nodes = tree(image, address + at, raw[at : at + MAP_BYTES], 16, MOST_GROUPS)
    rows = [struct.unpack("<QQ", node.value) for node in nodes]
    size = max(layout.enqueued, layout.status_started, layout.status_completed) + 8
    statuses = []
    for (group, _), status in zip(rows, image.take([(place, size) for _, place in rows]), strict=True):
        numbers = [
            _SIGNED.unpack_from(status, offset)[0]
            for offset in (layout.enqueued, layout.status_started, layout.status_completed)
        ]
        fits(all(-1 <= number < _MOST_SEQUENCE for number in numbers), "the counts of a group are out of their range")
        statuses.append(
            GroupStatus(group_id=group, last_enqueued=numbers[0], last_started=numbers[1], last_completed=numbers[2])
        )
    fits(len({group for group, _ in rows}) == len(rows), "a map holds a key twice")
    return tuple(sorted(statuses, key=lambda status: status.group_id))


def _members(image: Image, address: int, raw: bytes, layout: Layout) -> tuple[GroupMembers, ...]:
    at = layout.members
    nodes = tree(image, address + at, raw[at : at + MAP_BYTES], 64 + _VECTOR.size, MOST_GROUPS)
    rows = []
    for node in nodes:
        start = node.address + VALUE_OFFSET
        names = [text_at(node.value, offset, start) for offset in (0, 32)]
        begin, end, reserved = _VECTOR.unpack_from(node.value, 64)
        fits(begin <= end <= reserved and not (end - begin) % 8, "a list ends before it begins")
        if end - begin <= MOST_MEMBERS * 8:
            rows.append((names, (begin, end - begin)))
    found = image.take_scattered(
        place for names, ranks in rows for place in (*(name.outside for name in names), ranks) if place is not None
    )
    members, texts = [], _Texts()
    for (description, name), ranks in rows:
        numbers = sorted(struct.unpack(f"<{ranks[1] // 8}Q", found.get(ranks, b"")))
        fits(not numbers or numbers[-1] < MOST_RANK, "a rank is out of its range")
        fits(len(set(numbers)) == len(numbers), "a rank is twice in a group")
        said = GroupMembers(name=texts.of(name, found), description=texts.of(description, found), ranks=spans(numbers))
        members.append(said)
    return tuple(sorted(members, key=lambda group: (group.name, group.description)))


def _version(image: Image, address: int, raw: bytes, layout: Layout) -> str:
    at = layout.library_version
    if at < 0:
        return ""
    text = text_at(raw, at, address)
    outside = text.outside
    found = image.take_scattered([outside]) if outside is not None else {}
    return _Texts().of(text, found)
