"""Log lines by which a launcher, a scheduler or a library reports that a process ended (launcher_lines.toml)."""

from typing import NamedTuple

from hangwatch import tables
from hangwatch.formats import decoding
from hangwatch.model import RankId


class Ended(NamedTuple):
    """The process that ended, `RankId()` if the line does not tell it, and its exit code, "" if unknown.

    If `has_traceback` is true, its exception follows.
    """

    rank: RankId
    exit_code: str
    has_traceback: bool = False


_ROWS = tables.LineRows(
    lambda: tables.load("hangwatch.tables", "launcher_lines.toml", dict[str, tables.LineRow]), whole=False
)


def find(line: str) -> Ended | None:
    """Return the process that ended by a line of a log; None if the line reports no end."""
    matched = _ROWS.first(line.strip())
    if matched is None:
        return None
    parts = {name: value for name, value in matched[1].groupdict().items() if value is not None}
    code, follows = parts.pop("code", ""), parts.pop("traceback", None)
    return Ended(decoding.convert(parts, RankId, strict=False), code, has_traceback=follows is not None)
