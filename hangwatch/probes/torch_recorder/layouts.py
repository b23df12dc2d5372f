"""The field offsets of PyTorch's flight recorder by version: table `layouts.toml`.

tests/torch_layouts.py prints the table from the headers in wheels. The memory forms of strings, vectors, maps, tuples
and SmallVectors (libstdc++, c10) are the same in all versions.
"""

import functools
import re

import msgspec

from hangwatch import tables
from hangwatch.model.flight_records import Library

MAP_BYTES = 48
STRING_BYTES = 32


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The byte offsets in a recorder and in a record, on x86-64; -1 if a version lacks the field."""

    versions: tuple[str, ...]
    enabled: int
    entries: int
    capacity: int
    next: int
    next_id: int
    reset_epoch: int
    statuses: int
    members: int
    library_version: int
    record_bytes: int
    record_id: int
    record_epoch: int
    group_id: int
    group_names: int
    collective_seq: int
    p2p_seq: int
    op_id: int
    operation: int
    created: int
    timeout: int
    is_p2p: int
    started: int
    completed: int
    input_dims: int
    input_dtypes: int
    output_dims: int
    output_dtypes: int
    sizes: int
    dim_bytes: int
    thread_id: int
    thread_name: int
    retired: int
    enqueued: int
    status_started: int
    status_completed: int

    @property
    def recorder_bytes(self) -> int:
        """The number of bytes of a recorder to read: up to the last needed member."""
        return max(self.members + MAP_BYTES, self.library_version + STRING_BYTES)

    @property
    def moves_while_filling(self) -> bool:
        """True if `next` moves from the first record on; false if it moves only in a full buffer.

        It moves from the first record on since 2.10, which added epochs. See `record` in FlightRecorderDetail.hpp.
        """
        return self.reset_epoch >= 0

    @property
    def name(self) -> str:
        """The versions with this layout: the first and the last."""
        return self.versions[0] if len(self.versions) == 1 else f"{self.versions[0]}-{self.versions[-1]}"


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    dtypes: tuple[str, ...]
    layouts: tuple[Layout, ...]


@functools.cache
def _table() -> _Table:
    return tables.load(__package__, "layouts.toml", _Table)


def dtypes() -> tuple[str, ...]:
    """Return the names of c10::ScalarType by number, as the recorder's own dump prints them."""
    return _table().dtypes


def candidates(torch_version: str) -> tuple[Layout, ...]:
    """Return the layout of this version. For an unknown version return all layouts: the caller tries each."""
    release = re.match(r"\d+\.\d+\.\d+", torch_version)
    known = [layout for layout in _table().layouts if release is not None and release[0] in layout.versions]
    return tuple(known) or _table().layouts


def is_known(torch_version: str) -> bool:
    """True if the layout of this version has been measured."""
    return len(candidates(torch_version)) == 1


def is_recorded(library: Library, torch_version: str) -> bool:
    """True if this version records the library, or is unknown. PyTorch records gloo since 2.8."""
    numbers = tuple(map(int, re.findall(r"\d+", torch_version)[:2]))
    return library != "gloo" or not numbers or numbers >= (2, 8)
