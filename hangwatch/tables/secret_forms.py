"""The table of secrets in texts of jobs (secret_forms.toml): a text -> the same without what a row takes for a secret.

It stands on the ground since whoever keeps or shows such a text needs it. The comments of the table say what its
columns are. It knows forms, not secrets: a password in a plain sentence stays. So where people read that may not read
the job's files (metrics, pages, the daemon's log), the text of an exception does not stand at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from msgspec import structs

from hangwatch import tables
from hangwatch.model import Value

MASK = "***"


class Row(Value, frozen=True, forbid_unknown_fields=True):
    """A form: lower-case words, of which a text must hold one, and a pattern whose group `secret` is replaced."""

    holds: tuple[str, ...]
    pattern: str


class Table(Value, frozen=True, forbid_unknown_fields=True):
    """Parts of patterns by the name that stands for them in braces, and the rows."""

    fragments: dict[str, str]
    rows: dict[str, Row]


@cache
def load() -> dict[str, Row]:
    """The rows by name, in the order in which they are applied. Raises MsgspecError where one is not of the form."""
    table = tables.load("hangwatch.tables", "secret_forms.toml", Table)
    fragments: dict[str, str] = {}
    for name, pattern in table.fragments.items():
        fragments[name] = _whole(pattern, fragments)
    return {name: structs.replace(row, pattern=_whole(row.pattern, fragments)) for name, row in table.rows.items()}


def _whole(pattern: str, fragments: Mapping[str, str]) -> str:
    """The pattern with the fragments that it names."""
    for name, fragment in fragments.items():
        pattern = pattern.replace(f"{{{name}}}", fragment)
    return pattern


@cache
def _rows() -> tuple[tuple[tuple[str, ...], re.Pattern[str]], ...]:
    flags = re.IGNORECASE | re.MULTILINE
    return tuple((row.holds, re.compile(row.pattern, flags)) for row in load().values())


def mask(text: str) -> str:
    """The text with `***` for each secret of a known form, in time that grows with its length and not faster.

    Mask a text before it is cut: the beginning of a token can be too short to be known as one.
    """
    lowered = text.lower()
    for holds, pattern in _rows():
        if any(word in lowered for word in holds):
            text = pattern.sub(_masked, text)
    return text


def _masked(found: re.Match[str]) -> str:
    first, last = found.span("secret")
    if first < 0:
        return found[0]
    return f"{found.string[found.start() : first]}{MASK}{found.string[last : found.end()]}"
