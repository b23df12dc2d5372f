"""Base class of all values, and `Fault`, returned instead of a value that could not be read."""

from collections.abc import Hashable, Iterable
from typing import Literal, TypeVar

import msgspec

ValueT = TypeVar("ValueT", bound="Value")
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Value(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base class of all values: immutable, compared by content, built by keyword.

    The garbage collector does not track values: made of values only, none can be in a cycle. This takes a quarter off
    the grouping of 16,384 ranks. A class with a function or an event in a field sets `gc=True`.
    """

    @classmethod
    def copy_from(cls: type[ValueT], *sources: object, **others: object) -> ValueT:
        """Return a value of this class: each field is one of `others`, else that of the first source that has it."""
        fields: dict[str, object] = {}
        for source in reversed(sources):
            fields |= {name: getattr(source, name) for name in cls.__struct_fields__ if hasattr(source, name)}
        return cls(**(fields | others))


class Fault(Value, frozen=True):
    """Something that should have responded and did not.

    `subject` is the thing that was read ("gpu 3", "pid 4711"). `reason` is a CamelCase word for machines
    ("GpuIsLost"), `detail` the original error text. `remedy` is what to type or do, empty if there is nothing to
    do.

    `about` is "target" if the fault is evidence about `subject`, and "tool" if hangwatch itself may be the cause.
    The adapter that makes the fault decides. The default is "tool", which is not evidence against a rank.
    """

    subject: str
    reason: str
    detail: str
    remedy: str = ""
    about: Literal["target", "tool"] = "tool"


def median(values: Iterable[float]) -> float:
    """Return the middle value, or the mean of the two middle ones. `statistics` takes 2 ms to import."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def sum_all(values: Iterable[float | None]) -> float | None:
    """Return the sum; None without values, or if one is unknown."""
    known = list(values)
    return sum(value for value in known if value is not None) if known and None not in known else None


def list_by_key(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Return the values of each key, in the order of `pairs`, which are (key, value)."""
    listed: dict[K, list[T]] = {}
    for key, value in pairs:
        listed.setdefault(key, []).append(value)
    return listed
