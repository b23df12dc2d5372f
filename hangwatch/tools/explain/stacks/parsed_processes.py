"""The result of all readers of stacks: processes with their threads. Equal frames are stored once. Pure."""

import posixpath
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from hangwatch.formats import pyspy_json
from hangwatch.limits import MOST_DUMPED_FRAMES
from hangwatch.model import Fault, Frame, Thread

"""Number of frames that are kept of one thread."""

MOST_FRAMES_OF_TOOLS = 1 << 14
"""Most frames that py-spy prints of one thread: 4,096 of Python, and the C frames between them (`--native`)."""

MOST_THREADS = 1 << 14
"""Number of threads that are read of one process."""

MOST_PROCESSES = 1 << 14
"""Number of processes that are read of one stream: of a text, or of one prefix in it."""

MOST_DIFFERENT_FRAMES = 1 << 16
"""Number of different frames that are read of one text. Ranks of one program show the same frames."""


class HugeStackError(ValueError):
    """The error for a text with more processes, threads or frames than any job has. Its message contains the limit."""


def check_threads(threads: int) -> None:
    """Raise HugeStackError if a process already has the maximum number of threads."""
    if threads >= MOST_THREADS:
        raise HugeStackError(f"a process has more than {MOST_THREADS:,} threads: this is not a stack dump")


def check_processes(processes: int) -> None:
    """Raise HugeStackError if a stream already has the maximum number of processes."""
    if processes >= MOST_PROCESSES:
        raise HugeStackError(
            f"more than {MOST_PROCESSES:,} processes without distinct prefixes: put a prefix such as [host:rank] "
            "before each line, or give each process its own file"
        )


class ParsedProcess(NamedTuple):
    """A process in a text: its threads, or a fault instead. `pid` is None if the text does not contain it."""

    pid: int | None
    command: str
    parent_pid: int | None
    threads: tuple[Thread, ...]
    fault: Fault | None


class Place(NamedTuple):
    """A frame of a tool that prints absolute paths. `line` is None if unknown."""

    function: str
    file: str
    line: int | None
    is_compiled: bool = False


class Interned:
    """A store that keeps equal frames and stacks once, because thousands of ranks share them.

    `lines` contains the frame of each line of text, by the line with its line end.
    """

    def __init__(self) -> None:
        self.lines: dict[str, Frame] = {}
        self._frames: dict[tuple[str, str], Frame] = {}
        self._stacks: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
        self._most_frames = MOST_DIFFERENT_FRAMES

    def begin_text(self) -> None:
        """Begin to count the different frames of the next text."""
        self._most_frames = len(self._frames) + MOST_DIFFERENT_FRAMES

    def frame(self, function: str, where: str) -> Frame:
        """Return the frame `function (file:line)`. `where` is the text in parentheses.

        Raises HugeStackError if the text has too many different frames.
        """
        frame = self._frames.get((function, where))
        if frame is None:
            if len(self._frames) >= self._most_frames:
                raise HugeStackError(
                    f"more than {MOST_DIFFERENT_FRAMES:,} different frames: too many for one job; "
                    "if they are of one job, give each process its own file"
                )
            file, colon, line = where.rpartition(":")
            number = int(line) if colon and line.isascii() and line.isdigit() and len(line) < 10 else None
            name = where if number is None else file
            frame = Frame(function=function, file=name or "?", line=number or None)
            self._frames[function, where] = frame
        return frame

    def stack(self, frames: list[Frame]) -> tuple[Frame, ...]:
        """Return the stack with these frames as a tuple. Equal stacks are the same object."""
        stack = tuple(frames)
        return self._stacks.setdefault(stack, stack)


def mark_main_thread(threads: list[Thread], pid: int | None) -> tuple[Thread, ...]:
    """Return the threads with the main one marked.

    It is found by its name, else by its id, which is the pid, else by the module at its outer end.
    """
    if any(thread.is_main for thread in threads):
        return tuple(threads)
    unnamed = [thread for thread in threads if thread.name is None]
    chosen = next((thread for thread in unnamed if thread.thread_id == str(pid)), None) or next(
        (thread for thread in unnamed if thread.frames and thread.frames[-1].function == "<module>"), None
    )
    return tuple(structs.replace(thread, is_main=True) if thread is chosen else thread for thread in threads)


class ParsedThread(NamedTuple):
    """A thread of a tool that prints absolute paths. The innermost frame comes first."""

    thread_id: str
    places: list[Place]
    name: str | None = None
    owns_gil: bool | None = None


def _make_process(
    pid: int | None, threads: Sequence[ParsedThread], main: ParsedThread | None, interned: Interned
) -> ParsedProcess:
    """Return a process with these threads. Its paths are shortened in the same way as py-spy shortens them.

    A path begins at its package; a path of the program begins at the directory of the program.
    """
    program = next(
        (
            place.file
            for place in (reversed(main.places) if main else ())
            if place.function == "<module>" and place.file.startswith("/") and not pyspy_json.is_installed(place.file)
        ),
        "",
    )
    folder = posixpath.dirname(program).rstrip("/")
    stacks = tuple(_thread(thread, folder, thread is main, interned) for thread in threads)
    return ParsedProcess(pid, "", None, stacks, None)


def _thread(thread: ParsedThread, folder: str, is_main: bool, interned: Interned) -> Thread:
    frames = []
    for place in thread.places:
        file = pyspy_json.shorten_path(place.file, folder)
        frames.append(interned.frame(place.function, file if place.line is None else f"{file}:{place.line}"))
    of_program = (
        number
        for number, place in enumerate(thread.places)
        if not (place.is_compiled or pyspy_json.is_installed(place.file))
    )
    return Thread(
        name=thread.name,
        thread_id=thread.thread_id,
        frames=interned.stack(frames),
        owns_gil=thread.owns_gil,
        is_main=is_main,
        installed_frames=next(of_program, len(frames)),
    )


def is_outermost(place: Place) -> bool:
    """True if this is the outermost frame of a main thread. Other threads end in `_bootstrap`."""
    return place.function in {"<module>", "_run_module_as_main"}


class StackText(ABC):
    """A reader of one kind of text, from the first line of the text to the first line after it.

    A subclass reads the lines. `_keep` is called with each thread that has ended.
    """

    is_outermost_first = False

    def __init__(self, interned: Interned) -> None:
        self._interned = interned
        self._processes: list[ParsedProcess] = []
        self._pid: int | None = None
        self._threads: list[ParsedThread] = []
        self._thread_ids: set[str] = set()
        self._main: ParsedThread | None = None
        self._thread: ParsedThread | None = None

    @abstractmethod
    def feed(self, line: str) -> bool:
        """Read a line. Return false if it is not part of this text, which has then ended."""

    def end(self) -> list[ParsedProcess]:
        """Return the processes that were read."""
        self._close_process()
        return self._processes

    def _begin(self, thread: ParsedThread) -> None:
        """Begin a thread. It is of the next process if the open process has a thread with its id."""
        self._close_thread()
        if thread.thread_id in self._thread_ids:
            self._close_process()
        self._thread = thread

    def _add(self, place: Place) -> None:
        if self._thread is not None and len(self._thread.places) < MOST_DUMPED_FRAMES:
            self._thread.places.append(place)

    def _keep(self, thread: ParsedThread) -> None:
        check_threads(len(self._threads))
        self._threads.append(thread)
        self._thread_ids.add(thread.thread_id)

    def _close_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._keep(thread._replace(places=thread.places[::-1]) if self.is_outermost_first else thread)

    def _close_process(self) -> None:
        self._close_thread()
        if any(thread.places for thread in self._threads):
            check_processes(len(self._processes))
            self._processes.append(_make_process(self._pid, self._threads, self._main, self._interned))
        self._pid, self._threads, self._thread_ids, self._main = None, [], set(), None
