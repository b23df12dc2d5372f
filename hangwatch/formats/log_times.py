"""The times at the beginning of log lines: ISO 8601, glog, syslog and vLLM. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import NamedTuple

STAMP_WITHIN = 64
"""Number of characters at the beginning of a line in which a time is searched."""

_DATED = re.compile(
    r"(\d{4})[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\d*(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_LEVEL = r"(?:[IWEFD]|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) )"  # of glog, and of vLLM
_GLOG = re.compile(rf"^\[?{_LEVEL}(\d\d?)-?(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{{1,9}}))?", re.ASCII)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SYSLOG = re.compile(rf"^(?:[A-Z][a-z]{{2}} )?({'|'.join(_MONTHS)}) {{1,2}}(\d\d?) (\d\d):(\d\d):(\d\d)", re.ASCII)
_LEAP_YEAR = 2000


class Moment(NamedTuple):
    """A time in a log. `text` is the time as it is written.

    `seconds` can be compared only with times on the same `clock`. "unix": since 1970, UTC; "local": a wall clock of
    unknown zone; "yearless": a wall clock without a year.
    """

    clock: str
    seconds: float
    text: str


def common_clock(moments: Sequence[Moment | None]) -> str:
    """Return the clock that most of the moments use."""
    clocks = Counter(moment.clock for moment in moments if moment)
    return clocks.most_common(1)[0][0] if clocks else ""


def time_on(moment: Moment | None, clock: str) -> tuple[bool, float]:
    """Return a key that sorts by time. Moments without a time on this clock come last."""
    return (False, moment.seconds) if moment and moment.clock == clock else (True, 0.0)


def seconds_until(moment: Moment | None, later: Moment | None) -> float:
    """Return the seconds between two moments; 0 if one is unknown, or if they are on different clocks."""
    return later.seconds - moment.seconds if moment and later and moment.clock == later.clock else 0.0


def first_moment(moments: Iterable[Moment | None]) -> Moment | None:
    """Return the moment with the fewest seconds, whatever its clock; None if all are unknown."""
    return min(filter(None, moments), default=None, key=lambda moment: moment.seconds)


def earlier(moment: Moment, seconds: float) -> Moment:
    """Return the moment that was so many seconds before this one, as a time of day."""
    before = moment.seconds - seconds
    text = datetime.fromtimestamp(before % 86_400, timezone.utc).strftime("%H:%M:%S")
    return Moment(moment.clock, before, f"{text} UTC" if moment.clock == "unix" else text)


def read_moment(text: str) -> Moment | None:
    """Return the time at the beginning of a line (ISO 8601, glog, syslog, vLLM); None if there is no valid time."""
    for pattern, make in ((_DATED, _read_iso_time), (_GLOG, _read_glog_time), (_SYSLOG, _read_syslog_time)):
        if match := pattern.search(text, 0, STAMP_WITHIN):
            try:
                return make(match)
            except (ValueError, OverflowError):
                return None
    return None


def _read_iso_time(match: re.Match[str]) -> Moment:
    *parts, fraction, zone = match.groups()
    seconds = _count_seconds(*map(int, parts), fraction=fraction)
    if zone is None:
        return Moment("local", seconds, match.group(0))
    ahead = 0 if zone == "Z" else int(f"{zone[0]}1") * (int(zone[1:3]) * 60 + int(zone[-2:])) * 60
    return Moment("unix", seconds - ahead, match.group(0))


def _read_glog_time(match: re.Match[str]) -> Moment:
    *parts, fraction = match.groups()
    seconds = _count_seconds(_LEAP_YEAR, *map(int, parts), fraction=fraction)
    return Moment("yearless", seconds, match.string[match.start(1) : match.end()])


def _read_syslog_time(match: re.Match[str]) -> Moment:
    month, *parts = match.groups()
    seconds = _count_seconds(_LEAP_YEAR, _MONTHS.index(month) + 1, *map(int, parts), fraction=None)
    return Moment("yearless", seconds, match.group(0))


def _count_seconds(*parts: int, fraction: str | None) -> float:
    """Return the seconds since 1970 for year, month, day, hour, minute and second, as if these were UTC."""
    year, month, day, hour, minute, second = parts
    whole = datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc).timestamp()
    return whole + float(f"0.{fraction or 0}")


def remove_time(text: str, moment: Moment | None) -> str:
    """Return a text without the time at its beginning."""
    if moment is None:
        return text.strip()
    before, _, after = text.partition(moment.text)
    return f"{'' if re.fullmatch(rf'[^A-Za-z]*{_LEVEL}?', before) else before}{after}".strip(" \t[]|,:-")


def at_unix_seconds(timestamp: str | float | None) -> Moment | None:
    """Return the moment of so many seconds since 1970; None if this is no valid time."""
    try:
        seconds = float(timestamp) if timestamp is not None else None
        if seconds is None:
            return None
        text = datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return None
    return Moment("unix", seconds, text)
