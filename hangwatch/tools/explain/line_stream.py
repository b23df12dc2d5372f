"""Reader for one stream of lines: a file, or its lines with one prefix. Finds stacks of any tool, and log lines."""

import re
from collections.abc import Sequence
from types import ModuleType

from hangwatch import tables, words
from hangwatch.formats.pyspy_json import UNHEARD
from hangwatch.limits import LONGEST_LINE
from hangwatch.logs.rank_log import Log, last_written
from hangwatch.tools.explain.stacks import (
    faulthandler_text,
    gdb_text,
    kernel_stack_text,
    profiling_text,
    pyspy_text,
    pystack_text,
    strace_text,
)
from hangwatch.tools.explain.stacks.parsed_processes import Interned, ParsedProcess, StackText, check_processes

_PATTERNS = tables.Patterns("stack_lines.toml")

_TEXTS: tuple[ModuleType, ...] = (
    *(faulthandler_text, pystack_text, gdb_text, profiling_text),
    *(kernel_stack_text, strace_text),
)
_EXAMPLE_CHARACTERS = 80
_HEADING_OF_ANSWER = "Groups, largest first"  # in the answers and reports of hangwatch
_WORDS_OF_ANCHORS = (
    "hread ",
    "Process ",
    "#0 ",
    "Traceback (",
    "Stack dump ",
    "Timeout (",
    "[<",
    "/proc/",
    "Fatal Python error: ",
    "Root Cause (",
    "Failures:",
    *("Killed", " (core dumped)", "*** S", "*** s", "corrupt", "(): ", "terminate called ", " panicked at "),
)
_LONGEST_DECORATION = 200


def begins_dump(line: str) -> bool:
    """True if a stack dump of any tool may begin with this line, also quoted. A separator (`-----`) does not count."""
    short = line[:LONGEST_LINE].lstrip("> ")
    is_of_pyspy = pyspy_text.begins(short) and short.lstrip().startswith(("Process ", "Thread ", "[", "Error: "))
    return is_of_pyspy or any(kind.begins(short) for kind in _TEXTS)


class Reader:
    """A reader of one stream: it finds stack dumps of any tool, and passes the other lines to `log`.

    `strange` is the number of lines outside of stack dumps, `lone_frames` is the number of frames of py-spy among them.
    `begins_inside` is true if the first of them is a frame, so that the head of a dump is cut; `ends_inside` if the
    tail of the last dump is cut.
    `has_dump` is true if the stream contains the output of a tool other than faulthandler, which prints into a log.
    `has_answer` is true if it contains an answer or a report of hangwatch. `is_log` is true if the name of the stream
    is that of a log: then "Error: " is not a line of py-spy.

    Lines may have a decoration: a time, the name of a container, a quote mark, spaces. The text before the first
    line of a dump or traceback shows its shape. From then on it is removed, and its time remains the time of the line.
    """

    def __init__(self, interned: Interned, *, is_log: bool = False) -> None:
        self.processes: list[ParsedProcess] = []
        self.log = Log()
        self.strange = 0
        self.strange_example = ""
        self.has_dump = False
        self.has_answer = False
        self.lone_frames = 0
        self.is_log = is_log
        self._interned = interned
        self._pyspy: pyspy_text.Reader | None = None
        self._text: StackText | None = None
        self._kind: ModuleType | None = None
        self._unclear: list[ParsedProcess] = []
        self._number = 0
        self.begins_inside = self.ends_inside = False
        self._decoration: re.Pattern[str] | None = None
        self._before = ""

    def feed(self, line: str, number: int, before: str = "") -> None:
        """Read a line, without its prefix `before` and line end. `number` is its line number in the file.

        Raises HugeStackError if a dump exceeds the limits.
        """
        self._number, self._before = number, before
        if "\r" in line:
            line = last_written(line)
        line = self._remove_decoration(line)
        if self._continue_text(line[:LONGEST_LINE]):
            return
        if self._pyspy is None and not self.is_log and pyspy_text.begins(line):
            self._pyspy = pyspy_text.Reader(self._interned, self._add_process, self._read_other_line)
        if self._pyspy is None:
            self._read_other_line(line)
        else:
            self._pyspy.feed(line)

    def repeat_frame(self, line: str) -> bool:
        """Read a line, with its line end, if it is a frame of py-spy that was read before: most lines of many ranks.

        Return false if it is not. Raises HugeStackError if a dump exceeds the limits.
        """
        frame = self._interned.lines.get(line)
        if frame is None or self._pyspy is None or self._text is not None or self._decoration is not None:
            return False
        return self._pyspy.add_frame(frame)

    def _remove_decoration(self, line: str) -> str:
        is_command = self._pyspy is not None and self._pyspy.is_in_header
        may_begin = not is_command and words.holds_any(line, _WORDS_OF_ANCHORS)
        anchor = _PATTERNS["stream_anchor"].search(line, 0, LONGEST_LINE) if may_begin else None
        if (
            anchor
            and 1 < anchor.start() < _LONGEST_DECORATION
            and (line[0] in " \t>" or not (self._decoration and self._decoration.match(line)))
        ):
            before = line[: anchor.start()]
            is_traceback = anchor.group().endswith(":") and "Traceback (" in anchor.group()
            is_inner = before.isspace() and (is_traceback or self._pyspy is not None)  # children, chained exceptions
            if not _PATTERNS["stream_no_decoration"].search(before) and not is_inner:
                self._decoration = _generalise(before)
        decoration = self._decoration.match(line) if self._decoration else None
        if decoration is None:
            return line
        self._before += decoration.group()
        return line[decoration.end() :]

    def end(self) -> None:
        """Close the dump or log entry that is still open at the end of the stream."""
        count, is_outermost_first = len(self.processes), self._text is not None and self._text.is_outermost_first
        if self._pyspy is not None:
            self._pyspy.end()  # its lines may be the stack of another tool
        self._close_text()
        self.ends_inside = len(self.processes) > max(count, 1) and _is_cut(self.processes, -(not is_outermost_first))
        self.log.end()
        if not self.strange:
            self.processes += self._unclear
            self.has_dump = self.has_dump or bool(self._unclear)
        self._unclear = []

    def _add_process(self, process: ParsedProcess) -> None:
        """Keep a process that was read. An unknown error line is py-spy's only in a stream without other lines."""
        if not process.threads and process.fault is not None and process.fault.reason == UNHEARD:
            check_processes(len(self._unclear))
            self._unclear.append(process)
            self.log.feed(f"Error: {process.fault.detail}", self._number, self._before)
            return
        self.has_dump = True
        check_processes(len(self.processes))
        self.processes.append(process)

    def _continue_text(self, short: str) -> bool:
        """Read a line of the stack that is open. False if none is open, or if the line does not belong to it."""
        if self._text is None:
            return False
        is_read = self._text.feed(short)
        if not is_read:
            self._close_text()
        return is_read

    def _read_other_line(self, line: str) -> None:
        short = line[:LONGEST_LINE]
        if self._continue_text(short):
            return
        for kind in _TEXTS:
            if kind.begins(short):
                if self._pyspy is not None:
                    self._pyspy.end()
                self._kind, self._text = kind, kind.Reader(self._interned)
                self._text.feed(short)
                if short.startswith("Fatal Python error: "):
                    self.log.feed(short, self._number, self._before)
                return
        if line.strip():
            self.begins_inside |= (
                not (self.strange or self.processes) and _PATTERNS["stream_inside"].match(short) is not None
            )
            self.strange += 1
            self.has_answer = self.has_answer or line == _HEADING_OF_ANSWER
            self.lone_frames += _PATTERNS["stream_lone_frame"].match(short) is not None
            self.strange_example = self.strange_example or line.strip()[:_EXAMPLE_CHARACTERS]
            self.log.feed(line, self._number, self._before)

    def _close_text(self) -> None:
        if self._text is None:
            return
        found = self._text.end()
        check_processes(len(self.processes) + len(found) - 1)
        self.processes += found
        self.has_dump = self.has_dump or (bool(found) and self._kind is not faulthandler_text)
        self._text = self._kind = None


def _is_cut(processes: Sequence[ParsedProcess], end: int) -> bool:
    """True if the last stack ends at a frame at which no other stack ends, but after which another one goes on.

    `end` is the index of the frame that a tool prints last: -1 for the outermost one, 0 for the innermost one.
    """
    *others, last = processes
    cut = last.threads[-1].frames if last.threads else ()
    whole = {thread.frames for process in others for thread in process.threads if thread.frames}
    if not cut or any(frames[end] == cut[end] for frames in whole):
        return False
    return any(cut[end] in frames for frames in whole)


def _generalise(before: str) -> re.Pattern[str]:
    """Return the pattern of a decoration: its numbers and levels differ between lines. Its last spaces may be cut."""
    text = before.rstrip(" ")
    shapes = [
        re.escape(part) if not number % 2
        else r"std\w+ [FP]" if part.startswith("std")
        else " +" if part[0] == " "
        else "[A-Z]{4,}" if part.isupper()
        else "[0-9a-f]+"
        for number, part in enumerate(_PATTERNS["stream_part_of_decoration"].split(text))
    ]  # fmt: skip
    spaces = len(before) - len(text)
    return re.compile("".join(shapes) + (f"(?: {{{spaces}}}|$)" if spaces else ""))
