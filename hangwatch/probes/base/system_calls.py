"""The system calls in which a process may wait: their names, their kinds and the meaning of their arguments.

The rows are in system_calls.toml. Numbers differ between architectures; only x86_64 and aarch64 are supported.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from hangwatch import tables
from hangwatch.probes.base import pseudo_files

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


_UNKNOWN = Row()
_RESTARTED = {"poll_schedule": "poll", "futex_": "futex", "hrtimer_nanosleep": "clock_nanosleep"}
"""Calls that go on as restart_syscall(2) after a stop, by the start of the kernel function in which they wait."""


@cache
def calls_by_name() -> dict[str, Row]:
    """Return the rows of `system_calls.toml`, keyed by system call name."""
    return tables.load("hangwatch.tables", "system_calls.toml", dict[str, Row])


class Call(NamedTuple):
    """The system call that a thread is in, see proc_pid_syscall(5).

    `name` is empty and `row` has no meaning for a call that is not in the table. `arguments` are its six arguments, the
    stack pointer and the program counter.
    """

    number: int
    name: str
    row: Row
    arguments: tuple[int, ...]


def read(pid: int, proc_root: Path, thread: int | None = None) -> Call | None:
    """Return the call of the main thread (or `thread`); None if it is in none, or if the file may not be read.

    A call that was stopped, as by a debugger, has its name and arguments, but the number of restart_syscall(2).
    """
    folder = f"{proc_root}/{pid}/task/{thread or pid}"
    call = parse(pseudo_files.read_or_empty(f"{folder}/syscall"))
    if call is None or call.name != "restart_syscall":
        return call
    wchan = pseudo_files.read_or_empty(f"{folder}/wchan")
    name = next((name for start, name in _RESTARTED.items() if wchan.startswith(start)), call.name)
    return call._replace(name=name, row=calls_by_name()[name])


def parse(text: str) -> Call | None:
    """Parse the text of /proc/PID/syscall; None for a thread that is not in a system call."""
    fields = text.split()
    if len(fields) <= 6 or not fields[0].isdecimal():
        return None
    name = names_by_number().get(int(fields[0]), "")
    arguments = tuple(int(field, 16) for field in fields[1:])
    return Call(int(fields[0]), name, calls_by_name().get(name, _UNKNOWN), arguments)


@cache
def names_by_number(machine: str = platform.machine()) -> dict[int, str]:
    """Return the names of an architecture's calls by number; empty for an architecture that is not in the table."""
    numbers = {
        name: {"x86_64": row.x86_64, "aarch64": row.aarch64}.get(machine) for name, row in calls_by_name().items()
    }
    return {number: name for name, number in numbers.items() if number is not None}
