"""Findings of a self-test, made from the events of its ranks. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from hangwatch import words
from hangwatch.model import RankId, Value, list_by_key
from hangwatch.probes.base.child import signal_name
from hangwatch.tools.selftest.rank import NO_TORCH, late

Kind = Literal["no_torch", "not_started", "died", "wrong", "hung", "cannot_talk", "error", "late", "slow"]

_MESSAGE_CHARACTERS = 500
_SLOW_TIMES = 3.0
_SLOW_SECONDS = 0.5


class Event(Value, frozen=True):
    """One event of a rank, see `selftest.rank`. Fields without a value in this event have their defaults."""

    event: Literal["here", "begin", "end", "wrong", "timeout", "error", "done"]
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
    result: float = 0.0
    wanted: float = 0.0


class Finding(Value, frozen=True):
    """A problem in one sentence, with the ranks that have it. `ranks` is empty if no rank can be named."""

    kind: Kind
    ranks: tuple[int, ...]
    message: str


class _Step(NamedTuple):
    """A step of the test. The ranks that take part in one step have equal values of this type."""

    what: str
    group: tuple[int, ...]


class _Course(NamedTuple):
    """The progress of one rank: the steps that it began, the unfinished step (None: none), and its error ("": none)."""

    begun: tuple[_Step, ...]
    inside: _Step | None
    error: str
    is_done: bool


def judge(
    events: Sequence[Event],
    exits: Mapping[int, int | None],
    world_size: int,
    late_seconds: float,
    last_words: Mapping[int, str] | None = None,
) -> tuple[Finding, ...]:
    """Return the findings, causes before consequences; empty if the test passed.

    `exits` is the exit code of each rank: negative for a signal, None if hangwatch killed the rank. `last_words` is
    each rank's last line that is not an event.
    """
    if NO_TORCH in exits.values():
        without = [rank for rank, code in exits.items() if code == NO_TORCH]
        return (Finding(kind="no_torch", ranks=tuple(without), message="this Python has no torch"),)
    courses = {rank: _course([event for event in events if event.rank == rank]) for rank in range(world_size)}
    findings = [*_wrong(events), *_died(courses, exits), *_ended_early(courses, exits, last_words or {})]
    if not findings:
        silent = tuple(sorted(set(courses) - {event.rank for event in events}))
        findings += [_not_started(silent, exits)] if silent else [*_stuck(courses), *_errors(courses)][:1]
    unfinished = tuple(rank for rank, course in courses.items() if not course.is_done)
    if not findings and unfinished:
        message = f"{_names(unfinished)} ended before the end of the test"
        findings.append(Finding(kind="error", ranks=unfinished, message=message))
    return tuple(findings) or (*_slow(events), *_late(events, late_seconds))


def _course(events: Sequence[Event]) -> _Course:
    begun = tuple(_Step(event.what, event.group) for event in events if event.event == "begin")
    ended = sum(event.event == "end" for event in events)
    return _Course(
        begun=begun,
        inside=begun[-1] if len(begun) > ended else None,
        error=next((event.what for event in events if event.event == "error"), ""),
        is_done=any(event.event == "done" for event in events),
    )


def _names(ranks: Sequence[int]) -> str:
    return words.name_ranks([RankId(rank=rank) for rank in ranks])


def _sentence(kind: Kind, ranks: Sequence[int], message: str) -> Finding:
    return Finding(kind=kind, ranks=tuple(ranks), message=message[:1].upper() + message[1:])


def _wrong(events: Iterable[Event]) -> list[Finding]:
    """Find wrong sums. The finding names the ranks of the smallest groups with a wrong sum."""
    wrong = sorted((event for event in events if event.event == "wrong"), key=lambda event: len(event.group))
    if not wrong:
        return []
    first = wrong[0]
    ranks = sorted({rank for event in wrong if len(event.group) == len(first.group) for rank in event.group})
    sums = f"{first.what} of {_names(first.group)} returned {first.result:g}; expected {first.wanted:g}"
    return [_sentence("wrong", ranks, f"{sums}: memory, a link or the network between them corrupts data")]


def _died(courses: Mapping[int, _Course], exits: Mapping[int, int | None]) -> list[Finding]:
    dead = {rank: -code for rank, code in exits.items() if code is not None and code < 0}
    killed = {rank: f"was killed by {signal_name(number) or f'signal {number}'}" for rank, number in dead.items()}
    return [
        _sentence("died", [rank], f"{_names([rank])} {text}{_where(courses[rank])}") for rank, text in killed.items()
    ]


def _ended_early(
    courses: Mapping[int, _Course], exits: Mapping[int, int | None], last_words: Mapping[int, str]
) -> list[Finding]:
    """Find ranks that failed before their first step, so that no other rank can be the cause."""
    return [
        _sentence(
            "error",
            [rank],
            f"{_names([rank])} ended with status {code} before its first step: "
            f"{words.elided(last_words.get(rank) or 'no output', _MESSAGE_CHARACTERS)}",
        )
        for rank, code in sorted(exits.items())
        if code is not None and code > 0 and rank in courses and not courses[rank].begun
    ]


def _where(course: _Course) -> str:
    if course.inside is not None:
        return f" in {_step(course.inside)}"
    return f" after {_step(course.begun[-1])}" if course.begun else " before its first step"


def _step(step: _Step) -> str:
    return f"{step.what} of {words.count(len(step.group))}" if step.group else step.what


def _not_started(silent: Sequence[int], exits: Mapping[int, int | None]) -> Finding:
    """Return a finding for ranks that printed nothing, with their exit codes, which are unknown for other nodes."""
    codes = [exits.get(rank) for rank in silent]
    known = sorted({code for code in codes if code is not None})
    ended = (
        f"ended with status {words.join_words(list(map(str, known)))}" if known and None not in codes else "was started"
    )
    return _sentence("not_started", silent, f"the process of {_names(silent)} {ended}, but printed nothing")


def _stuck(courses: Mapping[int, _Course]) -> list[Finding]:
    """Find ranks that have not joined a step in which other ranks wait, and that do not wait themselves.

    If there are none, find ranks that are stuck in a step of their own.
    """
    inside = {rank: course.inside for rank, course in courses.items() if course.inside is not None}
    missing = {
        rank
        for step in set(inside.values())
        for rank in step.group
        if rank in courses and step not in courses[rank].begun and not courses[rank].is_done
    }
    culprits = sorted(rank for rank in missing if rank not in inside or not inside[rank].group) or sorted(
        rank for rank, step in inside.items() if not step.group
    )
    if culprits:
        steps = {_step(step) for step in inside.values() if set(culprits) & {*step.group} and step.group}
        have = "has" if len(culprits) == 1 else "have"
        problem = f"{have} not joined {words.join_words(sorted(steps))}" if steps else f"{have} not finished"
        places = words.join_words([f"{_names([rank])} is{_where(courses[rank])}" for rank in culprits[:4]])
        return [_sentence("hung", culprits, f"{_names(culprits)} {problem}: {places}")]
    if not inside:
        return []
    if missing:
        return [_sentence("hung", sorted(missing), f"{_names(sorted(missing))} and others wait for each other")]
    smallest = min(inside.values(), key=lambda step: len(step.group) or len(courses))
    ranks = sorted(rank for rank, step in inside.items() if step == smallest)
    action = "connect" if smallest.what == "rendezvous" else "communicate"
    message = f"{_names(ranks)} joined {_step(smallest)}, which does not finish: they cannot {action}"
    return [
        _sentence("cannot_talk", ranks, f"{message} (check the network, links, interface and firewall between them)")
    ]


def _errors(courses: Mapping[int, _Course]) -> list[Finding]:
    by_error = list_by_key((course.error, rank) for rank, course in courses.items() if course.error)
    if not by_error:
        return []
    error, ranks = min(by_error.items(), key=lambda item: (len(item[1]), item[1]))
    text = words.elided(error, _MESSAGE_CHARACTERS)
    return [_sentence("error", ranks, f"{_names(ranks)} ended with an error: {text}")]


def _slow(events: Iterable[Event]) -> list[Finding]:
    """Find ranks with a device that computes several times more slowly than the median of the other devices."""
    durations = {event.rank: event.seconds for event in events if event.event == "end" and event.what == "compute"}
    findings = []
    for rank, seconds in sorted(durations.items()):
        others = [other_seconds for other, other_seconds in durations.items() if other != rank]
        if others and seconds > _SLOW_TIMES * (usual := statistics.median(others)) and seconds > usual + _SLOW_SECONDS:
            message = f"{_names([rank])} computes {seconds / max(usual, 1e-9):.1f} times as long as the other ranks"
            findings.append(_sentence("slow", [rank], message))
    return findings


def _late(events: Iterable[Event], late_seconds: float) -> list[Finding]:
    """Find ranks that join the repeated collectives late in most of their groups."""
    waits: dict[tuple[str, tuple[int, ...]], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for event in events:
        what, _, repeat = event.what.rpartition(" ")
        if event.event == "end" and repeat.isdigit():
            waits[what, event.group][repeat][event.rank] = event.seconds
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
            f"{_names([rank])} joined {len(by)} of {in_groups[rank]} collectives "
            f"{words.duration(round(statistics.median(by), 3))} later than the other ranks",
        )
        for rank, by in sorted(came_late.items())
        if 2 * len(by) > in_groups[rank]
    ]
