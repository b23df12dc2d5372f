"""Reader for the output of Python's `faulthandler`: `dump_traceback(_later)`, on a signal, on a fatal error. Pure.

The format is that of `_Py_DumpTracebackThreads` in CPython's Python/traceback.c. Threads come from the youngest to the
main one, frames innermost first. There is no pid, and before 3.14 no names of threads.
"""

import re

from hangwatch.tools.explain.stacks.parsed_processes import ParsedThread, Place, StackText, is_outermost

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


class Reader(StackText):
    """A reader for one or more dumps that follow each other. After the end of a main thread the next dump begins."""

    def feed(self, line: str) -> bool:
        """Read a line. Return false if it is not part of a dump."""
        if heading := _THREAD.match(line):
            self._begin(ParsedThread(heading.group(1) or NO_NUMBER, [], heading.group(2)))
            return True
        if self._thread is not None and (frame := _FRAME.match(line)):
            file, number, function = frame.groups()
            self._add(Place(function, file, None if number == "???" else int(number)))
            return True
        return not line.strip() or _FATAL.match(line) is not None or _OTHER.match(line) is not None

    def _keep(self, thread: ParsedThread) -> None:
        """Keep a thread. The last one of a process is the main thread.

        The stack alone may not show this: a stack of over 100 frames is cut at its outer end.
        """
        super()._keep(thread)
        self._main = thread
        if thread.places and is_outermost(thread.places[-1]):
            self._close_process()
