"""Stacks: frames, threads, and those that explain a group beside its main thread."""

from __future__ import annotations

from hangwatch.model.value import Value


class Frame(Value, frozen=True):
    """One frame of a stack. `file` is the short path; `line` is None where it is not known."""

    function: str
    file: str
    line: int | None = None
    module: str | None = None
    locals: tuple[tuple[str, str], ...] = ()

    @property
    def place(self) -> tuple[str, str]:
        """Where it stands, to the function: that and the file."""
        return self.function, self.file

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{self.function} ({where})"


class Thread(Value, frozen=True):
    """One thread of a dump, frames innermost first. `name` is None where the source gives none.

    `installed_frames`: so many of the innermost frames lie in the standard library or in installed packages; None where
    the source does not tell. `pthread_id` is what pthread_self(3) gives in it, None where the source gives none.
    """

    name: str | None
    thread_id: str
    frames: tuple[Frame, ...]
    active: bool | None = None
    owns_gil: bool | None = None
    is_main: bool = False
    installed_frames: int | None = None
    pthread_id: int | None = None


class Stack(Value, frozen=True):
    """A named stack that explains a group beside its MainThread: another thread, or a worker process.

    Of a worker process `pid` and the letter of `state` are known, and `own`: the innermost frame of the user's own
    code in what it does, None where it does nothing (it waits for its next task).
    """

    name: str
    frames: tuple[Frame, ...]
    activity: str = "unknown"
    pid: int | None = None
    state: str | None = None
    own: Frame | None = None
