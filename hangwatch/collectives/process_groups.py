"""The process groups in which ranks wait, and the newest collective of each member, from all records. Pure.

A rank *has joined* a collective of a group if it has a record there with that number or a higher one. It *has not
joined* if it has no such record, and its flight recorder begins before the first record of that collective. In all
other cases this is *unknown*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from hangwatch.model import EnqueuedOperation, GroupRecords, Member
from hangwatch.model.flight_records import Library

DEFAULT_GROUP = "0", "default_pg"  # torch/distributed/distributed_c10d.py
_MOST_DIFFERENT_CLOCKS_SECONDS = 60.0
_MOST_MEMBERS = 1 << 20


class ProcessGroup(NamedTuple):
    """A process group in which a rank waits.

    `records` are the records of this group on each rank that has any. `waits` is the collective in which each waiting
    rank is. `members` are the known ranks of the group; all its ranks if `is_whole`. `newest` is the number of the
    newest collective that each member has enqueued, 0 if none. For the members in `unknown` that number is not known.
    """

    library: Library
    name: str
    records: Mapping[int, GroupRecords]
    waits: Mapping[int, EnqueuedOperation]
    members: tuple[int, ...]
    is_whole: bool
    newest: Mapping[int, int]
    unknown: frozenset[int]

    @property
    def generations(self) -> set[int]:
        """The generations of the group on its members: the number of groups that a member has created under this name.

        Members are compared only if all have the same generation.
        """
        return {records.generation for records in self.records.values()}

    def __str__(self) -> str:
        return f"{next(iter(self.records.values())).description or 'group'} ({self.name})"


def waits_in(records: GroupRecords) -> EnqueuedOperation | None:
    """Return the collective in which a rank waits: the oldest one of a group that stays open. None if there is none."""
    stay_open = [one for one in records.operations if one.stays_open and not one.is_p2p]
    return min(stay_open, key=lambda one: one.number) if stay_open else None


def find_groups(by_rank: Mapping[int, Member], world_size: int | None) -> list[ProcessGroup]:
    """Return the process groups in which a rank waits, sorted by library and name."""
    every: dict[tuple[Library, str], dict[int, GroupRecords]] = defaultdict(dict)
    for rank, member in by_rank.items():
        for recorder in member.recorder.libraries:
            for records in recorder.groups:
                every[records.library, records.name][rank] = records
    groups = []
    for (library, name), by_member in sorted(every.items()):
        waits = {rank: wait for rank, records in by_member.items() if (wait := waits_in(records)) is not None}
        if waits:
            members, is_whole = _find_members(by_member, by_rank, world_size)
            newest = _find_newest_numbers(by_member, waits, members, by_rank)
            unknown = frozenset(members) - newest.keys()
            groups.append(ProcessGroup(library, name, by_member, waits, members, is_whole, newest, unknown))
    return groups


def _find_members(
    records: Mapping[int, GroupRecords], by_rank: Mapping[int, Member], world_size: int | None
) -> tuple[tuple[int, ...], bool]:
    """Return the known members of a group, and true if these are all its members.

    The default group contains all ranks. Other groups contain the ranks that NCCL lists. If NCCL lists none, they
    contain the ranks with a record in the group.
    """
    first = next(iter(records.values()))
    if (first.name, first.description) == DEFAULT_GROUP:
        ranks = {*by_rank, *range(min(world_size or 0, _MOST_MEMBERS))}
        return tuple(sorted(ranks)), len(ranks) == world_size
    listed = {group_records.ranks for group_records in records.values()}
    ranges = listed.pop() if len(listed) == 1 else ()
    if ranges and sum(last + 1 - start for start, last in ranges) <= _MOST_MEMBERS:
        ranks = {rank for start, last in ranges for rank in range(start, last + 1)}
        return tuple(sorted(ranks | records.keys())), ranks >= records.keys()
    return tuple(sorted(records)), False


def _find_newest_numbers(
    records: Mapping[int, GroupRecords],
    waits: Mapping[int, EnqueuedOperation],
    members: tuple[int, ...],
    by_rank: Mapping[int, Member],
) -> dict[int, int]:
    """Return the number of the newest collective of each member, 0 if it has none.

    Members without a known number are left out.
    """
    generations = {group_records.generation for group_records in records.values()}
    newest = {rank: group_records.number for rank, group_records in records.items()} if len(generations) == 1 else {}
    if generations == {1}:
        lowest = min(wait.number for wait in waits.values())
        earliest: dict[str | None, float] = {}
        for rank, wait in waits.items():
            if wait.number == lowest:
                node, created = by_rank[rank].id.node, wait.created_unix_seconds
                earliest[node] = min(earliest.get(node, created), created)
        library = next(iter(records.values())).library
        silent = (rank for rank in members if rank not in records)
        newest |= {rank: 0 for rank in silent if _reaches_back(by_rank.get(rank), library, earliest)}
    return newest


def _reaches_back(member: Member | None, library: Library, earliest: Mapping[str | None, float]) -> bool:
    """True if a rank's flight recorder begins before `earliest`, so that it would contain a record of the group.

    `earliest` is the time of the group's first record on each node, in seconds since the epoch. The clocks of other
    nodes may differ by up to a minute.
    """
    recorder = (
        next((candidate for candidate in member.recorder.libraries if candidate.library == library), None)
        if member
        else None
    )
    if member is None or recorder is None:
        return False
    if not recorder.is_wrapped:
        return True
    oldest = recorder.oldest_unix_seconds
    return oldest is not None and all(
        oldest < seconds - (0.0 if node is not None and node == member.id.node else _MOST_DIFFERENT_CLOCKS_SECONDS)
        for node, seconds in earliest.items()
    )
