"""Reader for the output of `python -m profiling.sampling dump PID` of CPython 3.15. Pure.

The format is that of CPython's Lib/profiling/sampling/dump.py. Frames come outermost first, source lines below them.
Only the first header of a process has its pid. With --async-aware each section is a task instead of a thread.
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
    make_process,
)

_SECTION = re.compile(
    r"^Stack dump(?: for PID (\d{1,10}))?(?:, thread (\d{1,20}))? \((?:([^()]*); )?most recent call last\):$"
)
_FRAME = re.compile(r'^  File "(.*)"(?:, line (\d{1,9}))?, in (.*?)(?:  opcode=\S+)?$')
_NO_FRAMES = "No Python frames"


def begins(line: str) -> bool:
    """True if a text of this tool begins with this line."""
    return line.startswith("Stack dump") and _SECTION.match(line) is not None


class Reader:
    """A reader for one or more processes that follow each other."""

    def __init__(self, interned: Interned) -> None:
        self._interned = interned
        self._processes: list[ParsedProcess] = []
        self._threads: list[ParsedThread] = []
        self._pid: int | None = None
        self._section: tuple[str, list[str]] | None = None
        self._places: list[Place] = []
        self._main: ParsedThread | None = None

    def feed(self, line: str) -> bool:
        """Read a line. Return false if it is not part of a dump."""
        if section := _SECTION.match(line):
            self._close_thread()
            if section.group(1):
                self._close_process()
                self._pid = int(section.group(1))
            self._section = section.group(2) or "", re.split("[,;] ", section.group(3) or "")
            return True
        if (frame := _FRAME.match(line)) and len(self._places) < MOST_FRAMES:
            file, number, function = frame.groups()
            self._places.append(Place(function, file, int(number) if number else None))
        return not line.strip() or line.startswith("  ") or line == _NO_FRAMES

    def end(self) -> list[ParsedProcess]:
        """Return the processes that were read."""
        self._close_thread()
        self._close_process()
        return self._processes

    def _close_thread(self) -> None:
        if self._section is None:
            return
        thread_id, labels = self._section
        check_threads(len(self._threads))
        task = next((label for label in labels if label.startswith("task ")), None)
        places, gil = self._places[::-1], None if task else "has GIL" in labels
        self._threads.append(ParsedThread(thread_id, places, task, gil))
        if "main thread" in labels:
            self._main = self._threads[-1]
        self._section, self._places = None, []

    def _close_process(self) -> None:
        """Close a process. Without a header of the main thread, its first task or thread counts as that."""
        threads = [thread for thread in self._threads if thread.places]
        if threads:
            check_processes(len(self._processes))
            main = self._main if self._main in threads else threads[0]
            self._processes.append(make_process(self._pid, threads, main, self._interned))
        self._threads, self._pid, self._main = [], None, None
