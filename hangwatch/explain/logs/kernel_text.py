"""Pure: the kernel's log as dmesg, journalctl -k and syslog print it -> evidence.

A log is the kernel's where all of its lines have that shape. Elsewhere such lines are the words of who writes there.
Both are evidence, and accuse nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.model import Evidence, RankId, Supplement
from hangwatch.tables import kernel_lines, secret_forms

MOST_KEPT = 64
_SHOWN = 8
_TEXT_CHARACTERS = 240
_PREFIX = re.compile(
    r"(?P<when>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.,+Z-]{8,24})? ?(?:[\w.-]{1,64} kernel: ?)?"
    r"(?:<\d{1,3}>)?(?:\[ ?(?P<clock>[^\[\]]{1,32})\] ?)?",
    re.ASCII,
)


_SHAPE = re.compile(
    r"(?:<\d{1,3}>)?\[ *\d{1,9}\.\d{1,9}\] |(?:<\d{1,3}>)?\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] "
    r"|(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.,+Z-]{8,24}) [\w.-]{1,64} kernel: "
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{6}[+-]|-- ",
    re.ASCII,
)


class Heard(NamedTuple):
    """A line of the kernel, `when` as it is written there, empty without a time.

    `writer` is in whose log it stands, where that is not the kernel's own.
    """

    said: kernel_lines.Said
    text: str
    when: str
    writer: str = ""


def has_shape(line: str) -> bool:
    """Whether dmesg or journalctl -k prints such a line, by what stands before its text."""
    return _SHAPE.match(line) is not None


def find(line: str) -> Heard | None:
    """What a line of a log says by kernel_lines.toml, behind the time and host that stand before it; else None."""
    before = _PREFIX.match(line)
    start = before.end() if before else 0
    said = kernel_lines.find(line[start : start + kernel_lines.LONGEST_LINE])
    if said is None or before is None:
        return None
    when = before["when"] or before["clock"] or ""
    return Heard(said, words.elided(secret_forms.mask(line[start:]), _TEXT_CHARACTERS), words.printable(when.strip()))


def ended(line: str) -> list[tuple[str, str]]:
    """Which troubles are over by a line, see `kernel_lines.ended`."""
    before = _PREFIX.match(line)
    return kernel_lines.ended(line[before.end() :] if before else line)


def supplement(heard: Sequence[Heard], ranks: Iterable[RankId]) -> Supplement:
    """Return what the kernel logged; a pid of one of `ranks` is shown as that rank."""
    evidence = tuple(_evidence(heard, {str(rank.pid): rank for rank in ranks if rank.pid is not None}))
    source = "Logs tell" if any(one.writer for one in heard) else "The kernel's log tells"
    headline = f"{source} of {words.count(len(heard), 'trouble')}: {evidence[0].message}"
    return Supplement(evidence=evidence, headline=headline)


def _evidence(heard: Sequence[Heard], by_pid: dict[str, RankId]) -> Iterator[Evidence]:
    rows = kernel_lines.load()
    for one in heard[:_SHOWN]:
        row = rows[one.said.name]
        is_own = not one.writer
        rank = by_pid.get(one.said.subject) if is_own and row.names in ("process", "task") else None
        when = f" at {one.when}" if one.when else ""
        whose = f" of {words.who([rank])}" if rank is not None else ""
        log = "the kernel's log" if is_own else f"the log of {one.writer}, which is not the kernel's"
        message = f"{log}{when}{whose}: {one.text}: {row.meaning}; {row.remedy}"
        yield Evidence(
            kind="kernel_log" if is_own else "log", message=message, ranks=(rank,) if rank is not None else ()
        )
    if len(heard) > _SHOWN:
        yield Evidence(
            kind="kernel_log", message=f"{words.count(len(heard) - _SHOWN, 'more line')} as of the kernel's log"
        )
