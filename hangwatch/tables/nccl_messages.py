"""The table of what NCCL says (nccl_messages.toml): a line of a log -> what it means, and what to do.

It stands on the ground since whoever reads what a rank wrote needs it: `explain` and the self-test. The comments of the
table say what its columns are.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

from hangwatch import tables

LONGEST_LINE = 4096
About = Literal["self", "peer", "job", "setup"]


class Message(tables.LineRow, frozen=True, forbid_unknown_fields=True):
    """A row: which lines it is of, what they are about, what they mean, what to do, and where they come from."""

    about: About
    meaning: str
    remedy: str
    source: str


class Said(NamedTuple):
    """A line that a row is of: the name of the row, and what the group of its pattern holds, empty without one."""

    name: str
    value: str


@cache
def load() -> dict[str, Message]:
    """The rows by name, in the order in which they count. Raises MsgspecError where one is not of the form."""
    return tables.load("hangwatch.tables", "nccl_messages.toml", dict[str, Message])


@cache
def _rows() -> tables.LineRows:
    return tables.LineRows(load(), whole=False)


def find(line: str) -> Said | None:
    """What a line says by the first row that it fits, else None. Its first `LONGEST_LINE` characters count."""
    fitting = _rows().first(line[:LONGEST_LINE])
    if fitting is None:
        return None
    return Said(fitting[0], next((value for value in fitting[1].groups() if value), ""))
