"""Stacks: frames, threads, and stacks other than the main thread's that explain a group."""

from hangwatch.model.value import Value


class Frame(Value, frozen=True, cache_hash=True):  # ranks share frames, so a frame is hashed many times
    """One frame of a stack. `file` is the short path; `line` is None if it is not known."""

    function: str
    file: str
    line: int | None = None
    module: str | None = None
    locals: tuple[tuple[str, str], ...] = ()

    @property
    def place(self) -> tuple[str, str]:
        """Function and file, without the line."""
        return self.function, self.file

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{self.function} ({where})"


class Thread(Value, frozen=True):
    """One thread of a dump, frames innermost first. `name` is None if the source has no names.

    `installed_frames` is the number of innermost frames in the standard library or in installed packages; None if
    the source does not show it. `pthread_id` is the thread's pthread_self(3), None if the source does not show it.
    `trains`: by the flight recorder, no other thread of its process has enqueued a collective.
    """

    name: str | None
    thread_id: str
    frames: tuple[Frame, ...]
    active: bool | None = None
    owns_gil: bool | None = None
    is_main: bool = False
    installed_frames: int | None = None
    pthread_id: int | None = None
    trains: bool = False


class Stack(Value, frozen=True):
    """A named stack that explains a group in addition to its MainThread: another thread, or a worker process.

    A worker process has a `pid` and the letter of its `state`. `user_frame` is the innermost frame of the user's code
    in this stack. It is None if the thread or process is idle and waits for its next task, and for threads not awaited.
    `is_awaited`: by the kernel, the call of the main thread waits for this worker process.
    """

    name: str
    frames: tuple[Frame, ...]
    activity: str = "unknown"
    pid: int | None = None
    state: str | None = None
    user_frame: Frame | None = None
    is_awaited: bool = False
