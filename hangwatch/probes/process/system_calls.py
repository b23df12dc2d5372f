"""The system calls in which a process may wait: their names, their kinds and the meaning of their arguments.

The rows are in system_calls.toml. Numbers differ between architectures; only x86_64 and aarch64 are supported.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from hangwatch import tables
from hangwatch.probes import pseudo_files

Kind: TypeAlias = Literal["receives", "awaits_child", "writes", "locks", "sleeps", "other"]
About: TypeAlias = Literal["descriptor", "polled", "selected", "watched", "child", "path", "path_at", ""]


class Row(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A system call. The columns are explained at the top of the table."""

    x86_64: int | None = None
    aarch64: int | None = None
    kind: Kind = "other"
    on: About = ""
    timeout: Literal["timespec", "timeval", "milliseconds", ""] = ""
    timeout_at: int = 0
    says: str = ""


@cache
def calls_by_name() -> dict[str, Row]:
    """Return the rows of `system_calls.toml`, keyed by system call name."""
    return tables.load("hangwatch.tables", "system_calls.toml", dict[str, Row])


def read_fields(pid: int, proc_root: Path, thread: int | None = None) -> list[str]:
    """Return the fields of proc_pid_syscall(5) for a thread: the number of the call, its arguments in hex, and others.

    `thread` None means the main thread. Empty if the thread is not in a system call, or if the file may not be read.
    """
    fields = pseudo_files.read_or_empty(f"{proc_root}/{pid}/task/{thread or pid}/syscall").split()
    return fields if len(fields) > 6 and fields[0].isdecimal() else []


@cache
def names_by_number(machine: str = platform.machine()) -> dict[int, str]:
    """Return the names of an architecture's calls by number; empty for an architecture that is not in the table."""
    numbers = {
        name: {"x86_64": row.x86_64, "aarch64": row.aarch64}.get(machine) for name, row in calls_by_name().items()
    }
    return {number: name for name, number in numbers.items() if number is not None}
