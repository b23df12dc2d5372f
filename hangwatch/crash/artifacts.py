"""The crash artifacts of one dead rank."""

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
"""Signals of a program's own fault. Other signals are sent, and gcore writes the core of a process that stays alive."""


class Exit(NamedTuple):
    """The exit code of a rank, negative for a signal, from the kernel or from the log of its launcher.

    `is_first`: the launcher reports it as the first failure, which may be any of the failures within one second.
    """

    code: int
    by_kernel: bool
    is_first: bool = False

    @property
    def signal(self) -> str:
        """The name of the signal that ended the rank, or an empty string."""
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return ""

    @property
    def text(self) -> str:
        """The signal or exit code with its source, such as `SIGSEGV, by its exit status`."""
        source = "its exit status" if self.by_kernel else "its launcher's log"
        return f"{self.signal or f'exit code {self.code}'}, by {source}"


class CrashArtifacts(NamedTuple):
    """The crash artifacts of a rank: lines of the kernel log, the failure in its error file, its core and stack.

    `exit` is set if the exit code is known. `refused` lists artifacts that exist but were not read.
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
        """The line of the kernel log that reports the death of this rank."""
        rows = kernel_lines.load()
        return next((line for line in self.lines if rows[line.name].deadly and line.subject == str(self.id.pid)), None)
