"""Where the fields of PyTorch's flight recorder lie, by version: the table `layouts.toml`.

tests/torch_layouts.py prints it from the headers that wheels ship. What libstdc++ and c10 keep in a string, a vector, a
map, a tuple and a SmallVector is the same in all of them.
"""

from __future__ import annotations

import functools
import re

import msgspec

from hangwatch import tables

MAP_BYTES = 48
STRING_BYTES = 32


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Offsets in bytes in one recorder and in one of its records, on x86-64; -1 where a version has no such field."""

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
        """How much of a recorder is read: up to the last member that is wanted."""
        return max(self.members + MAP_BYTES, self.library_version + STRING_BYTES)

    @property
    def moves_while_filling(self) -> bool:
        """Whether `next` moves from the first record on: since 2.10, with the epochs; before, only in a full buffer.

        FlightRecorderDetail.hpp, `record`.
        """
        return self.reset_epoch >= 0

    @property
    def name(self) -> str:
        """The versions that share it, first to last."""
        return self.versions[0] if len(self.versions) == 1 else f"{self.versions[0]}-{self.versions[-1]}"


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    dtypes: tuple[str, ...]
    layouts: tuple[Layout, ...]


@functools.cache
def _table() -> _Table:
    return tables.load(__package__, "layouts.toml", _Table)


def dtypes() -> tuple[str, ...]:
    """The names of c10::ScalarType by number, as the recorder's own dump prints them."""
    return _table().dtypes


def of(torch_version: str) -> tuple[Layout, ...]:
    """The layout of this version; of one that the table does not know all there are: only one may fit."""
    release = re.match(r"\d+\.\d+\.\d+", torch_version)
    known = [layout for layout in _table().layouts if release is not None and release[0] in layout.versions]
    return tuple(known) or _table().layouts
