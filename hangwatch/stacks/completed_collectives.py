"""The progress of ranks by the collectives that they complete, from the flight recorders of the rounds of a capture.

Only groups count that the main thread of a rank or its autograd uses. An operation that was enqueued behind an open one
proves nothing, so a group has completed all operations before its oldest open one. With gloo, an operation that timed
out counts as completed. So this is proof only if every rank of the job completes collectives: the rank for which the
others wait completes none. Pure.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from hangwatch.model import CollectiveProgress, Grouping, Member, Motion, Signature, list_by_key
from hangwatch.model.flight_records import COUNTING_THREADS, FlightRecord, Library, RankRecords

_GroupKey: TypeAlias = tuple[Library, int, int]
_Identity: TypeAlias = tuple[Library, int, int]
_CANNOT_PROGRESS = frozenset({Signature.GONE, Signature.STOPPED})


class _Round(NamedTuple):
    """The operations of a process in one round. `completed` counts those of each group before its oldest open one.

    `opened` are the open operations of the groups that count, `oldest` is the oldest of them; if there are none, that
    of any other group. `newest` is the newest operation that counts.
    """

    completed: dict[_GroupKey, int]
    opened: frozenset[_Identity]
    oldest: _Identity | None
    newest: _Identity | None
    read_unix_seconds: float
    idle_seconds: float
    usual_gap_seconds: float


def measure(rounds: Iterable[Sequence[RankRecords]], main_thread_id: int | None) -> CollectiveProgress | None:
    """Return the progress of a process, from its flight recorders in each round; None if no round shows a group.

    `main_thread_id` is `model.Thread.pthread_id` of the main thread, None if unknown.
    """
    read = [_read_round(recorders, main_thread_id) for recorders in rounds if recorders]
    if not read or read[-1].newest is None:
        return None
    first, last = read[0], read[-1]
    completed = sum(max(0, count - first.completed.get(key, count)) for key, count in last.completed.items())
    is_kept = first.oldest is not None and all(state.oldest == first.oldest for state in read)
    return CollectiveProgress(
        completed=completed if len(read) > 1 else None,
        stays_open=len(read) > 1 and bool(first.opened & last.opened),
        is_standing=len(read) > 1 and is_kept and first.newest == last.newest,
        idle_seconds=last.idle_seconds,
        usual_gap_seconds=last.usual_gap_seconds,
        seconds=last.read_unix_seconds - first.read_unix_seconds,
    )


def _read_round(recorders: Sequence[RankRecords], main_thread_id: int | None) -> _Round:
    counting: dict[_GroupKey, list[FlightRecord]] = {}
    others: list[tuple[int, _Identity]] = []
    gaps = []
    for recorder in recorders:
        whole = (record for record in recorder.records if not record.is_coalesced_part)
        usual = {status.group_id: status.usual_gap_seconds for status in recorder.groups}
        for group_id, records in list_by_key((record.group_id, record) for record in whole).items():
            if any(_counts(record, main_thread_id) for record in records):
                counting[recorder.library, recorder.reset_epoch, group_id] = records
                gaps.append(usual.get(group_id, 0.0))
            else:
                others += _list_open(recorder.library, records)
    opened = [entry for key, records in counting.items() for entry in _list_open(key[0], records)]
    newest = [
        (record.created_unix_ns, _identify(key[0], record)) for key, every in counting.items() for record in every
    ]
    read_unix_seconds = max((each.read_unix_seconds for each in recorders), default=0.0)
    began_unix_ns = min(opened)[0] if opened else max(newest)[0] if newest else 0
    return _Round(
        completed={key: _count_completed(records) for key, records in counting.items()},
        opened=frozenset(identity for _, identity in opened),
        oldest=min(opened or others)[1] if opened or others else None,
        newest=max(newest)[1] if newest else None,
        read_unix_seconds=read_unix_seconds,
        idle_seconds=read_unix_seconds - began_unix_ns / 1e9,
        usual_gap_seconds=min(gaps, default=0.0),
    )


def _counts(record: FlightRecord, main_thread_id: int | None) -> bool:
    is_main = record.thread_id == main_thread_id or not record.thread_id
    return record.thread in COUNTING_THREADS or (not record.thread and is_main)


def _identify(library: Library, record: FlightRecord) -> _Identity:
    return library, record.reset_epoch, record.id


def _list_open(library: Library, records: Iterable[FlightRecord]) -> Iterator[tuple[int, _Identity]]:
    return ((record.created_unix_ns, _identify(library, record)) for record in records if record.counts_as_open)


def _count_completed(records: Sequence[FlightRecord]) -> int:
    """Return the number of operations of a group before its oldest open one; without an open one, of all."""
    oldest = next((record for record in records if record.counts_as_open), None)
    newest = records[-1] if oldest is None else oldest
    return newest.collective_seq + newest.p2p_seq - (oldest is not None)


# --- of the job ------------------------------------------------------------------------------------------------------


class Completed(NamedTuple):
    """The fewest and the most collectives that a rank completed between two rounds, and the longest time for them."""

    fewest: int
    most: int
    seconds: float


def find_completed(members: Collection[Member]) -> Completed | None:
    """Return the collectives that the ranks completed; None unless each completed one, and none of it stayed open."""
    working = [each for each in _list_progress(members) if each.completed and not each.stays_open]
    if not working or len(working) < len(members):
        return None
    counts = [each.completed or 0 for each in working]
    return Completed(min(counts), max(counts), max(each.seconds for each in working))


def find_pause(members: Collection[Member]) -> tuple[float, float] | None:
    """Return the seconds since the last collective of the job, and the usual gap; None if a rank is overdue or held.

    Both are those of the rank with the longest gap.
    """
    every = [each for each in _list_progress(members) if each.idle_seconds <= each.usual_gap_seconds]
    pauses = [(each.idle_seconds, each.usual_gap_seconds) for each in every]
    return max(pauses) if pauses and len(pauses) == len(members) else None


def _list_progress(members: Collection[Member]) -> list[CollectiveProgress]:
    """Return the progress of the ranks that are not held and have a flight recorder which shows it."""
    progress = (member.recorder.progress for member in members if not _is_held(member))
    return [each for each in progress if each is not None]


def _is_held(member: Member) -> bool:
    """True if the main thread was in one call on an object, and did not return from it between the rounds."""
    has_returned = member.usage.switches_per_second is None or member.usage.switches_per_second > 0
    return member.signature in _CANNOT_PROGRESS or (member.kernel.is_held_outside and not has_returned)


def with_motion_of_job(grouping: Grouping) -> Grouping:
    """Return the groups with the motion of each rank as the collectives of all ranks show it.

    All ranks move if each completed a collective. While no rank is overdue, none is known to stand still.
    """
    if find_completed(grouping.members) is not None:
        return grouping.change_members(lambda _, member: replace(member, motion=Motion.MOVING))
    if find_pause(grouping.members) is not None:
        return grouping.change_members(
            lambda _, member: replace(member, motion=Motion.UNKNOWN) if member.motion is Motion.FROZEN else member
        )
    return grouping
