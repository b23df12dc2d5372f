"""Pure: dumps -> threads; ranks with the same stack -> groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
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


class DumpError(Exception):
    """A dump that cannot be read; the message says what was expected and what was found."""


class _Local(msgspec.Struct):
    name: str = ""
    repr: str | None = None


class _PySpyFrame(msgspec.Struct):
    name: str = ""
    filename: str | None = None
    short_filename: str | None = None
    module: str | None = None
    line: int = 0
    locals: list[_Local] | None = None


class _PySpyThread(msgspec.Struct):
    frames: list[_PySpyFrame] = []
    thread_id: int | None = None
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool | None = None
    owns_gil: bool | None = None


_JSON = msgspec.json.Decoder(list[_PySpyThread])
MOST_THREADS = 256  # of one process: one job's stacks must not fill the daemon's memory
INNERMOST_FRAMES = 192
OUTERMOST_FRAMES = 64


def parse_pyspy_json(text: str | bytes, pid: int | None) -> tuple[Thread, ...]:
    """Read what `py-spy dump --json` (0.4) prints of one process.

    `pid` is the process as its own pid namespace numbers it; it tells the main thread where py-spy gives no names.
    Raises DumpError when the text is not such a dump.
    """
    try:
        found = _JSON.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        start = text[:60]
        raise DumpError(
            f"not the JSON of `py-spy dump --json` (a list of threads): {error}; it starts {start!r}"
        ) from None
    main = _main_index(found, pid)
    threads = [_thread(thread, is_main=index == main) for index, thread in enumerate(found)]
    if len(threads) > MOST_THREADS:
        threads.sort(key=lambda thread: not thread.is_main)
    return tuple(threads[:MOST_THREADS])


def _main_index(threads: list[_PySpyThread], pid: int | None) -> int | None:
    """Which thread is the main one: by its name, by its id, or because its outermost frame is a module."""
    for index, thread in enumerate(threads):
        if thread.thread_name == "MainThread":
            return index
    for index, thread in enumerate(threads):
        if pid is not None and thread.os_thread_id == pid:
            return index
    for index, thread in enumerate(threads):
        if not thread.thread_name and thread.frames and thread.frames[-1].name == "<module>":
            return index
    return None


def _thread(thread: _PySpyThread, *, is_main: bool) -> Thread:
    number = thread.thread_id if thread.os_thread_id is None else thread.os_thread_id
    return Thread(
        name=thread.thread_name or None,
        thread_id="" if number is None else str(number),
        frames=_bounded([frame for frame in thread.frames if frame.name != "<shim>"]),
        active=thread.active,
        owns_gil=thread.owns_gil,
        is_main=is_main,
    )


def _bounded(frames: Sequence[_PySpyFrame]) -> tuple[Frame, ...]:
    """All frames; of a runaway recursion the innermost and the outermost ones."""
    if len(frames) <= INNERMOST_FRAMES + OUTERMOST_FRAMES:
        return tuple(map(_frame, frames))
    left_out = Frame(function="<frames left out>", file="<hangwatch>")
    return (*map(_frame, frames[:INNERMOST_FRAMES]), left_out, *map(_frame, frames[-OUTERMOST_FRAMES:]))


def _frame(frame: _PySpyFrame) -> Frame:
    return Frame(
        function=frame.name,
        file=frame.short_filename or frame.filename or "?",
        line=frame.line or None,
        module=frame.module,
        locals=tuple((local.name, local.repr or "") for local in frame.locals or ()),
    )


def group(
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
    return assemble(groups, world_size, notes)


def assemble(groups: Iterable[Group], world_size: int | None, notes: Iterable[str]) -> Grouping:
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
