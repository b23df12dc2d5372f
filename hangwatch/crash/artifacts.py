"""The crash artifacts of one dead rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hangwatch.model import KernelLine, RankId
from hangwatch.probes.base import child
from hangwatch.probes.process import crash_artifacts
from hangwatch.tables import kernel_lines

if TYPE_CHECKING:
    from hangwatch.logs import failures

TEXT_CHARACTERS = 240
ABORTED = "SIGABRT"
FAULTS = frozenset({"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS", ABORTED})
"""Signals that a program raises by its own fault.

A process sends the other signals. For example, gcore writes the core of a process that continues to run.
"""


class Exit(NamedTuple):
    """The exit code of a rank, from the kernel or from the log of its launcher. It is negative for a signal.

    `is_first` is true if the launcher reports this failure as the first. If several ranks fail within one second, it
    may be any of them.
    """

    code: int
    by_kernel: bool
    is_first: bool = False

    @property
    def signal(self) -> str:
        """The name of the signal that ended the rank; "" if no signal ended it."""
        return child.signal_name(-self.code)

    @property
    def text(self) -> str:
        """The signal or exit code, with its source: `SIGSEGV, by its exit status`."""
        source = "its exit status" if self.by_kernel else "its launcher's log"
        return f"{self.signal or f'exit code {self.code}'}, by {source}"


class CrashArtifacts(NamedTuple):
    """The crash artifacts of a rank: lines of the kernel log, the failure in its error file, and its core.

    `gone_unix_seconds` is the time at which hangwatch noticed its end. `exit` is None if the exit code is unknown.
    `refused` lists artifacts that exist but were not read, each with the reason.
    """

    id: RankId
    gone_unix_seconds: float
    lines: tuple[KernelLine, ...] = ()
    failure: failures.Failure | None = None
    core: crash_artifacts.Core | None = None
    refused: tuple[str, ...] = ()
    exit: Exit | None = None

    @property
    def end(self) -> KernelLine | None:
        """The line of the kernel log that reports the death of this rank; None if there is none."""
        rows = kernel_lines.load()
        return next((line for line in self.lines if rows[line.name].deadly and line.subject == str(self.id.pid)), None)
