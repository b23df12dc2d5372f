"""The table of what the kernel's log says (kernel_lines.toml): a line -> what it names, what it means, and what to do.

It stands on the ground since whoever reads such lines needs it: `probes.kmsg`, the verdict, and `explain`. The comments
of the table say what its columns are.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

from hangwatch import tables

LONGEST_LINE = 1024
Names = Literal["process", "task", "nfs", "lustre", "ceph", "device"]


class Row(tables.LineRow, frozen=True, forbid_unknown_fields=True):
    """A row: which lines it is of, what they name, what they mean, what to do, and where they come from."""

    names: Names
    meaning: str
    remedy: str
    source: str
    over: str = ""
    deadly: bool = False


class Said(NamedTuple):
    """A line that a row is of: the name of the row, what the line names, and the library in which it happened."""

    name: str
    subject: str
    where: str


@cache
def load() -> dict[str, Row]:
    """The rows by name, in the order in which they count. Raises MsgspecError where one is not of the form."""
    return tables.load("hangwatch.tables", "kernel_lines.toml", dict[str, Row])


@cache
def _rows() -> tables.LineRows:
    return tables.LineRows(load(), whole=True)


def find(line: str) -> Said | None:
    """What a line of the kernel's log, without its time, says by the first row that it fits, else None."""
    fitting = _rows().first(line[:LONGEST_LINE])
    if fitting is None:
        return None
    groups = fitting[1].groupdict()
    return Said(fitting[0], groups.get("subject") or "", groups.get("where") or "")


@cache
def _over() -> tuple[tuple[str, str, str], ...]:
    rows = ((name, *row.over.partition("{}")[::2]) for name, row in load().items() if row.over)
    return tuple(rows)


def ended(line: str) -> list[tuple[str, str]]:
    """Which troubles are over by this line, as the names of their rows and their subjects."""
    found = []
    for name, before, after in _over():
        if line.startswith(before):
            subject, is_it, _ = line[len(before) : LONGEST_LINE].partition(after)
            if is_it:
                found.append((name, subject))
    return found
