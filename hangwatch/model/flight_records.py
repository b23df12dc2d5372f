"""Records of PyTorch's flight recorder in one process: the collectives that it enqueued, and their state.

This is the lowest module of `model`, because `ProcessDump` contains the records. `probes.torch_recorder` reads them,
`collectives` compares them. They hold names of operations, numbers, sizes and times; never a tensor. The process can
write all of it, so it is bounded and printable, and no more trustworthy than the stacks of the process. The source of
the records and the moment when each is written: torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from hangwatch.limits import MOST_RANKS

EARLIEST_UNIX_NS, LATEST_UNIX_NS = 1_420_000_000 * 10**9, 4_102_444_800 * 10**9  # 2015 to 2100
"""A record with a time outside of this range is not valid."""

MOST_BACKENDS = 16
MOST_GROUPS = 4096
MOST_NAME = 128  # characters
MOST_SEQUENCE = 1 << 53
BACKEND_NAME = r"^[A-Za-z0-9_.-]{1,32}$"
Library: TypeAlias = Annotated[str, msgspec.Meta(pattern=BACKEND_NAME)]
"""The backend of a recorder: "gloo" (in libtorch_cpu), "nccl" (in libtorch_cuda), or a name in torch's registry.

The registry (from torch 2.15 on) has the backends that record through hooks, such as "nccl2".
"""

ThreadKind: TypeAlias = Literal["", "main", "autograd", "trainer", "other"]
COUNTING_THREADS: frozenset[ThreadKind] = frozenset({"main", "autograd", "trainer"})
"""The threads of a process that enqueue the collectives of its training loop. Those of another prove no progress.

A trainer is another thread that alone uses the groups of its process.
"""


class FlightRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One operation that a process enqueued.

    `id` counts the records of one `reset_epoch` from 0. `group_id` is a counter of this process. `group_name` is the
    same on all ranks ("" under TORCH_DISTRIBUTED_DEBUG=DETAIL). Several groups may have the same `group_description`.
    `p2p_seq` and `op_id` count in one process: never compare them with those of another process. `created_unix_ns` is
    the time of enqueueing. `completed_unix_ns` is the time when NCCL's watchdog saw the completion, up to 100 ms late;
    0 if unknown, and with gloo.

    `state` becomes "completed" with NCCL when the watchdog has seen the completion, with other backends when the record
    is retired. With NCCL, `is_retired` does not show that the operation completed, since a timeout retires a record,
    too. `is_coalesced_part`: a later record of the same group and numbers closes the batch and represents this record,
    which is never retired. `thread_id` is std::thread::id, in the form of the recorder's own dump. `thread` is the
    kind of that thread, "" if unknown.
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
    completed_unix_ns: int = 0
    timeout_ms: int
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    thread_id: int = 0
    thread_name: str = ""
    thread: ThreadKind = ""

    @property
    def is_open(self) -> bool:
        """True if the operation has not completed."""
        return self.state == "open"

    @property
    def counts_as_open(self) -> bool:
        """True if the operation has not completed. The parts of an NCCL batch never complete, so they do not count.

        The record that closes the batch counts instead.
        """
        return self.is_open and not self.is_coalesced_part


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The last operation of a group that was enqueued, started and completed; -1 for none.

    The numbers mix collectives with point-to-point operations and may decrease. They show only that an open
    operation no longer has a record. `usual_gap_seconds` is a time between two operations: those that are not
    shorter make up three quarters of the time, without the longest. It is 0 if unknown.
    """

    group_id: int
    last_enqueued: int
    last_started: int
    last_completed: int
    usual_gap_seconds: float = 0.0


_RankNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST_RANKS)]


class Progression(NamedTuple):
    """Ranks in equal steps: a group often has one rank of each node, such as 0, 8, 16."""

    first: _RankNumber
    last: _RankNumber
    step: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] = 1

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.first, self.last + 1, self.step)


class GroupMembers(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The global ranks of a group, as [first, last, step]. Not with gloo, which keeps no correct list."""

    name: str
    description: str
    ranks: tuple[Progression, ...]


class RankRecords(msgspec.Struct, frozen=True, kw_only=True):
    """One recorder of one process at one moment.

    `records` are those of the newest epoch, oldest first. Some completed records may be missing, see `Recorders.read`.
    `oldest_id` is the id of the oldest record, or `next_id` if there is no record. `is_wrapped`: the recorder no longer
    has records of its oldest operations. `next_id` is the number of operations in the epoch.

    `torch_version` is the version of the installation next to the library, which the job's owner can write; "" if it
    was not read. `layout` is the version of the matching table row. `found_by` is how the recorder was located: by a
    symbol of the library, or by the shape of the object in its data.
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


class ProgressCounter(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of one rank since hangwatch follows it: the number of collectives that it has enqueued.

    Only groups that its main thread, autograd or a trainer uses count. `restarts` counts the times that a number fell,
    because the job made its process groups anew. Numbers of different ranks are not comparable.
    """

    total: int
    restarts: int = 0


def find_progressions(sorted_ranks: Iterable[int]) -> tuple[Progression, ...]:
    """Return different ranks as progressions. Each progression takes as many of the next ranks as it can."""
    progressions: list[Progression] = []
    for rank in sorted_ranks:
        first, last, step = progressions[-1] if progressions else (rank, rank, 1)
        if first == last or rank == last + step:
            progressions[-1:] = [Progression(first, rank, max(1, rank - last))]
        else:
            progressions.append(Progression(rank, rank))
    return tuple(progressions)


def list_ranks(progressions: Iterable[Progression], most: int = MOST_RANKS) -> list[int]:
    """Return the ranks of progressions; none if there are more than `most`."""
    ranges = [progression.ranks for progression in progressions]
    return list(chain.from_iterable(ranges)) if sum(map(len, ranges)) <= most else []


def mark_batch_parts(records: Sequence[FlightRecord]) -> tuple[FlightRecord, ...]:
    """Return NCCL's records with `is_coalesced_part` set on each part of a batch that a later record closes.

    The closing record has the same group and number.
    """
    closed: set[tuple[int, bool, int]] = set()
    marked = []
    for record in reversed(records):
        key = record.group_id, record.is_p2p, record.p2p_seq if record.is_p2p else record.collective_seq
        marked.append(msgspec.structs.replace(record, is_coalesced_part=True) if key in closed else record)
        if record.operation.endswith("coalesced"):
            closed.add(key)
    return tuple(reversed(marked))
