"""Pure: what the ranks of a self-test said -> what is wrong, and with which of them."""

from __future__ import annotations

import signal
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from hangwatch import words
from hangwatch.model import RankId, Value
from hangwatch.selftest.rank import NO_TORCH, late

Kind = Literal["no_torch", "not_started", "died", "wrong", "hung", "cannot_talk", "error", "late", "slow"]

_MESSAGE_CHARACTERS = 500
_SLOW_TIMES = 3.0
_SLOW_SECONDS = 0.5


class Event(Value, frozen=True):
    """One line of a rank, see `hangwatch.selftest.rank`; what a line does not say keeps its default."""

    event: Literal["here", "begin", "end", "wrong", "bytes", "timeout", "error", "done"]
    rank: int
    what: str = ""
    group: tuple[int, ...] = ()
    seconds: float = 0.0
    missing: tuple[int, ...] | None = None
    host: str = ""
    pid: int = 0
    device: str = ""
    name: str = ""
    backend: str = ""
    interface: str = ""
    address: str = ""
    found: float = 0.0
    wanted: float = 0.0
    bytes: int = 0


class Finding(Value, frozen=True):
    """Something that is wrong: with these ranks, or with nobody who could be named, in one sentence."""

    kind: Kind
    ranks: tuple[int, ...]
    message: str


class Bandwidth(Value, frozen=True):
    """What a rank reached with its neighbours, in bytes per second of the memory that was added up: a hint."""

    rank: int
    bytes_per_second: float


class _Doing(NamedTuple):
    """A step as all ranks of it know it."""

    what: str
    group: tuple[int, ...]


class _Course(NamedTuple):
    """How far one rank came: what it has begun, in order, which of it has not ended, and its own complaint."""

    begun: tuple[_Doing, ...]
    inside: _Doing | None
    error: str
    is_done: bool


def judge(
    events: Sequence[Event],
    exits: Mapping[int, int | None],
    world_size: int,
    late_seconds: float,
    last_words: Mapping[int, str] | None = None,
) -> tuple[Finding, ...]:
    """What is wrong, the cause before what follows from it; empty where the test has passed.

    `exits`: how each rank ended, None where it had to be ended by us, by a negative number: of that signal;
    `last_words`: what each said that was no event.
    """
    if NO_TORCH in exits.values():
        without = [rank for rank, code in exits.items() if code == NO_TORCH]
        return (Finding(kind="no_torch", ranks=tuple(without), message="this Python has no torch"),)
    courses = {rank: _course([one for one in events if one.rank == rank]) for rank in range(world_size)}
    found = [*_wrong(events), *_died(courses, exits), *_ended_early(courses, exits, last_words or {})]
    if not found:
        silent = tuple(sorted(set(courses) - {one.rank for one in events}))
        found += [_not_started(silent, exits)] if silent else [*_stuck(courses), *_errors(courses)][:1]
    if not found and not all(course.is_done for course in courses.values()):
        unfinished = tuple(rank for rank, course in courses.items() if not course.is_done)
        found.append(Finding(kind="error", ranks=unfinished, message=f"{_who(unfinished)} ended before the test did"))
    return (*found, *_slow(events), *_late(events, late_seconds)) if not found else tuple(found)


def bandwidths(events: Sequence[Event]) -> tuple[Bandwidth, ...]:
    """What each rank reached in the better half of its repeats with its neighbours, the slowest first."""
    pairs = [one for one in events if len(one.group) == 2]
    sizes = {(one.rank, one.group): one.bytes for one in pairs if one.event == "bytes"}
    seconds: dict[tuple[int, tuple[int, ...]], list[float]] = defaultdict(list)
    for one in pairs:
        if one.event == "end" and one.what.startswith("large all_reduce") and (one.rank, one.group) in sizes:
            seconds[one.rank, one.group].append(one.seconds)
    by_rank: dict[int, float] = {}
    for (rank, group), taken in seconds.items():
        reached = sizes[rank, group] / max(statistics.median_low(sorted(taken)[: len(taken) // 2 + 1]), 1e-9)
        by_rank[rank] = max(reached, by_rank.get(rank, 0.0))
    return tuple(
        Bandwidth(rank=rank, bytes_per_second=reached)
        for rank, reached in sorted(by_rank.items(), key=lambda one: one[1])
    )


def _course(events: Sequence[Event]) -> _Course:
    begun = tuple(_Doing(one.what, one.group) for one in events if one.event == "begin")
    ended = sum(one.event == "end" for one in events)
    return _Course(
        begun=begun,
        inside=begun[-1] if len(begun) > ended else None,
        error=next((one.what for one in events if one.event == "error"), ""),
        is_done=any(one.event == "done" for one in events),
    )


def _who(ranks: Sequence[int]) -> str:
    return words.who([RankId(rank=rank) for rank in ranks])


def _sentence(kind: Kind, ranks: Sequence[int], message: str) -> Finding:
    return Finding(kind=kind, ranks=tuple(ranks), message=message[:1].upper() + message[1:])


def _wrong(events: Iterable[Event]) -> list[Finding]:
    """Sums that are not what they must be: the ranks of the smallest group that had one."""
    wrong = sorted((one for one in events if one.event == "wrong"), key=lambda one: len(one.group))
    if not wrong:
        return []
    first = wrong[0]
    all_wrong = sorted({rank for one in wrong if len(one.group) == len(first.group) for rank in one.group})
    what = f"{first.what} of {_who(first.group)} gave {first.found:g}, which must be {first.wanted:g}"
    return [_sentence("wrong", all_wrong, f"{what}: memory, a link or the network between them changes data")]


def _died(courses: Mapping[int, _Course], exits: Mapping[int, int | None]) -> list[Finding]:
    dead = [rank for rank, code in exits.items() if code is not None and code < 0]
    return [
        _sentence("died", [rank], f"{_who([rank])} was ended by {_signal(-(exits[rank] or 0))}{_where(courses[rank])}")
        for rank in dead
    ]


def _ended_early(
    courses: Mapping[int, _Course], exits: Mapping[int, int | None], last_words: Mapping[int, str]
) -> list[Finding]:
    """Who ended before it began, which no other rank can have caused."""
    return [
        _sentence(
            "error",
            [rank],
            f"{_who([rank])} ended with status {code} before it did anything: "
            f"{words.elided(last_words.get(rank) or 'it said nothing', _MESSAGE_CHARACTERS)}",
        )
        for rank, code in sorted(exits.items())
        if code is not None and code > 0 and rank in courses and not courses[rank].begun
    ]


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _where(course: _Course) -> str:
    if course.inside is not None:
        return f" in {_step(course.inside)}"
    return f" after {_step(course.begun[-1])}" if course.begun else " before it did anything"


def _step(doing: _Doing) -> str:
    return f"{doing.what} of {words.count(len(doing.group))}" if doing.group else doing.what


def _not_started(silent: Sequence[int], exits: Mapping[int, int | None]) -> Finding:
    """Who said nothing, and how each ended, where it did; of one of another node only that node could tell."""
    codes = [exits.get(rank) for rank in silent]
    known = sorted({code for code in codes if code is not None})
    ended = (
        f"ended with status {words.listing(list(map(str, known)))}" if known and None not in codes else "was started"
    )
    return _sentence("not_started", silent, f"the process of {_who(silent)} {ended}, and said nothing")


def _stuck(courses: Mapping[int, _Course]) -> list[Finding]:
    """Who has not come to a step in which others wait, and waits in none himself; who is stuck alone."""
    inside = {rank: course.inside for rank, course in courses.items() if course.inside is not None}
    missing = {
        rank
        for doing in set(inside.values())
        for rank in doing.group
        if rank in courses and doing not in courses[rank].begun and not courses[rank].is_done
    }
    culprits = sorted(rank for rank in missing if rank not in inside or not inside[rank].group) or sorted(
        rank for rank, doing in inside.items() if not doing.group
    )
    if culprits:
        steps = {_step(doing) for doing in inside.values() if set(culprits) & {*doing.group} and doing.group}
        to = f" to {words.listing(sorted(steps))}" if steps else ""
        have = "has" if len(culprits) == 1 else "have"
        places = words.listing([f"{_who([rank])} stands{_where(courses[rank])}" for rank in culprits[:4]])
        return [_sentence("hung", culprits, f"{_who(culprits)} {have} not come{to}: {places}")]
    if not inside:
        return []
    if missing:
        return [_sentence("hung", sorted(missing), f"{_who(sorted(missing))} and others wait for each other")]
    smallest = min(inside.values(), key=lambda doing: len(doing.group) or len(courses))
    ranks = sorted(rank for rank, doing in inside.items() if doing == smallest)
    met = "meet" if smallest.what == "rendezvous" else "talk"
    return [
        _sentence(
            "cannot_talk",
            ranks,
            f"{_who(ranks)} came to {_step(smallest)}, and nobody came out: they cannot {met} (the network or links "
            "between them, the interface, a firewall)",
        )
    ]


def _errors(courses: Mapping[int, _Course]) -> list[Finding]:
    failed = {rank: course.error for rank, course in courses.items() if course.error}
    if not failed:
        return []
    by_error: dict[str, list[int]] = defaultdict(list)
    for rank, error in failed.items():
        by_error[error].append(rank)
    error, ranks = min(by_error.items(), key=lambda one: (len(one[1]), one[1]))
    said = words.elided(error, _MESSAGE_CHARACTERS)
    return [_sentence("error", ranks, f"{_who(ranks)} ended with an error: {said}")]


def _slow(events: Iterable[Event]) -> list[Finding]:
    """Whose device computes several times longer than those of half of the others."""
    seconds = {one.rank: one.seconds for one in events if one.event == "end" and one.what == "compute"}
    found = []
    for rank, taken in sorted(seconds.items()):
        others = [other for one, other in seconds.items() if one != rank]
        if others and taken > _SLOW_TIMES * (usual := statistics.median(others)) and taken > usual + _SLOW_SECONDS:
            said = f"{_who([rank])} computes {taken / max(usual, 1e-9):.1f} times as long as half of the others"
            found.append(_sentence("slow", [rank], said))
    return found


def _late(events: Iterable[Event], late_seconds: float) -> list[Finding]:
    """Who came late to the repeated collectives of most groups that it was in."""
    waits: dict[tuple[str, tuple[int, ...]], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for one in events:
        what, _, repeat = one.what.rpartition(" ")
        if one.event == "end" and repeat.isdigit():
            waits[what, one.group][repeat][one.rank] = one.seconds
    in_groups, came_late = defaultdict[int, int](int), defaultdict[int, list[float]](list)
    for (_, group), repeats in waits.items():
        for rank in group:
            in_groups[rank] += 1
        for rank, by_seconds in late(list(repeats.values()), late_seconds).items():
            came_late[rank].append(by_seconds)
    return [
        _sentence(
            "late",
            [rank],
            f"{_who([rank])} came to {len(by)} of {in_groups[rank]} collectives "
            f"{words.duration(round(statistics.median(by), 3))} later than the others, who waited for it",
        )
        for rank, by in sorted(came_late.items())
        if 2 * len(by) > in_groups[rank]
    ]
