"""The process groups in which ranks wait, and the newest collective of each member, from all records. Pure.

A rank *has joined* a collective of a group if it has a record there with that number or a higher one. It *has not
joined* if it has no such record, and its flight recorder begins before the first record of that collective. In all
other cases this is *unknown*.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from hangwatch.model import EnqueuedOperation, GroupRecords, Member, RankId, list_by_key
from hangwatch.model.flight_records import Library, list_ranks

DEFAULT_GROUP = "0", "default_pg"  # torch/distributed/distributed_c10d.py
MOST_DIFFERENT_CLOCKS_SECONDS = 60.0
_MOST_MEMBERS = 1 << 20
_get_number = attrgetter("number")
_PEER = re.compile(r"^(?:send|recv) \d{1,7}(?:->|<-)(\d{1,7})$")
# Beginnings of the names of operations that no member can complete before every member has launched them.
PROVING = ("all_", "_all_", "allreduce_", "reduce_scatter", "_reduce_scatter", "barrier")


class Transfer(NamedTuple):
    """A send or recv, and the rank at its other end. `peer` is None if its name or the group does not show it."""

    operation: EnqueuedOperation
    peer: int | None


@dataclass(frozen=True)
class ProcessGroup:
    """A process group in which a rank waits.

    `records` are the records of this group on each rank that has any. `waits` is the collective in which each waiting
    rank is, `transfers` the oldest send and recv that stay open. `members` are the known ranks of the group; all its
    ranks if `is_whole`. `newest` is the number of the newest collective that each member has enqueued, 0 if none, and
    `completed` the number up to which it had completed them. For the members in `unknown` these are not known. They are
    known for no member unless all have created equally many groups with this name, one thread at a time used it, and
    no member enqueued an operation after the records of another were read.
    """

    library: Library
    name: str
    records: Mapping[int, GroupRecords]
    waits: Mapping[int, EnqueuedOperation]
    transfers: Mapping[int, Sequence[Transfer]]
    members: tuple[int, ...]
    is_whole: bool
    newest: Mapping[int, int]
    completed: Mapping[int, int]
    unknown: frozenset[int]

    @property
    def enqueues_ahead(self) -> bool:
        """True if programs enqueue operations for a GPU, which completes them in order. Gloo has no GPU."""
        return self.library != "gloo"

    def is_proving(self, operation: EnqueuedOperation) -> bool:
        """True if no member can complete this operation before every member has launched it."""
        return self.enqueues_ahead and operation.operation.startswith(PROVING)

    @cached_property
    def lowest_newest(self) -> int:
        """The lowest number of all members: each has enqueued the collective with this number."""
        return min(self.newest.values(), default=0)

    @cached_property
    def highest_completed(self) -> int:
        """The highest number of a collective that a member has completed; -1 if none."""
        return max(self.completed.values(), default=-1)

    @cached_property
    def highest_started(self) -> int:
        """The highest number of an open collective that runs on a GPU; -1 if none, or if that is unknown."""
        return max((wait.number for wait in self.waits.values() if wait.is_started), default=-1)

    @property
    def may_have_end(self) -> bool:
        """True if a rank waits in this group for a rank that has not joined, is unknown, or has not completed."""
        numbers = [wait.number for wait in self.waits.values()]
        is_apart = bool(numbers) and (
            self.lowest_newest < max(numbers) or min(numbers) <= max(self.highest_completed, self.highest_started)
        )
        return is_apart or bool(self.unknown or self.transfers)

    @property
    def may_be_of_one_moment(self) -> bool:
        """False if a member has completed a collective that another, read earlier, had not enqueued."""
        every = (one for records in self.records.values() for one in records.operations)
        return self.highest_completed <= self.lowest_newest or not all(map(self.is_proving, every))

    def count_transfers(self, rank: int) -> int:
        """Return the number of the newest send, recv or batch of a rank; 0 if none."""
        operations = self.records[rank].operations if rank in self.records else ()
        return max((one.number for one in operations if one.is_p2p), default=0)

    def list_exchanges(self) -> Iterator[tuple[int, int | None]]:
        """Yield (member, other rank) for each record of a send or recv; None if the other rank is unknown."""
        for member, records in self.records.items():
            for operation in records.operations:
                if operation.is_p2p:
                    yield member, _find_transfer(operation, self.members).peer

    def __str__(self) -> str:
        return f"{next(iter(self.records.values())).description or 'group'} ({self.name})"


def process_key(process: RankId) -> int | None:
    """Return the key of a process: its rank, or its negative pid if it has no rank number; None if neither is known."""
    return -process.pid if process.rank is None and process.pid else process.rank


def find_process(key: int) -> RankId:
    """Return the name of a process by its key."""
    return RankId(rank=key) if key >= 0 else RankId(pid=-key)


def find_open(records: GroupRecords) -> tuple[EnqueuedOperation | None, tuple[EnqueuedOperation, ...]]:
    """Return the open collective with the lowest number, and the oldest open send and recv, or all of a batch."""
    stay_open = [one for one in records.operations if one.stays_open]
    collectives = [one for one in stay_open if not one.is_p2p]
    transfers: tuple[EnqueuedOperation, ...] = ()
    if len(collectives) < len(stay_open):
        oldest = {is_send(one): one.order for one in reversed(stay_open) if one.is_p2p}
        transfers = tuple(one for one in stay_open if one.is_p2p and one.order in oldest.values())
    return min(collectives, key=_get_number, default=None), transfers


def is_send(operation: EnqueuedOperation) -> bool:
    """True if the rank sends to one other rank."""
    return operation.is_p2p and operation.operation.startswith("send ")


def find_groups(by_key: Mapping[int, Member], world_size: int | None) -> list[ProcessGroup]:
    """Return the process groups in which a process waits, sorted by library and name."""
    every: dict[tuple[Library, str], dict[int, GroupRecords]] = defaultdict(dict)
    for key, member in by_key.items():
        for recorder in member.recorder.libraries:
            for records in recorder.groups:
                every[records.library, records.name][key] = records
    groups = []
    are_numbered = min(by_key) >= 0
    namesakes = [(*key, part) for key, by_member in sorted(every.items()) for part in _part_namesakes(by_member)]
    for library, name, by_member in namesakes:
        opened = {rank: find_open(records) for rank, records in by_member.items()}
        waits = {rank: wait for rank, (wait, _) in opened.items() if wait is not None}
        open_transfers = {rank: operations for rank, (_, operations) in opened.items() if operations}
        if waits or open_transfers:
            members, is_whole = _find_members(by_member, by_key, world_size, are_numbered=are_numbered)
            transfers = {
                rank: [_find_transfer(operation, members) for operation in operations]
                for rank, operations in open_transfers.items()
            }
            newest, completed = _find_numbers(by_member, waits, members, by_key)
            unknown = frozenset(members) - newest.keys() if waits else frozenset()
            groups.append(
                ProcessGroup(library, name, by_member, waits, transfers, members, is_whole, newest, completed, unknown)
            )
    return groups


def _part_namesakes(by_member: Mapping[int, GroupRecords]) -> Iterable[Mapping[int, GroupRecords]]:
    """Return the records of each group if disjoint groups have one name, as `split_group` gives it."""
    by_ranks = list_by_key((records.ranks, (rank, records)) for rank, records in by_member.items())
    listed = list_ranks(chain.from_iterable(by_ranks), _MOST_MEMBERS)
    are_disjoint = () not in by_ranks and 0 < len(listed) == len(set(listed))
    return map(dict, by_ranks.values()) if are_disjoint else (by_member,)


def _find_transfer(operation: EnqueuedOperation, members: Sequence[int]) -> Transfer:
    peer = _PEER.match(operation.operation)
    place = int(peer[1]) if peer else len(members)
    return Transfer(operation, members[place] if place < len(members) else None)


def _find_members(
    records: Mapping[int, GroupRecords], by_key: Mapping[int, Member], world_size: int | None, *, are_numbered: bool
) -> tuple[tuple[int, ...], bool]:
    """Return the known members of a group, and true if these are all its members.

    The default group contains all processes. Other groups contain the ranks that NCCL lists. If NCCL lists none, or a
    process has no rank number, they contain the processes with a record in the group.
    """
    first = next(iter(records.values()))
    is_default = (first.name, first.description) == DEFAULT_GROUP
    is_listed = not is_default or world_size is None
    are_alike = is_listed and all(first.ranks == other.ranks for other in records.values())
    listed = set(list_ranks(first.ranks, _MOST_MEMBERS) if are_alike else ())
    if are_numbered and listed:
        return tuple(sorted(listed | records.keys())), listed >= records.keys()
    if is_default:
        ranks = {*by_key, *range(min(world_size or 0, _MOST_MEMBERS) if are_numbered else 0)}
        return tuple(sorted(ranks)), len(ranks) == world_size
    return tuple(sorted(records)), len(listed) == len(records)


def _find_numbers(
    records: Mapping[int, GroupRecords],
    waits: Mapping[int, EnqueuedOperation],
    members: tuple[int, ...],
    by_key: Mapping[int, Member],
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the numbers of the newest collective, 0 if none, and of the last completed collective of each member.

    Members without a known number are left out. Torch's own count tells the number of a member without a record.
    """
    generations = {group_records.generation for group_records in records.values()}
    lowest = min((wait.number for wait in waits.values()), default=0)
    until = MOST_DIFFERENT_CLOCKS_SECONDS + min(
        (wait.created_unix_seconds + wait.open_seconds for wait in waits.values() if wait.open_seconds),
        default=float("inf"),
    )
    if len(generations) > 1 or any(
        _has_shared_number(group_records, lowest)
        or any(operation.created_unix_seconds > until for operation in group_records.operations)
        for group_records in records.values()
    ):
        return {}, {}
    newest = {rank: group_records.number for rank, group_records in records.items()}
    completed = {rank: group_records.completed for rank, group_records in records.items()}
    silent = [rank for rank in members if rank not in records and rank in by_key]
    if generations == {1} and silent and waits:
        begins = list_by_key(
            (by_key[rank].id.node, wait.created_unix_seconds) for rank, wait in waits.items() if wait.number == lowest
        )
        earliest = {node: min(created) for node, created in begins.items()}
        for rank in silent:
            number = _count_silent(by_key[rank], next(iter(records.values())), earliest)
            if number is not None:
                newest[rank] = completed[rank] = number
    return newest, completed


def _has_shared_number(records: GroupRecords, lowest: int) -> bool:
    """True if two threads enqueued at one moment, from number `lowest` on: gloo records one number for both.

    One of the two has the number before. NCCL records one number for all operations of a batch.
    """
    numbers = [one.number for one in records.operations if not one.is_p2p and one.number >= lowest]
    return records.library == "gloo" and len(numbers) > len(set(numbers))


def _count_silent(member: Member, group: GroupRecords, earliest: Mapping[str | None, float]) -> int | None:
    """Return the number of the newest collective of a rank without a record in a group; None if it is unknown.

    It is 0 if the flight recorder begins before `earliest`, so that it would contain a record of the group. `earliest`
    is the time of the group's first record on each node, in seconds since the epoch. The clocks of other nodes may
    differ by up to a minute.
    """
    recorder = next((state for state in member.recorder.libraries if state.library == group.library), None)
    if recorder is None:
        return None
    counted = next((number for name, number in recorder.idle if name == group.name), None)
    if counted is not None or not recorder.is_wrapped:
        return counted or 0
    oldest = recorder.oldest_unix_seconds
    begins_before = oldest is not None and all(
        oldest < seconds - (0.0 if node is not None and node == member.id.node else MOST_DIFFERENT_CLOCKS_SECONDS)
        for node, seconds in earliest.items()
    )
    return 0 if begins_before else None
