"""Decode a record of a flight recorder: bytes to a row, by the layout of a version, to a `FlightRecord`."""

import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from hangwatch import words
from hangwatch.model.flight_records import LATEST_UNIX_NS, MOST_NAME, MOST_SEQUENCE, FlightRecord, Library
from hangwatch.probes.process.memory_image import Part, Place, content, require, small_vector, text, vector
from hangwatch.probes.torch_recorder import layouts
from hangwatch.probes.torch_recorder.layouts import Layout

MOST_TENSORS = 1024  # of one operation; sizes and types of more tensors are omitted
MOST_DIMENSIONS = 64  # of a tensor: c10's limit
_STRING, _VECTOR, _SIZES = "QQ16s", "QQQ", "QII64s"
_WIDTHS = {"Q": 1, "q": 1, "B": 1, _STRING: 3, _VECTOR: 3, _SIZES: 4}
_NUMBERS = 5  # the members of a row that are one number
_ABSENT = (0, 16, 0, b"")  # a number, and an empty string at address 0


class Mark(NamedTuple):
    """The identity of a record, and its state: open, completed or retired. It is parsed for every record."""

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
        """The key shared by the parts of a coalesced batch and the record that closes it."""
        return self.group, self.is_p2p, self.p2p if self.is_p2p else self.collective


class Row(NamedTuple):
    """The members of a record that its mark lacks. Members that a version lacks are 0 or empty."""

    op: int
    completed: int
    timeout: int
    is_started: int
    thread: int
    texts: tuple[Part, ...]
    tensors: tuple[Part, ...]


class Unpacked:
    """A reader of the members `wanted` of a record, given as (offset, code of struct).

    It unpacks all of them with one struct, and returns them in the given order.
    """

    def __init__(self, wanted: Sequence[tuple[int, str]], record_bytes: int) -> None:
        codes, at, count, where = "<", 0, 0, dict[int, range]()
        for offset, code in sorted(member for member in wanted if member[0] >= 0):
            codes += f"{offset - at}x{code}"
            at = offset + struct.calcsize(f"<{code}")
            where[offset] = range(count, count + _WIDTHS.get(code, 4))
            count = where[offset].stop
        self._struct = struct.Struct(f"{codes}{record_bytes - at}x")
        absent = {"Q": range(count, count + 1), _STRING: range(count + 1, count + 4)}
        self._in_order = itemgetter(
            *(index for offset, code in wanted for index in (where[offset] if offset >= 0 else absent[code]))
        )

    def unpack(self, raw: bytes) -> tuple[Any, ...]:
        """Return the values of the members; 0 or an empty string for members that a version lacks."""
        values: tuple[Any, ...] = self._in_order(self._struct.unpack(raw) + _ABSENT)
        return values


class Rows:
    """A parser that converts the bytes of a record to a row."""

    def __init__(self, layout: Layout) -> None:
        names = layout.group_names  # libstdc++ stores tuples backwards: the description precedes the name
        dims = f"QII{4 * layout.dim_bytes}s"
        self._texts = (names + 32, names, layout.operation, layout.thread_name)
        self._lists = ((layout.input_dims, layout.dim_bytes), (layout.output_dims, layout.dim_bytes), (layout.sizes, 8))
        wanted = [
            (layout.op_id, "Q"),
            (layout.completed, "q"),
            (layout.timeout, "q"),
            (layout.started + 8, "B"),
            (layout.thread_id, "Q"),
            *((offset, _STRING) for offset in self._texts),
            (layout.input_dims, dims),
            (layout.output_dims, dims),
            (layout.sizes, _SIZES),
            (layout.input_dtypes, _VECTOR),
            (layout.output_dtypes, _VECTOR),
        ]
        self._unpacked = Unpacked(wanted, layout.record_bytes)

    def parse(self, raw: bytes, address: int) -> Row:
        """Return the row of the record with these bytes at `address`. Raises UnreadableError."""
        values, at = self._unpacked.unpack(raw), _NUMBERS
        texts, tensors = [], []
        for offset in self._texts:
            texts.append(text(values[at : at + 3], address + offset if offset >= 0 else 0))
            at += 3
        for offset, element_bytes in self._lists:
            tensors.append(small_vector(values[at : at + 4], address + offset, element_bytes))
            at += 4
        tensors += [vector(values[at : at + 3]), vector(values[at + 3 : at + 6])]
        (_, sizes_bytes), types_bytes = tensors[2][0], tensors[3][0][1] + tensors[4][0][1]
        if types_bytes > MOST_TENSORS or sizes_bytes > MOST_TENSORS * MOST_DIMENSIONS * 8:
            tensors = []
        return Row._make((*values[:_NUMBERS], tuple(texts), tuple(tensors)))


class Texts:
    """A decoder of names, which makes them short and printable. Names repeat: each is decoded once."""

    def __init__(self) -> None:
        self._decoded: dict[bytes, str] = {}

    def decode(self, part: Part, contents: dict[Place, bytes]) -> str:
        """Return the text of a part. `contents` is the result of `Image.take_parts`."""
        raw = content(part, contents)
        if raw not in self._decoded:
            self._decoded[raw] = words.elided(raw.decode("utf-8", "replace"), MOST_NAME)
        return self._decoded[raw]


class Tensors(NamedTuple):
    """The sizes and types of the tensors that an operation read and wrote; all empty if unknown."""

    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]


_UNKNOWN_TENSORS = Tensors((), (), (), ())


class Shapes:
    """A parser of sizes and types of the tensors of an operation. They repeat: each combination is parsed once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._parsed: dict[tuple[bytes, ...], Tensors] = {}

    def parse(self, parts: Sequence[Part], contents: dict[Place, bytes]) -> Tensors:
        """Return the tensors of an operation; empty if there are too many.

        `parts` are the dimensions of inputs and outputs, the sizes, and the types of inputs and outputs.
        """
        if not parts:
            return _UNKNOWN_TENSORS
        key = tuple([content(part, contents) for part in parts])
        if key not in self._parsed:
            self._parsed[key] = self._tensors(*key)
        return self._parsed[key]

    def _tensors(self, inputs: bytes, outputs: bytes, sizes: bytes, input_types: bytes, output_types: bytes) -> Tensors:
        code = "i" if self._layout.dim_bytes == 4 else "q"
        dims = [struct.unpack(f"<{len(raw) // self._layout.dim_bytes}{code}", raw) for raw in (inputs, outputs)]
        numbers = struct.unpack(f"<{len(sizes) // 8}q", sizes)
        require(all(0 <= dim <= MOST_DIMENSIONS for row in dims for dim in row), "a tensor has too many dimensions")
        require(sum(map(sum, dims)) == len(numbers), "sizes and dimensions of tensors differ")
        require(all(0 <= number < MOST_SEQUENCE for number in numbers), "a tensor has a negative size")
        require([len(row) for row in dims] == [len(input_types), len(output_types)], "a tensor has no type")
        shapes, at = [], 0
        for row in dims:
            shape = []
            for dim in row:
                shape.append(numbers[at : at + dim])
                at += dim
            shapes.append(tuple(shape))
        return Tensors(shapes[0], shapes[1], _type_names(input_types), _type_names(output_types))


def _type_names(raw: bytes) -> tuple[str, ...]:
    names = layouts.dtypes()
    require(all(number <= len(names) for number in raw), "a tensor has an unknown type")
    return tuple(names[number] if number < len(names) else "Undefined" for number in raw)


def record(mark: Mark, row: Row, names: Sequence[str], tensors: Tensors, library: Library) -> FlightRecord:
    """Return the record of a mark and row with its texts and tensors. Raises UnreadableError if they are impossible."""
    require(row.timeout >= -1 and row.op < MOST_SEQUENCE, "a number is out of its range")
    require(row.is_started < 2, "a flag is neither true nor false")
    is_completed = mark.is_completed if library == "nccl" else mark.is_retired
    name, description, operation, thread_name = names
    return FlightRecord(
        id=mark.id,
        reset_epoch=mark.epoch,
        group_id=mark.group,
        group_name=name,
        group_description=description,
        collective_seq=mark.collective,
        p2p_seq=mark.p2p,
        op_id=row.op,
        is_p2p=mark.is_p2p == 1,
        operation=operation,
        state="completed" if is_completed else "open",
        is_started=row.is_started == 1,
        is_retired=mark.is_retired == 1,
        created_unix_ns=mark.created,
        completed_unix_ns=row.completed if mark.is_completed and mark.created <= row.completed < LATEST_UNIX_NS else 0,
        timeout_ms=row.timeout,
        input_sizes=tensors.input_sizes,
        output_sizes=tensors.output_sizes,
        input_dtypes=tensors.input_dtypes,
        output_dtypes=tensors.output_dtypes,
        thread_id=row.thread,
        thread_name=thread_name,
    )
