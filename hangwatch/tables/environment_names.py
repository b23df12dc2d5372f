"""The environment variables that an incident may contain (environment_names.toml, which describes its columns)."""

from fnmatch import fnmatchcase
from functools import lru_cache

import msgspec

from hangwatch import tables
from hangwatch.model import Value


class Row(Value, frozen=True, forbid_unknown_fields=True):
    """Names of variables, and the reason to keep their values. `differs`: the values differ between healthy ranks."""

    names: tuple[str, ...]
    why: str
    differs: bool = False


class Table(Value, frozen=True, forbid_unknown_fields=True):
    """The whole table."""

    never: tuple[str, ...]
    rows: tuple[Row, ...] = msgspec.field(name="allow")


TABLE = tables.load("hangwatch.tables", "environment_names.toml", Table)
WILD = frozenset("*?[")


@lru_cache(maxsize=4096)
def find_row(name: str) -> Row | None:
    """Return the row that allows a variable to be kept; None without one, or if the name looks like a secret's."""
    if any(fnmatchcase(name.upper(), pattern) for pattern in TABLE.never):
        return None
    return next((row for row in TABLE.rows if any(_fits(name, pattern) for pattern in row.names)), None)


def _fits(name: str, pattern: str) -> bool:
    # Most entries are plain names. A comparison avoids compiling a pattern.
    return name == pattern if WILD.isdisjoint(pattern) else fnmatchcase(name, pattern)


class Allowed:
    """The set of allowed names, for use with `in`."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and find_row(name) is not None


ALLOWED = Allowed()
