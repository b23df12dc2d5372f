"""Known log lines of NCCL (nccl_messages.toml, which describes its columns): their meaning and remedy."""

from functools import cache
from typing import Literal, NamedTuple

from hangwatch import tables

LONGEST_LINE = 4096
About = Literal["self", "peer", "timeout", "job", "setup", "other"]


class Message(tables.LineRow, frozen=True, forbid_unknown_fields=True):
    """A row of the table: a pattern for lines, their meaning and remedy, and their source in NCCL."""

    about: About
    meaning: str
    remedy: str


class MatchedMessage(NamedTuple):
    """A line that matches a row: the name of the row, and the value of the last group ("" without a group)."""

    name: str
    value: str


@cache
def load() -> dict[str, Message]:
    """Return the rows by name; the first match counts. Raises MsgspecError for a row that does not fit."""
    return tables.load("hangwatch.tables", "nccl_messages.toml", dict[str, Message])


_ROWS = tables.LineRows(load, whole=False)


def find(line: str) -> MatchedMessage | None:
    """Match the first `LONGEST_LINE` characters of a line of NCCL's log. Return None if no row matches."""
    matched = _ROWS.first(line[:LONGEST_LINE])
    if matched is None:
        return None
    return MatchedMessage(matched[0], next((value for value in reversed(matched[1].groups()) if value), ""))
