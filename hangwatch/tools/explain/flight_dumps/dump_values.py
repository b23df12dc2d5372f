"""The values of a flight recorder dump. Each may be of any type. Pure."""

from typing import TypeVar

from hangwatch import words
from hangwatch.model.flight_records import EARLIEST_UNIX_NS, LATEST_UNIX_NS, MOST_NAME, MOST_SEQUENCE

T = TypeVar("T", bool, str, dict[object, object], list[object])
_LACKS = {bool: "neither true nor false", str: "not a text", dict: "not a map", list: "not a list"}


def read_as(kind: type[T], value: object, name: str) -> T:
    """Check and return a value of this type. Raises ValueError with `name`."""
    if not isinstance(value, kind):
        raise ValueError(f"has a value of {name} that is {_LACKS[kind]}")
    return value


def read_text(value: object, name: str) -> str:
    """Check and return a text, cut to the longest name. Raises ValueError with `name`."""
    return words.elided(read_as(str, value, name)[: 4 * MOST_NAME], MOST_NAME)


def read_integer(value: object, name: str, lowest: int = 0) -> int:
    """Check and return an integer, which is text in the pg_status of JSON dumps. Raises ValueError with `name`."""
    if isinstance(value, str) and len(value) <= 20 and value.removeprefix("-").isdecimal() and value.isascii():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value < MOST_SEQUENCE:
        raise ValueError(f"has a {name} that is not a number, or is out of its range")
    return value


def read_time(value: object, name: str) -> int:
    """Check and return a time in nanoseconds since 1970; 0 if there is none. Raises ValueError with `name`.

    Without a time, a dump contains None, or 0 in JSON.
    """
    if value in (None, 0):
        return 0
    if not isinstance(value, int) or not EARLIEST_UNIX_NS < value < LATEST_UNIX_NS:
        raise ValueError(f"has a {name} that is not a time")
    return value
