"""Reader for the output of `pystack remote` and `pystack core`, with and without --native and --locals. Pure.

Frames come outermost first, threads from the youngest to the main one. The output contains no pid, but the number of
the main thread is equal to it (gettid(2)). With --native-all, threads without Python follow the main one. If a process
has several interpreters, a line with its name precedes the frames of each, and only those of the main one are read. The
watchdog of a program (TensorRT-LLM) prints traceback.format_stack in this order, too: its thread numbers are those of
pthreads.
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
    r"^Traceback for thread (\d{1,10})(?: \((?:.*)\))?(?: \[(.*)\])? \(most recent call last\):$"
    r"|^Thread (\d{1,20})(?: \(.*\))? stack trace:$"
)
_PART = re.compile(r"^  (In the main interpreter|In interpreter \d{1,9}|Not currently attached .*) \[(.*)\]$")
_NOTE = re.compile(r"^(?:The frame stack for thread \d{1,10} is empty|\* - Unable to merge native stack .* - \*)$")
_FRAME = re.compile(r'^  (?:  \((Python|C)\) )?File "(.*)", line (\d{1,9}), in (.*)$')
_NATIVE = re.compile(r"^(.*?)(?: \(inlined\))? \(([^()]*)\)$")
_INTERPRETER = re.compile(r"^_?Py[A-Z_]|^_Py|^pymain_|^run_mod$|^run_eval_code_obj$|^pyrun_file$|^cfunction_")


def begins(line: str) -> bool:
    """True if a text of this tool begins with this line."""
    return line.startswith(("Traceback for thread ", "Thread ")) and _THREAD.match(line) is not None


class Reader:
    """A reader for one or more processes that follow each other."""

    def __init__(self, interned: Interned) -> None:
        self._interned = interned
        self._processes: list[ParsedProcess] = []
        self._threads: list[ParsedThread] = []
        self._thread_ids: set[str] = set()
        self._header: tuple[str, str] | None = None
        self._places: list[Place] = []
        self._main: ParsedThread | None = None
        self._has_pid, self._is_in_main = True, True

    def feed(self, line: str) -> bool:
        """Read a line. Return false if it is not part of a dump."""
        if heading := _THREAD.match(line):
            self._close_thread()
            thread_id = heading.group(1) or heading.group(3)
            if thread_id in self._thread_ids:
                self._close_process()
            self._header, self._has_pid = (thread_id, heading.group(2) or ""), heading.group(1) is not None
            self._is_in_main = True
            return True
        if (interpreter := _PART.match(line)) and self._header is not None:
            self._is_in_main = not interpreter.group(1).startswith("In interpreter")
            self._header = self._header if self._header[1] else (self._header[0], interpreter.group(2))
            return True
        if frame := _FRAME.match(line):
            if self._is_in_main and len(self._places) < MOST_FRAMES:
                self._place(*frame.groups())
            return True
        is_continued = not line.strip() or line.startswith("    ")  # the source line, arguments, locals
        return is_continued or _NOTE.match(line) is not None

    def end(self) -> list[ParsedProcess]:
        """Return the processes that were read."""
        self._close_thread()
        self._close_process()
        return self._processes

    def _place(self, kind: str | None, file: str, line: str, function: str) -> None:
        if kind != "C":
            self._places.append(Place(function, file, int(line) or None))
        elif (found := _NATIVE.match(function)) and not _INTERPRETER.match(found.group(1)):
            self._places.append(Place(found.group(1), found.group(2).rpartition("/")[2] or "?", None, True))

    def _close_thread(self) -> None:
        if self._header is None:
            return
        thread_id, flags = self._header
        places = self._places[::-1]
        has_python = not all(place.is_compiled for place in places)
        if self._main is not None and has_python:
            self._close_process()
        self._thread_ids.add(thread_id)
        check_threads(len(self._threads))
        self._threads.append(ParsedThread(thread_id, places, owns_gil="Has the GIL" in flags))
        self._header, self._places = None, []
        if any(map(is_outermost, places)):
            self._main = self._threads[-1]

    def _close_process(self) -> None:
        if any(thread.places for thread in self._threads):
            main = self._main or self._threads[-1]
            check_processes(len(self._processes))
            pid = int(main.thread_id) if self._has_pid else None
            self._processes.append(make_process(pid, self._threads, main, self._interned))
        self._threads, self._thread_ids, self._main = [], set(), None
