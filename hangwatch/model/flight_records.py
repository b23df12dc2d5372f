"""What PyTorch's flight recorder holds of one process: which collectives it has enqueued, and which are still open.

On the ground, under `model`, since a dump of a rank carries it. Read by `probes.torch_recorder`, judged by
`hang.waitfor`. Names of operations, numbers, sizes and times; never a tensor. The process can write all of it: it is
bounded and printable, and no more to be believed than its stacks. Who writes a record, and when:
torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

EARLIEST_UNIX_NS, LATEST_UNIX_NS = 1_420_000_000 * 10**9, 4_102_444_800 * 10**9  # 2015 to 2100
"""A record of another time is none."""

_COALESCED = "coalesced"
Library: TypeAlias = Literal["gloo", "nccl"]
"""Whose operations a recorder holds: libtorch_cpu has one of gloo's, libtorch_cuda one of NCCL's."""


class FlightRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One operation that a process enqueued.

    `id` counts the records of one `reset_epoch` from 0. `group_id` is a counter of the process alone; `group_name` is
    the same on all ranks ("" under TORCH_DISTRIBUTED_DEBUG=DETAIL), `group_description` repeats. `p2p_seq` and `op_id`
    count in one process, and are never to be compared with those of another one. `created_unix_ns` is when it was
    enqueued. `state`: NCCL's is completed when the watchdog has seen it completed, gloo's when it is retired;
    `is_retired` with NCCL alone says little, since a time-out retires, too. `is_coalesced_part`: a later record of the
    same group and numbers closes the batch, and stands for this one, which is never retired. `thread_id` is
    std::thread::id, as the recorder's own dump prints it.
    """

    id: int
    reset_epoch: int
    group_id: int
    group_name: str
    group_description: str
    collective_seq: int
    p2p_seq: int
    op_id: int
    is_p2p: bool
    operation: str
    state: Literal["open", "completed"]
    is_started: bool
    is_retired: bool
    is_coalesced_part: bool = False
    created_unix_ns: int
    timeout_ms: int
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    thread_id: int = 0
    thread_name: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it has not completed."""
        return self.state == "open"


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The last operation of a group that was enqueued, seen started and seen completed; -1 is none.

    The numbers mix collectives with point-to-point operations and may fall back: they only tell that open work has lost
    its record.
    """

    group_id: int
    last_enqueued: int
    last_started: int
    last_completed: int


class GroupMembers(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The global ranks of a group as [first, last] of each range; NCCL alone, gloo's recorder keeps no true list."""

    name: str
    description: str
    ranks: tuple[tuple[int, int], ...]


class RankRecords(msgspec.Struct, frozen=True, kw_only=True):
    """One recorder of one process, as it was at one moment.

    `records` are those of the newest epoch, oldest first; some that are done may be left out, see `Recorders.read`.
    `oldest_id` is the id of the oldest that is there (`next_id` where there is none): what was enqueued before is not
    known, `is_wrapped` where there was such. `next_id` is how many
    operations the epoch has had. `torch_version` is that of the installation beside the library, which the
    job's owner can write, "" where it was not read; `layout` is the version whose table row fitted what was found.
    `found_by` a symbol of the library, or by the shape of the object in its data.
    """

    library: Library
    records: tuple[FlightRecord, ...]
    groups: tuple[GroupStatus, ...] = ()
    members: tuple[GroupMembers, ...] = ()
    next_id: int
    oldest_id: int
    is_wrapped: bool
    reset_epoch: int = 0
    capacity: int
    torch_version: str = ""
    library_version: str = ""
    layout: str
    found_by: Literal["symbol", "shape"] = "symbol"
    read_unix_seconds: float


def with_batches(records: Sequence[FlightRecord]) -> tuple[FlightRecord, ...]:
    """NCCL's records with the parts of batches marked: a later one of the same group and number closes them."""
    closed: set[tuple[int, bool, int]] = set()
    marked = []
    for record in reversed(records):
        key = record.group_id, record.is_p2p, record.p2p_seq if record.is_p2p else record.collective_seq
        marked.append(msgspec.structs.replace(record, is_coalesced_part=True) if key in closed else record)
        if record.operation.endswith(_COALESCED):
            closed.add(key)
    return tuple(reversed(marked))
