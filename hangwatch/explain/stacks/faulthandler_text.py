"""Reader for the output of Python's `faulthandler`: `dump_traceback(_later)`, on a signal, on a fatal error. Pure.

The format is that of `_Py_DumpTracebackThreads` in CPython's Python/traceback.c. Threads come from the youngest to the
main one, frames innermost first. There is no pid, and before 3.14 no names of threads.
"""

import re

from hangwatch.explain.stacks.parsed_processes import (
    MOST_FRAMES,
    Interned,
    ParsedProcess,
    ParsedThread,
    Place,
    check_processes,
    check_threads,
    is_outermost,
    make_process,
)

_THREAD = re.compile(
    r"^(?:(?:Current thread|Thread) (0x[0-9a-fA-F]{1,16})(?: \[(.*)\])?|Stack) \(most recent call first\):$"
)
NO_NUMBER = "?"  # of a thread that was dumped alone
_FRAME = re.compile(r'^  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$')
_OTHER = re.compile(r"^  (?:<|\.\.\.$|Garbage-collecting$|Binary file )|^Current thread's C stack trace")
_FATAL = re.compile(r"^(?:Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!$|Fatal Python error: )")


def begins(line: str) -> bool:
    """True if a text of this tool begins with this line."""
    return (
        line.endswith(("(most recent call first):", ")!")) and (_THREAD.match(line) or _FATAL.match(line)) is not None
    )


class Reader:
    """A reader for one or more dumps that follow each other. After the end of a main thread the next dump begins."""

    def __init__(self, interned: Interned) -> None:
        self._interned = interned
        self._processes: list[ParsedProcess] = []
        self._threads: list[ParsedThread] = []
        self._thread_ids: set[str] = set()
        self._header: tuple[str, str | None] | None = None
        self._places: list[Place] = []

    def feed(self, line: str) -> bool:
        """Read a line. Return false if it is not part of a dump."""
        if found := _THREAD.match(line):
            self._close_thread()
            thread_id = found.group(1) or NO_NUMBER
            if thread_id in self._thread_ids:
                self._close_process()
            self._header = thread_id, found.group(2)
            return True
        if self._header is not None and (found := _FRAME.match(line)):
            number = None if found.group(2) == "???" else int(found.group(2))
            if len(self._places) < MOST_FRAMES:
                self._places.append(Place(found.group(3), found.group(1), number))
            return True
        return not line.strip() or _FATAL.match(line) is not None or _OTHER.match(line) is not None

    def end(self) -> list[ParsedProcess]:
        """Return the processes that were read, one for each dump."""
        self._close_thread()
        self._close_process()
        return self._processes

    def _close_thread(self) -> None:
        if self._header is None:
            return
        thread_id, name = self._header
        is_main = bool(self._places) and is_outermost(self._places[-1])
        self._thread_ids.add(thread_id)
        check_threads(len(self._threads))
        self._threads.append(ParsedThread(thread_id, self._places, name))
        self._header, self._places = None, []
        if is_main:
            self._close_process()

    def _close_process(self) -> None:
        """Close a process. Its last thread becomes the main thread.

        The stack alone may not show this: a stack of over 100 frames is cut at its outer end.
        """
        if any(thread.places for thread in self._threads):
            check_processes(len(self._processes))
            self._processes.append(make_process(None, self._threads, self._threads[-1], self._interned))
        self._threads, self._thread_ids = [], set()
