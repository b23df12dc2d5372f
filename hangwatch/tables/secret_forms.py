"""Masking of secrets in texts of jobs, by their form (secret_forms.toml, which describes its columns).

A password in a plain sentence has no known form and is not masked. Metrics, pages and the daemon's log may be read
by other users, so they never contain the text of an exception.
"""

import re
from collections.abc import Mapping
from functools import cache

from msgspec import structs

from hangwatch import tables
from hangwatch.model import Value

MASK = "***"


class Row(Value, frozen=True, forbid_unknown_fields=True):
    """A form of secrets. `holds`: a text must contain one of these lower-case words. `pattern`: its group is masked."""

    holds: tuple[str, ...]
    pattern: str


class Table(Value, frozen=True, forbid_unknown_fields=True):
    """The rows, and named parts of patterns. A row's pattern contains such a part by its name in braces."""

    fragments: dict[str, str]
    rows: dict[str, Row]


@cache
def load() -> dict[str, Row]:
    """Return the rows by name, in the order in which they are applied. Raises MsgspecError if a row does not fit."""
    table = tables.load("hangwatch.tables", "secret_forms.toml", Table)
    fragments: dict[str, str] = {}
    for name, pattern in table.fragments.items():
        fragments[name] = _expand(pattern, fragments)
    return {name: structs.replace(row, pattern=_expand(row.pattern, fragments)) for name, row in table.rows.items()}


def _expand(pattern: str, fragments: Mapping[str, str]) -> str:
    """Return the pattern with the named parts in place of their names in braces."""
    for name, fragment in fragments.items():
        pattern = pattern.replace(f"{{{name}}}", fragment)
    return pattern


def mask(text: str) -> str:
    """Replace each secret of a known form by `***`, in linear time.

    Mask a text before cutting it, because the beginning of a token may be too short to match.
    """
    lowered = text.lower()
    for row in load().values():
        if any(word in lowered for word in row.holds):
            text = re.sub(row.pattern, _masked, text, flags=re.IGNORECASE | re.MULTILINE)  # `re` keeps it compiled
    return text


def _masked(match: re.Match[str]) -> str:
    first, last = match.span("secret")
    if first < 0:
        return match[0]
    return f"{match.string[match.start() : first]}{MASK}{match.string[last : match.end()]}"
