"""The progress of each rank of this node in each process group, as values for the series of metrics. Pure.

Alert rules over all nodes decide which rank has not joined, by the definitions of `wait_graph`.
docs/adr/026-fleet-rule.md lists what PromQL cannot express. The job's owner chooses the names of groups, so each
name is replaced by a short text, which is unique in the job.
"""

import hashlib
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.collectives.process_groups import DEFAULT_GROUP, find_open
from hangwatch.collectives.wait_graph import Stance, is_busy
from hangwatch.model import EnqueuedOperation, Grouping, GroupRecords, Member, list_by_key
from hangwatch.model.flight_records import Library
from hangwatch.verdict.sequence_rules import stance_of

MOST_GROUPS_OF_A_RANK = 8
RANKS_OF_A_SERIES = 8  # hangwatch.rules.yaml has a line for each
_TEXT_LENGTH = 40
_PLAIN = re.compile(rf"[\w.:-]{{1,{_TEXT_LENGTH}}}", re.ASCII)


class RankStance(NamedTuple):
    """A rank and its stance, which its stack and the kernel show. `has_open`: it has an unfinished operation.

    In a group that one of its threads uses (`GroupRecords.thread`), both are those of this thread.
    """

    rank: int
    stance: Stance
    has_open: bool


class GroupProgress(NamedTuple):
    """The progress of a rank in one group: its newest collective, and the collective in which it waits.

    `group` is the library and the name of the group; the default group is called "default_pg". `description` is a
    text for people. `generation` is that of `GroupRecords`. `waits_in` is None if the rank waits in no collective
    of the group.
    """

    place: RankStance
    group: str
    description: str
    generation: int
    number: int
    newest: EnqueuedOperation | None
    waits_in: EnqueuedOperation | None

    @property
    def is_default(self) -> bool:
        """True for the default group, which contains all ranks."""
        return self.group.partition(":")[2] == DEFAULT_GROUP[1]


class UnrecordedRank(NamedTuple):
    """A rank without a record in the default group, by a recorder that is complete since then; 0: since its start."""

    place: RankStance
    group: str
    since_unix_seconds: float


class JobProgress(NamedTuple):
    """The progress of all ranks of one job on this node: `reached` in groups with records, `unseen` without records.

    `left_out` is the number of (rank, group) pairs over the limit.
    """

    reached: tuple[GroupProgress, ...] = ()
    unseen: tuple[UnrecordedRank, ...] = ()
    left_out: int = 0


def find_progress(grouping: Grouping, most: int) -> JobProgress:
    """Return the progress of at most `most` pairs of rank and group; () if two ranks have the same number."""
    ranks = Counter(member.id.rank for member in grouping.members if member.id.rank is not None)
    if any(count > 1 for count in ranks.values()):
        return JobProgress()
    stance = stance_of(grouping)
    reached: list[GroupProgress] = []
    unseen: list[UnrecordedRank] = []
    left_out = 0
    recorded = (member for member in grouping.members if member.recorder.libraries)
    for member in sorted(recorded, key=lambda member: member.id.sort_key()):
        if member.id.rank is None:
            continue
        place = RankStance(member.id.rank, stance(member, ""), is_busy(member))
        of_main = all(operation.by_main for operation in member.recorder.open_operations)
        groups = sorted((group for recorder in member.recorder.libraries for group in recorder.groups), key=_precedence)
        shown = min(MOST_GROUPS_OF_A_RANK, most - len(reached))
        reached += [
            _reached(
                RankStance(place.rank, stance(member, group.thread), has_open=False)
                if group.thread and of_main
                else place,
                group,
            )
            for group in groups[:shown]
        ]
        left_out += max(0, len(groups) - shown)
        if shown > 0 and not any(map(_is_default, groups)):
            unseen += _unseen(place, member)
    return JobProgress(tuple(reached), tuple(unseen), left_out)


class Collective(NamedTuple):
    """A collective in which ranks wait (`waits`), or which is the newest collective of ranks."""

    group: str
    description: str
    number: int
    operation: str
    waits: bool


def count_collectives(ranks: Sequence[GroupProgress]) -> Counter[Collective]:
    """Count for each collective the ranks that wait in it, and the other ranks for which it is the newest.

    Newest collectives are counted only in the default group and in groups in which a rank waits. They show if all
    ranks run the same operation under one number.
    """
    counts: Counter[Collective] = Counter()
    waited_in = {rank.group for rank in ranks if rank.waits_in is not None}
    descriptions: dict[str, str] = {}
    for rank in ranks:
        description = descriptions.setdefault(rank.group, rank.description)
        if rank.waits_in is not None:
            counts[_collective(rank.group, description, rank.waits_in, waits=True)] += 1
        is_shown = rank.group in waited_in or rank.is_default
        if rank.newest is not None and rank.newest != rank.waits_in and is_shown:
            counts[_collective(rank.group, description, rank.newest, waits=False)] += 1
    return counts


def _collective(group: str, description: str, enqueued: EnqueuedOperation, *, waits: bool) -> Collective:
    return Collective(group, description, enqueued.number, words.elided(enqueued.operation, _TEXT_LENGTH), waits)


def merge_ranks(ranks: Iterable[GroupProgress], *fields: str) -> Iterator[tuple[GroupProgress, str]]:
    """Yield sets of at most `RANKS_OF_A_SERIES` ranks of a group with equal fields: the first, and the others."""
    key = operator.attrgetter("group", *fields)
    for members in list_by_key((key(rank), rank) for rank in ranks).values():
        for start in range(0, len(members), RANKS_OF_A_SERIES):
            first, *others = members[start : start + RANKS_OF_A_SERIES]
            yield first, " ".join(str(other.place.rank) for other in others)


def count_used(ranks: Iterable[GroupProgress]) -> Counter[str]:
    """Count the ranks that have used the default group of each library."""
    return Counter(rank.group for rank in ranks if rank.is_default)


def count_waiting(ranks: Iterable[GroupProgress]) -> int:
    """Count the ranks that wait in a collective of any group."""
    return len({rank.place.rank for rank in ranks if rank.waits_in is not None})


def waited_since(ranks: Iterable[GroupProgress]) -> dict[str, float]:
    """Return for each group the Unix time at which the first of the waiting ranks enqueued its collective."""
    waits = ((rank.group, rank.waits_in) for rank in ranks)
    since = list_by_key((group, wait.created_unix_seconds) for group, wait in waits if wait is not None)
    return {group: min(unix_seconds) for group, unix_seconds in since.items()}


def _precedence(group: GroupRecords) -> tuple[bool, bool, int]:
    """Return a sort key: first the groups in which the rank waits, then the default group, then the group used last."""
    newest = max((operation.order for operation in group.operations), default=-1)
    return find_open(group)[0] is None, not _is_default(group), -newest


def _is_default(group: GroupRecords) -> bool:
    return (group.name, group.description) == DEFAULT_GROUP


def _reached(place: RankStance, group: GroupRecords) -> GroupProgress:
    newest = [enqueued for enqueued in group.operations if not enqueued.is_p2p and enqueued.number == group.number]
    return GroupProgress(
        place=place,
        group=_group(group.library, DEFAULT_GROUP[1] if _is_default(group) else _distinct(group.name)),
        description=_description(group),
        generation=group.generation,
        number=group.number,
        newest=newest[-1] if newest else None,
        waits_in=find_open(group)[0],
    )


def _description(group: GroupRecords) -> str:
    """Return the text about a group for a page. It contains the unique name, since descriptions may be equal."""
    if _is_default(group):
        return "the default group"
    name = _group(group.library, _distinct(group.name))
    return f"{words.elided(group.description, _TEXT_LENGTH) or 'group'} ({name})"


def _unseen(place: RankStance, member: Member) -> Iterable[UnrecordedRank]:
    for recorder in member.recorder.libraries:
        since = recorder.oldest_unix_seconds if recorder.is_wrapped else 0.0
        if since is not None:
            yield UnrecordedRank(place, _group(recorder.library, DEFAULT_GROUP[1]), since)


def _group(library: Library, name: str) -> str:
    return f"{library}:{name}"


def _distinct(name: str) -> str:
    """Return the name of a group if it is plain and short, else its checksum, since cut names could be equal."""
    if _PLAIN.fullmatch(name) and name != DEFAULT_GROUP[1]:
        return name
    return f"~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
