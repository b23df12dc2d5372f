"""What one dead rank left, as it was found."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NamedTuple

from hangwatch.model import KernelLine, RankId
from hangwatch.probes.process import crash_artifacts
from hangwatch.tables import kernel_lines

if TYPE_CHECKING:
    from hangwatch.explain.logs import rank_log

TEXT_CHARACTERS = 240
ABORTED = "SIGABRT"
FAULTS = frozenset({"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS", ABORTED})
"""What a program dies of by itself; others are sent, and gcore writes the core of a process that lives on."""


class Exit(NamedTuple):
    """How a rank ended: its exit code, negative for a signal, by the kernel or by what its launcher printed.

    `is_first`: its launcher tells it as the first failure. Of exit codes in one second that is any of them.
    """

    code: int
    by_kernel: bool
    is_first: bool = False

    @property
    def signal(self) -> str:
        """The name of the signal that ended it; empty where none did."""
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return ""

    @property
    def text(self) -> str:
        """For people: `SIGSEGV` or `exit code 1`, and where that stands."""
        where = "its exit status" if self.by_kernel else "its launcher's log"
        return f"{self.signal or f'exit code {self.code}'}, by {where}"


class Left(NamedTuple):
    """What one dead rank left: lines of the kernel's log, its failure by the error file, its core with the stack in it.

    `exit` is None where nothing tells how it ended. `refused` says what was there and was not read.
    """

    id: RankId
    gone_unix_seconds: float
    lines: tuple[KernelLine, ...] = ()
    failure: rank_log.Failure | None = None
    core: crash_artifacts.Core | None = None
    stack: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    exit: Exit | None = None

    @property
    def end(self) -> KernelLine | None:
        """The line of the kernel's log that tells of its own end."""
        rows = kernel_lines.load()
        return next((line for line in self.lines if rows[line.name].deadly and line.subject == str(self.id.pid)), None)
