"""Data tables shipped with hangwatch: TOML files next to the modules that read them."""

import pkgutil
import re
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import TypeVar

from hangwatch.formats import decoding
from hangwatch.model import Value

T = TypeVar("T")
FORMS = {
    "{PCI}": r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-7])?",
    "{XID}": r"NVRM: Xid \((?:PCI:)?(?P<subject>[0-9A-Fa-f:.]{5,20})[^)]{0,60}\): (?P<code>\d{1,4})\b",
    "{SXID}": r"nvidia-nvswitch\d*: SXid \((?:PCI:)?(?P<subject>[0-9A-Fa-f:.]{5,20})[^)]{0,60}\): (?P<code>\d{1,6})\b",
}
"""Forms in patterns of tables: the PCI address of a device, and the heads of the lines of an XID and of an SXID.

The line of a MIG instance has `GPU-I:01 GPU-CI:02` after the address.
"""


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of a table, with `FORMS` in the place of their names."""
    for name, form in FORMS.items():
        pattern = pattern.replace(name, form)
    return re.compile(pattern)


class LineRow(Value, frozen=True, forbid_unknown_fields=True):
    """A row that matches log lines by a pattern.

    `holds` is a string that each of these lines contains, a fast test. `source` is the program that prints them.
    """

    holds: str
    pattern: str
    source: str


class LineRows:
    """The rows of a table by name, which `load_rows` returns. The first row that matches a line counts.

    With `whole`, a pattern must match from the start of the line. A pattern is compiled when a line first needs it.
    """

    def __init__(self, load_rows: Callable[[], Mapping[str, LineRow]], *, whole: bool) -> None:
        self._load_rows = load_rows
        self._compile = cache(compile_pattern)
        self._fits = re.Pattern.match if whole else re.Pattern.search

    @cached_property
    def _rows(self) -> tuple[tuple[str, str, str], ...]:
        return tuple((name, row.holds, row.pattern) for name, row in self._load_rows().items())

    def first(self, line: str) -> tuple[str, re.Match[str]] | None:
        """Return the name of the first row that matches a line, and the match; None if no row matches."""
        for name, holds, pattern in self._rows:
            if holds in line and (match := self._fits(self._compile(pattern), line)):
                return name, match
        return None


class Patterns(dict[str, re.Pattern[str]]):
    """The patterns of the table `name` of this package. A list of patterns is one pattern.

    The table is read, and each pattern compiled, when it is first used.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def rows(self) -> dict[str, str | tuple[str, ...]]:
        """The rows as they are in the table, by name."""
        return load(__name__, self._name, dict[str, str | tuple[str, ...]])

    def __missing__(self, key: str) -> re.Pattern[str]:
        row = self.rows[key]
        return self.setdefault(key, re.compile(row if isinstance(row, str) else "|".join(row)))


def load(package: str, name: str, kind: type[T]) -> T:
    """Return the table `name` of `package` as a value of type `kind`. Raises MsgspecError if a row does not fit."""
    raw = pkgutil.get_data(package, name)  # importlib.resources would import zipfile and tempfile at each start
    assert raw is not None, f"{package} is not loaded from files"
    return decoding.decode_toml(raw.decode(), kind)
