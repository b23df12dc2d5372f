"""Pure: the kernel's log as dmesg, journalctl -k and syslog print it -> evidence.

Whoever can write into a log can write such lines there: they are evidence, and accuse nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import kernel_lines, words
from hangwatch.model import Evidence, RankId, Verdict

MOST_KEPT = 64
_SHOWN = 8
_TEXT_CHARACTERS = 240
_PREFIX = re.compile(
    r"(?P<when>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.,+Z-]{8,24})? ?(?:[\w.-]{1,64} kernel: ?)?"
    r"(?:<\d{1,3}>)?(?:\[ ?(?P<clock>[^\[\]]{1,32})\] ?)?",
    re.ASCII,
)


class Heard(NamedTuple):
    """A line of the kernel, `when` as it is written there, empty without a time."""

    said: kernel_lines.Said
    text: str
    when: str


def find(line: str) -> Heard | None:
    """What a line of a log says by kernel_lines.toml, behind the time and host that stand before it; else None."""
    before = _PREFIX.match(line)
    start = before.end() if before else 0
    said = kernel_lines.find(line[start : start + kernel_lines.LONGEST_LINE])
    if said is None or before is None:
        return None
    when = before["when"] or before["clock"] or ""
    return Heard(said, words.elided(line[start:], _TEXT_CHARACTERS), words.printable(when.strip()))


def ended(line: str) -> list[tuple[str, str]]:
    """Which troubles are over by a line, see `kernel_lines.ended`."""
    before = _PREFIX.match(line)
    return kernel_lines.ended(line[before.end() :] if before else line)


def judge(verdict: Verdict | None, heard: Sequence[Heard], ranks: Iterable[RankId]) -> Verdict:
    """The verdict, None where there is none, with what the kernel said; a pid that a rank has is told as that rank."""
    found = tuple(_evidence(heard, {str(rank.pid): rank for rank in ranks if rank.pid is not None}))
    if verdict is not None:
        return replace(verdict, evidence=(*verdict.evidence, *found))
    message = f"The kernel's log tells of {words.count(len(heard), 'trouble')}: {found[0].message}"
    return Verdict(kind="LogsOnly", message=message, evidence=found)


def _evidence(heard: Sequence[Heard], by_pid: dict[str, RankId]) -> Iterator[Evidence]:
    rows = kernel_lines.load()
    for one in heard[:_SHOWN]:
        row = rows[one.said.name]
        rank = by_pid.get(one.said.subject) if row.names in ("process", "task") else None
        when = f" at {one.when}" if one.when else ""
        whose = f" of {words.who([rank])}" if rank is not None else ""
        message = f"the kernel's log{when}{whose}: {one.text}: {row.meaning}; {row.remedy}"
        yield Evidence(kind="kernel_log", message=message, ranks=(rank,) if rank is not None else ())
    if len(heard) > _SHOWN:
        yield Evidence(
            kind="kernel_log", message=f"{words.count(len(heard) - _SHOWN, 'more line')} of the kernel's log"
        )
