"""Known lines of the kernel log (kernel_lines.toml): their subject, meaning and remedy.

`probes.node.kmsg`, `verdict` and `explain` use the table. The table describes its columns.
"""

from functools import cache
from typing import Literal

from hangwatch import tables
from hangwatch.model import Value
from hangwatch.tables import xids

LONGEST_LINE = 1024
Names = Literal["process", "task", "nfs", "lustre", "ceph", "gpu", "switch", "device"]


class Row(tables.LineRow, frozen=True, forbid_unknown_fields=True):
    """A row of the table: a pattern for lines, their subject, meaning and remedy, and their source in the kernel."""

    names: Names
    meaning: str
    remedy: str
    over: str = ""
    deadly: bool = False
    severity: Literal["", "critical", "warning"] = ""


class MatchedLine(Value, frozen=True):
    """A line that matches a row: the name of the row, and the subject of the line.

    `where` is a library, `code` the number of an XID or SXID, and `comm` the name of a process, if the line has them.
    """

    name: str
    subject: str
    where: str
    code: int = 0
    comm: str = ""


@cache
def load() -> dict[str, Row]:
    """Return the rows by name; the first match counts. Raises MsgspecError for a row that does not fit."""
    return tables.load("hangwatch.tables", "kernel_lines.toml", dict[str, Row])


_ROWS = tables.LineRows(load, whole=True)


@cache
def literals() -> tuple[str, ...]:
    """Return strings; every line that `find` or `find_ended` matches contains one of them."""
    return (*(row.holds for row in load().values()), *(before for _, before, _ in _over()))


def find(line: str) -> MatchedLine | None:
    """Match a line of the kernel log, given without its time. Return None if no row matches."""
    matched = _ROWS.first(line[:LONGEST_LINE])
    if matched is None:
        return None
    groups = {name: text for name, text in matched[1].groupdict().items() if text}
    subject, where, code, comm = map(groups.get, ("subject", "where", "code", "comm"))
    return MatchedLine(matched[0], subject or "", where or "", int(code or 0), comm or "")


def describe(name: str, line: str) -> str:
    """Return a line that matches the row `name`, with its meaning and remedy."""
    row, xid = load()[name], xids.read_code(line)
    meaning, remedy = row.meaning, row.remedy
    if xid is not None:
        found = xids.find_meaning(xid)
        meaning, remedy = found.meaning, found.action
    return "; ".join(filter(None, (f"{line}: {meaning}", remedy)))


@cache
def _over() -> tuple[tuple[str, str, str], ...]:
    return tuple((name, *row.over.partition("{}")[::2]) for name, row in load().items() if row.over)


def find_ended(line: str) -> list[tuple[str, str]]:
    """Return (row name, subject) for each problem that this line reports as cleared."""
    cleared = []
    for name, before, after in _over():
        if line.startswith(before):
            subject, separator, _ = line[len(before) : LONGEST_LINE].partition(after)
            if separator:
                cleared.append((name, subject))
    return cleared
