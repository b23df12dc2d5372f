"""The tables that are shipped with hangwatch: TOML files beside the modules that read them."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping
from typing import TypeVar

from hangwatch.formats import decoding
from hangwatch.model import Value

T = TypeVar("T")


class LineRow(Value, frozen=True, forbid_unknown_fields=True):
    """A row about lines of a log: words that each of them `holds`, looked for first, and a pattern."""

    holds: str
    pattern: str


class LineRows:
    """Rows about lines by name; the first that fits counts. `whole` patterns fit from the beginning of a line."""

    def __init__(self, rows: Mapping[str, LineRow], *, whole: bool) -> None:
        self._rows = tuple((name, row.holds, re.compile(row.pattern)) for name, row in rows.items())
        self._fits = re.Pattern.match if whole else re.Pattern.search

    def first(self, line: str) -> tuple[str, re.Match[str]] | None:
        """The name of the row that a line is of, and how it fits; None without one."""
        for name, holds, pattern in self._rows:
            if holds in line and (found := self._fits(pattern, line)):
                return name, found
        return None


def load(package: str, name: str, kind: type[T]) -> T:
    """The table `name` that lies in `package`, as values of `kind`. Raises MsgspecError where a row is not of it."""
    raw = pkgutil.get_data(package, name)  # importlib.resources brings zipfile and tempfile into each start
    assert raw is not None, f"{package} is not loaded from files"
    return decoding.toml(raw.decode(), kind)
