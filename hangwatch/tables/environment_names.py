"""The table of variables that an incident may keep (environment_names.toml). Its comments say what its columns are."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache

import msgspec

from hangwatch import tables
from hangwatch.model import Value


class Row(Value, frozen=True, forbid_unknown_fields=True):
    """Some names, why their values are kept, and whether they differ between ranks in health."""

    names: tuple[str, ...]
    why: str
    differs: bool = False


class Table(Value, frozen=True, forbid_unknown_fields=True):
    """The whole table."""

    never: tuple[str, ...]
    rows: tuple[Row, ...] = msgspec.field(name="allow")


TABLE = tables.load("hangwatch.tables", "environment_names.toml", Table)
_WILD = frozenset("*?[")


@lru_cache(maxsize=4096)
def row_of(name: str) -> Row | None:
    """The row that allows a variable, None where none does, or its name looks like a secret's in any case."""
    if any(fnmatchcase(name.upper(), pattern) for pattern in TABLE.never):
        return None
    return next((row for row in TABLE.rows if any(_fits(name, one) for one in row.names)), None)


def _fits(name: str, pattern: str) -> bool:
    """Most are names as they are: a pattern is compiled before it is first asked."""
    return name == pattern if _WILD.isdisjoint(pattern) else fnmatchcase(name, pattern)


class Allowed:
    """The names that may be kept, as a container."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and row_of(name) is not None


ALLOWED = Allowed()
