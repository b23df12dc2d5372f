"""Reader for the output of `pystack remote` and `pystack core`, with and without --native and --locals. Pure.

Frames come outermost first, threads from the youngest to the main one. The output contains no pid, but the number of
the main thread is equal to it (gettid(2)). With --native-all, threads without Python follow the main one. If a process
has several interpreters, a line with its name precedes the frames of each, and only those of the main one are read. The
watchdog of a program (TensorRT-LLM) prints traceback.format_stack in this order, too: its thread numbers are those of
pthreads.
"""

from hangwatch import tables
from hangwatch.tools.explain.stacks.parsed_processes import ParsedThread, Place, StackText, is_outermost

_PATTERNS = tables.Patterns("stack_lines.toml")


def begins(line: str) -> bool:
    """True if a text of this tool begins with this line."""
    return "hread" in line and _PATTERNS["pystack_thread"].match(line) is not None


class Reader(StackText):
    """A reader for one or more processes that follow each other."""

    is_outermost_first = True
    _has_pid = True
    _is_in_main = True

    def feed(self, line: str) -> bool:
        """Read a line. Return false if it is not part of a dump."""
        if heading := _PATTERNS["pystack_thread"].match(line):
            number, flags, *numbers = heading.groups()
            number_of_pthread = next(filter(None, numbers), "")
            self._begin(ParsedThread(number or number_of_pthread, [], owns_gil="Has the GIL" in (flags or "")))
            self._has_pid, self._is_in_main = number is not None, True
            return True
        if (interpreter := _PATTERNS["pystack_part"].match(line)) and self._thread is not None:
            self._is_in_main = not interpreter.group(1).startswith("In interpreter")
            if "Has the GIL" in interpreter.group(2) and self._is_in_main:
                self._thread = self._thread._replace(owns_gil=True)
            return True
        if frame := _PATTERNS["pystack_frame"].match(line):
            if self._is_in_main:
                self._read_frame(*frame.groups())
            return True
        is_continued = not line.strip() or line.startswith("  ")  # the source line, arguments, locals
        return is_continued or _PATTERNS["pystack_note"].match(line) is not None

    def _read_frame(self, kind: str | None, file: str, line: str, function: str) -> None:
        if kind != "C":
            self._add(Place(function, file, int(line) or None))
        elif (found := _PATTERNS["pystack_native"].match(function)) and not _PATTERNS["pystack_interpreter"].match(
            found.group(1)
        ):
            self._add(Place(found.group(1), found.group(2).rpartition("/")[2] or "?", None, True))

    def _keep(self, thread: ParsedThread) -> None:
        if not all(place.is_compiled for place in thread.places) and self._is_main_kept():
            self._close_process()
        super()._keep(thread)
        if not self._is_main_kept():
            self._main, self._pid = thread, int(thread.thread_id) if self._has_pid else None

    def _is_main_kept(self) -> bool:
        return self._main is not None and any(map(is_outermost, self._main.places))
