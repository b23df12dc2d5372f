"""Pure: ranks whose processes stand at the same place -> groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import structs

from hangwatch import config
from hangwatch.hang import activity, motion, standing
from hangwatch.hang import frames as stack_frames
from hangwatch.model import (
    Capture,
    Fault,
    Frame,
    Group,
    Grouping,
    Member,
    ProcessDump,
    RankDump,
    RankId,
    Stack,
    Thread,
)

_ENDED = frozenset("ZXx")
_SHOWN = 16


def group_ranks(
    capture: Capture | Iterable[RankDump],
    table: activity.Table,
    settings: config.Capture,
    world_size: int | None = None,
) -> Grouping:
    """Group ranks whose processes stand at the same place, by the last round that has stacks.

    `world_size` is the number of ranks of the job, None where nothing says it (a capture says it itself). Ranks that
    could not be dumped are grouped by the kind of their fault, ranks whose process is gone by themselves.
    """
    notes: tuple[str, ...] = ()
    if isinstance(capture, Capture):
        notes, world_size = capture.notes, capture.world_size if world_size is None else world_size
        ranks: Iterable[RankDump] = capture.ranks
    else:
        ranks = capture
    seen: dict[_Signature, standing.Standing] = {}
    best: dict[str, tuple[RankDump, _Stand]] = {}
    members: dict[str, list[Member]] = {}
    for rank in ranks:
        stand = _stand(rank, table, seen)
        members.setdefault(stand.key, []).append(_member(rank, stand, table, settings))
        if stand.key not in best or rank.id.sort_key() < best[stand.key][0].id.sort_key():
            best[stand.key] = (rank, stand)
    groups = (_group(key, tuple(found), *best[key], table) for key, found in members.items())
    return merge_groups(groups, world_size, notes)


def merge_groups(groups: Iterable[Group], world_size: int | None, notes: Iterable[str]) -> Grouping:
    """Put groups together: equal keys become one group, each rank keeps one place, the largest group comes first.

    A group is shown by its lowest rank. A rank that is in two groups stays in the one with the smaller key, so that the
    order of `groups` never matters.
    """
    by_key: dict[str, list[Group]] = {}
    for one in groups:
        by_key.setdefault(one.key, []).append(one)
    taken: set[_Identity] = set()
    merged = []
    for key in sorted(by_key):
        parts = sorted(by_key[key], key=lambda part: part.members[0].id.sort_key())
        found: dict[_Identity, Member] = {}
        for part in parts:
            for member in part.members:
                found.setdefault(_identity(member.id), member)
        fresh = [member for identity, member in found.items() if identity not in taken]
        if fresh:
            taken.update(found)
            fresh.sort(key=lambda member: member.id.sort_key())
            merged.append(structs.replace(parts[0], members=tuple(fresh)))
    merged.sort(key=lambda one: (-len(one.members), one.members[0].id.sort_key(), one.key))
    return Grouping(
        groups=tuple(merged),
        world_size=world_size,
        notes=tuple(sorted(set(notes))),
    )


_Identity = tuple[str | None, int | None, int | None, int | None]
_Signature = tuple[tuple[bool, str | None, tuple[stack_frames.Place, ...]], ...]


class _Stand(NamedTuple):
    """Where a rank stands; `standing` is None where there is no stack."""

    key: str
    standing: standing.Standing | None
    dump: ProcessDump | None
    fault: Fault | None
    gone: bool


def _identity(rank: RankId) -> _Identity:
    """What makes two dumps the same rank: its global rank on its node, else its local rank, else its pid."""
    if rank.rank is not None:
        return rank.node, rank.rank, None, None
    if rank.local_rank is not None:
        return rank.node, None, rank.local_rank, None
    return rank.node, None, None, rank.pid


def _stand(rank: RankDump, table: activity.Table, seen: dict[_Signature, standing.Standing]) -> _Stand:
    last = rank.rounds[-1] if rank.rounds else None
    if rank.gone or (last is not None and (last.state or "") in _ENDED):
        return _Stand("gone", None, last, None, gone=True)
    dump = next((one for one in reversed(rank.rounds) if any(thread.frames for thread in one.threads)), None)
    if dump is None:
        fault = (last.fault if last else None) or Fault(
            subject="rank", reason="NoStack", detail="no thread in the dump"
        )
        return _Stand(f"undumpable:{fault.reason}", None, last, fault, gone=False)
    signature = tuple(
        (thread.is_main, thread.name, tuple((frame.function, frame.file) for frame in thread.frames))
        for thread in dump.threads
    )
    if signature not in seen:
        seen[signature] = standing.of(dump.threads, table)
    found = seen[signature]
    return _Stand(found.key, found, dump, None, gone=False)


def _member(rank: RankDump, stand: _Stand, table: activity.Table, settings: config.Capture) -> Member:
    moving, cpu_ratio, io_bytes_per_second = motion.of(rank, table, settings)
    main = stack_frames.main_thread(stand.dump.threads) if stand.dump else None
    return Member(
        id=rank.id,
        motion=moving,
        rounds=len(rank.rounds),
        waited_before=_waited_before(rank.rounds, table),
        owns_gil=main.owns_gil if main else None,
        state=_state(rank.rounds),
        wchan=stand.dump.wchan if stand.dump else None,
        cpu_ratio=cpu_ratio,
        io_bytes_per_second=io_bytes_per_second,
        power_watts=rank.power_watts,
        utilization_ratio=rank.utilization_ratio,
    )


def _waited_before(rounds: Sequence[ProcessDump], table: activity.Table) -> bool:
    """Whether the rank stood in a wait for other ranks in a round before the last."""
    return any(standing.of(dump.threads, table).waits_for == "ranks" for dump in rounds[:-1] if dump.threads)


def _state(rounds: Sequence[ProcessDump]) -> str | None:
    """The state of all rounds; where they differ, the last one outside `D`: a passing disk wait is no news."""
    states = [dump.state for dump in rounds if dump.state is not None]
    return next((state for state in reversed(states) if state != "D"), states[-1] if states else None)


def _group(key: str, members: tuple[Member, ...], rank: RankDump, stand: _Stand, table: activity.Table) -> Group:
    members = tuple(sorted(members, key=lambda member: member.id.sort_key()))
    workers = _workers(rank, table)
    if stand.standing is None:
        return Group(key=key, activity="unknown", members=members, workers=workers, fault=stand.fault, gone=stand.gone)
    found = stand.standing
    threads = stand.dump.threads if stand.dump else ()
    return Group(
        key=key,
        activity=found.doing.activity,
        operation=found.doing.operation,
        waits=found.waits_for == "ranks",
        waits_for=found.waits_for,
        phase=found.phase,
        members=members,
        frames=_same(found.thread, threads).frames if found.thread else (),
        threads=tuple(_shown(_same(thread, threads), table) for thread in found.others[:_SHOWN]),
        workers=workers,
    )


def _same(thread: Thread, threads: Iterable[Thread]) -> Thread:
    """The thread of this dump that stands where the remembered one stands: the same functions, its own lines."""
    places = [(frame.function, frame.file) for frame in thread.frames]
    for one in threads:
        if one.name == thread.name and [(frame.function, frame.file) for frame in one.frames] == places:
            return one
    return thread


def _shown(thread: Thread, table: activity.Table) -> Stack:
    return Stack(
        name=thread.name or f"thread {thread.thread_id}",
        frames=thread.frames,
        activity=table.classify(thread.frames).activity,
    )


def _workers(rank: RankDump, table: activity.Table) -> tuple[Stack, ...]:
    """The worker processes of one rank, equal stacks once, the most common first."""
    counted: dict[tuple[stack_frames.Place, ...], list[tuple[str, tuple[Frame, ...]]]] = {}
    for worker in rank.workers:
        threads = worker.rounds[-1].threads if worker.rounds else ()
        main = stack_frames.main_thread(threads) or next(iter(threads), None)
        if main and main.frames:
            counted.setdefault(stack_frames.key_places(main.frames), []).append((worker.comm, main.frames))
    ordered = sorted(counted.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(
        Stack(name=f"{len(found)} x {found[0][0]}", frames=found[0][1], activity=table.classify(found[0][1]).activity)
        for _, found in ordered[:_SHOWN]
    )
