"""The system calls that a process may wait in: name, kind and the meaning of their arguments.

The rows are system_calls.toml. Numbers differ between architectures; only x86_64 and aarch64 are supported.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Literal, TypeAlias

import msgspec

from hangwatch import tables

Kind: TypeAlias = Literal["receives", "awaits_child", "writes", "locks", "sleeps", "other"]
About: TypeAlias = Literal["descriptor", "polled", "selected", "watched", "child", "path", "path_at", ""]


class Row(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A system call; the columns are explained at the top of the table."""

    x86_64: int | None = None
    aarch64: int | None = None
    kind: Kind = "other"
    on: About = ""
    says: str = ""


@cache
def rows() -> dict[str, Row]:
    """Return the table, by the name of the call."""
    return tables.load("hangwatch.tables", "system_calls.toml", dict[str, Row])


@cache
def names(machine: str = platform.machine()) -> dict[int, str]:
    """Return the names of an architecture's calls by number; empty for an architecture that is not in the table."""
    numbers = {name: {"x86_64": row.x86_64, "aarch64": row.aarch64}.get(machine) for name, row in rows().items()}
    return {number: name for name, number in numbers.items() if number is not None}
