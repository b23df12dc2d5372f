"""Reader for the output of `python -m profiling.sampling dump PID` of CPython 3.15. Pure.

The format is that of CPython's Lib/profiling/sampling/dump.py. Frames come outermost first, source lines below them.
Only the first header of a process has its pid. With --async-aware each section is a task instead of a thread.
"""

import re

from hangwatch.tools.explain.stacks.parsed_processes import ParsedThread, Place, StackText

_SECTION = re.compile(
    r"^Stack dump(?: for PID (\d{1,10}))?(?:, thread (\d{1,20}))? \((?:([^()]*); )?most recent call last\):$"
)
_FRAME = re.compile(r'^  File "(.*)"(?:, line (\d{1,9}))?, in (.*?)(?:  opcode=\S+)?$')
_NO_FRAMES = "No Python frames"


def begins(line: str) -> bool:
    """True if a text of this tool begins with this line."""
    return line.startswith("Stack dump") and _SECTION.match(line) is not None


class Reader(StackText):
    """A reader for processes in sequence. Without a main thread, the first task or thread counts as that."""

    is_outermost_first = True
    _is_main = False

    def feed(self, line: str) -> bool:
        """Read a line. Return false if it is not part of a dump."""
        if section := _SECTION.match(line):
            pid, thread_id, labels = section.group(1), section.group(2) or "", re.split("[,;] ", section.group(3) or "")
            task = next((label for label in labels if label.startswith("task ")), None)
            if pid:
                self._close_process()
                self._pid = int(pid)
            self._begin(ParsedThread(task or thread_id, [], task, None if task else "has GIL" in labels))
            self._is_main = "main thread" in labels
            return True
        if frame := _FRAME.match(line):
            file, number, function = frame.groups()
            self._add(Place(function, file, int(number) if number else None))
        return not line.strip() or line.startswith("  ") or line == _NO_FRAMES

    def _keep(self, thread: ParsedThread) -> None:
        if thread.places:
            super()._keep(thread)
            if self._is_main or self._main is None:
                self._main = thread
