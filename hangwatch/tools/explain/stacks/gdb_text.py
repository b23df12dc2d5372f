"""Reader for the output of gdb for `bt`, `thread apply all bt` and `py-bt`, with and without python-gdb. Pure.

Python frames come from python-gdb. Until 3.10 they are `Frame 0x..., for file F, line N, in NAME` among the arguments
of the interpreter's own frames. With py-bt they are a traceback. Without python-gdb a stack has only compiled frames.
"""

import re
from itertools import dropwhile

from hangwatch import tables
from hangwatch.limits import MOST_DUMPED_FRAMES
from hangwatch.tools.explain.stacks.parsed_processes import Interned, ParsedThread, Place, StackText

_PATTERNS = tables.Patterns("stack_lines.toml")
_THREAD = re.compile(
    r'^Thread (\d{1,6}) \((?:Thread 0x[0-9a-f]{1,16} \()?(?:LWP|process) (\d{1,10})\)?(?: "(.*)")?\):$'
)
_FRAME = re.compile(r"^#(\d{1,6}) +(?:0x[0-9a-f]+ in )?(.*)$")
_WHERE = re.compile(r" (?:(from) (\S+)|(at) (\S+?)(?::\d+)?)$")

_C_LIBRARIES = ("libc.so", "libpthread", "libstdc++.so")
_TRACEBACK = "Traceback (most recent call first):"  # of py-bt
LONE = "bt"  # instead of the number of a thread, which is that of a process of its own
# Lines before the first thread: other threads that gdb found, and its warnings
_LONGEST_PREAMBLE = 500


def begins(line: str) -> bool:
    """True if a text of this tool begins with this line."""
    if line.startswith("#0 "):
        return _PATTERNS["gdb_bare"].match(line) is not None
    return line.startswith(("[New LWP ", _TRACEBACK)) or _THREAD.match(line) is not None


class Reader(StackText):
    """A reader for one or more processes that follow each other. Threads count down to 1, which is the main one.

    Frames without a thread before them (`bt`, `py-bt`) are a process of one thread.
    """

    def __init__(self, interned: Interned) -> None:
        super().__init__(interned)
        self._number = 0  # of the thread that began last
        self._preamble = _LONGEST_PREAMBLE
        self._traced: list[Place] = []
        # Address of the last Python frame: two compiled frames may print the same one
        self._shown = ""

    def feed(self, line: str) -> bool:
        """Read a line. Return false if it is not part of the output of gdb."""
        if heading := _THREAD.match(line):
            self._begin_numbered(int(heading.group(1)), ParsedThread(heading.group(2), [], heading.group(3)))
            return True
        frame = _FRAME.match(line)
        begins = frame.group(1) == "0" if frame else line.startswith(_TRACEBACK) and (self._traced or not self._thread)
        if begins and (self._thread is None or not self._thread.thread_id.isdecimal()):
            self._begin_numbered(1, ParsedThread(LONE, []))
        if self._thread is None:
            self._preamble -= 1
            return self._preamble >= 0
        if frame:
            self._frame(frame.group(2))
            return True
        if traced := _PATTERNS["gdb_traceback"].match(line):
            if len(self._traced) < MOST_DUMPED_FRAMES:
                self._traced.append(Place(traced.group(3), traced.group(1), int(traced.group(2))))
            return True
        if line.startswith("[Inferior "):
            self._close_process()
            return True
        return not line.strip() or _PATTERNS["gdb_said"].match(line) is not None

    def _begin_numbered(self, number: int, thread: ParsedThread) -> None:
        if number >= self._number:
            self._close_process()
        self._begin(thread)
        self._number, self._preamble = number, 0

    def _frame(self, text: str) -> None:
        name = _find_name(text)
        python = _PATTERNS["gdb_python"].search(text, len(name)) if name.startswith(("_PyEval_", "PyEval_")) else None
        if python is not None:
            address, file, line, function = python.groups()
            if address != self._shown:
                self._add(Place(function, file, int(line) or None))
            self._shown = address
            return
        where = _WHERE.search(text)
        file = (where.group(2) or where.group(4)) if where else "?"
        if (
            name.startswith("??")
            or _PATTERNS["gdb_interpreter"].match(name)
            or _PATTERNS["gdb_interpreter_file"].search(file)
        ):
            return
        file = "libc.so.6" if _PATTERNS["gdb_c_library"].search(file) else file.rpartition("/")[2]
        self._add(Place(name, file, None, True))

    def _keep(self, thread: ParsedThread) -> None:
        places = thread.places
        if self._traced:
            places = [*(place for place in places if place.is_compiled), *self._traced]
        if all(place.is_compiled for place in places):
            # A frame of the C library shows no awaited object: every wait in it looks like a lock.
            places = list(dropwhile(lambda place: place.file.startswith(_C_LIBRARIES), places)) or places
        self._traced, self._shown = [], ""
        kept = thread._replace(places=places)
        super()._keep(kept)
        if self._number == 1:
            self._main, self._pid = kept, int(thread.thread_id) if thread.thread_id.isdecimal() else None


def _find_name(text: str) -> str:
    """Return the function of a frame: the text before its arguments. These begin outside of template brackets."""
    depth = 0
    for index, character in enumerate(text):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= 1
        elif character == "(" and depth <= 0 and index and text[index - 1] == " ":
            return text[: index - 1]
    return text
