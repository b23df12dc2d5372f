"""Reader for the output of `py-spy dump` of any version, line by line. Pure."""

import re
from collections.abc import Callable
from functools import lru_cache

import msgspec
from msgspec import structs

from hangwatch.formats import decoding, pyspy_json
from hangwatch.limits import LONGEST_LINE
from hangwatch.model import Fault, Frame, Thread
from hangwatch.tools.explain.stacks.parsed_processes import (
    MOST_FRAMES_OF_TOOLS,
    HugeStackError,
    Interned,
    ParsedProcess,
    check_threads,
    mark_main_thread,
)

_PROCESS = re.compile(r"^\s?Process ([0-9]{1,10})(?::\s?(.*))?$")
_PARENT = re.compile(r"^\s?Parent Process ([0-9]{1,10})")
_PYTHON = re.compile(r"^\s?Python v\d")
_THREAD = re.compile(
    r'^\s?Thread (?:(0x[0-9A-Fa-f]+|\d+)(?:/\S+)? \(([^()]*)\)|\(((?:active|idle)[^()]*)\))(?:: ["“”](.*)["“”])?\s*$'
)
_FRAME = re.compile(r"^\s{1,7}(\S.*) \(([^()]*)\)$")
_ODD_FRAME = re.compile(r"^\s{1,7}(\S.*?) \((.*)\)$")
_ERROR = re.compile(r"^\s?(?:Error: |Failed to |Permission Denied|\S*py-spy: |\S+: py-spy: |thread '.*' panicked)")
_CAUSE = re.compile(r"^\s*(?:Reason: |\d+: )(.*)$")
_OF_ERROR = re.compile(r"^(?:Caused by:|note: |stack backtrace:)")
_REASON = re.compile(r"^\s?Fault: ([A-Za-z]{1,40})$")  # a report of hangwatch prints it after the error
_RULE = re.compile(r"^\s?-{20,}$")
_DEEP = re.compile(r"^\s{8,}")
_JSON = re.compile(r"^\s*\[(?: ?\{|\s*$)")
_BEGIN = re.compile("|".join(f"(?:{one.pattern})" for one in (_PROCESS, _RULE, _THREAD, _PARENT, _ERROR, _JSON)))

_LARGEST_JSON = 1 << 26
_CAUSES = 4


@lru_cache(maxsize=1 << 8)
def _split_flags(flags: str) -> frozenset[str]:
    return frozenset(re.split(r"[+,\s]+", flags.lower()))


class _Pid(msgspec.Struct):
    pid: int | None = None


def begins(line: str) -> bool:
    """True if the output of py-spy may begin with this line. Earlier lines do not belong to it."""
    return _BEGIN.match(line) is not None


class Reader:
    """A reader for the lines of one stream: one file, or its lines with one prefix.

    It calls `add_process` with each process, and `odd` with each line outside py-spy's output.
    """

    def __init__(
        self, interned: Interned, add_process: Callable[[ParsedProcess], None], odd: Callable[[str], None]
    ) -> None:
        self._add_process = add_process
        self._odd = odd
        self._interned = interned
        self._pid: int | None
        self._parent: int | None
        self._clear()

    def feed(self, line: str) -> None:
        """Read a line, without its prefix and line end. Raises HugeStackError if the dump exceeds a limit."""
        if self._text:
            self._json(line)
            return
        if len(line) > LONGEST_LINE and not line.startswith("["):
            line = line[:LONGEST_LINE]
        if match := _PROCESS.match(line):
            self._finish()
            self._pid, self._command = int(match.group(1)), match.group(2) or ""
            self._open, self._read = True, self._header
            self._header_line, self._is_python = line, False
        elif _RULE.match(line):
            self._finish()
        else:
            self._read(line)

    def add_frame(self, frame: Frame) -> bool:
        """Add a frame to the open thread. False if no thread is open. Raises HugeStackError if it has too many."""
        if self._thread is None:
            return False
        if len(self._frames) == MOST_FRAMES_OF_TOOLS:
            raise HugeStackError(f"a thread has more than {MOST_FRAMES_OF_TOOLS:,} frames: this is not a stack dump")
        self._frames.append(frame)
        return True

    @property
    def is_in_header(self) -> bool:
        """True after a line `Process N: command`. The command may have further lines, which a user writes."""
        return self._read == self._header

    def end(self) -> None:
        """Close the parts that are still open. More lines may follow."""
        if self._text:
            self._end_json()
        self._finish()

    def _clear(self) -> None:
        self._open = False
        self._pid = self._parent = None
        self._command = self._header_line = ""
        self._is_python = True
        self._threads: list[Thread] = []
        self._thread: tuple[str, str, str | None] | None = None
        self._frames: list[Frame] = []
        self._errors: list[str] = []
        self._reason: str | None = None
        self._text: list[str] = []
        self._size = 0
        self._read = self._between

    def _between(self, line: str) -> None:
        if not line.strip():
            return
        if _JSON.match(line):
            self._finish()
            self._json(line)
        elif not self._common(line):
            self._odd(line)

    def _header(self, line: str) -> None:
        """Read a line of a header. A command line may have several lines; `Python v...` or a thread ends it."""
        if _PYTHON.match(line):
            self._read, self._is_python = self._body, True
        elif not self._common(line):
            self._command = f"{self._command}\n{line}"[:LONGEST_LINE]

    def _body(self, line: str) -> None:
        if self._thread is not None:
            if _DEEP.match(line):  # arguments and locals
                return
            found = _FRAME.match(line) or _ODD_FRAME.match(line)
            if found:
                frame = self._interned.frame(found.group(1), found.group(2))
                self._interned.lines[line + "\n"] = frame
                self.add_frame(frame)
                return
        if line.strip() and not self._common(line) and not _PYTHON.match(line):
            self._odd(line)

    def _error(self, line: str) -> None:
        """Read a line after an error: a cause of it, or the backtrace of py-spy itself, which is ignored."""
        if found := _THREAD.match(line):
            self._start_thread(found)
        elif found := _CAUSE.match(line):
            if len(self._errors) <= _CAUSES and found.group(1) not in self._errors:
                self._errors.append(found.group(1))
        elif found := _REASON.match(line):
            self._reason = found.group(1)
        elif line.startswith("Stack backtrace"):
            self._errors += [""] * _CAUSES
        elif line.strip() and not line.startswith((" ", "\t")) and not _OF_ERROR.match(line):
            self._finish()
            self._between(line)

    def _common(self, line: str) -> bool:
        if found := _THREAD.match(line):
            self._start_thread(found)
        elif found := _PARENT.match(line):
            self._parent, self._read = int(found.group(1)), self._header
        elif _ERROR.match(line):
            self._close_thread()
            self._errors.append(line.strip().removeprefix("Error: "))
            self._open, self._read = True, self._error
        else:
            return False
        return True

    def _start_thread(self, heading: re.Match[str]) -> None:
        number, flags, flags_alone, name = heading.groups()
        self._close_thread()
        if self._pid is None and name == "MainThread" and any(thread.is_main for thread in self._threads):
            self._finish()  # the line `Process ...` between the two was not copied
        self._thread = (number or "?", flags if flags_alone is None else flags_alone, name)
        self._open, self._read = True, self._body

    def _close_thread(self) -> None:
        if self._thread is None:
            return
        number, flags, name = self._thread
        words = _split_flags(flags)
        check_threads(len(self._threads))
        self._threads.append(
            Thread(
                name=name or None,
                thread_id=number,
                frames=self._interned.stack(self._frames),
                active="active" in words if words & {"active", "idle"} else None,
                owns_gil="gil" in words,
                is_main=name == "MainThread",
            )
        )
        self._thread, self._frames = None, []

    def _finish(self) -> None:
        self._close_thread()
        if not (self._is_python or self._threads or self._errors):  # "Process 3: starts" in a log
            lines = (self._header_line, *self._command.split("\n")[1:])
            self._clear()  # an odd line may begin a stack of another tool, which ends this dump again
            for line in lines:
                self._odd(line)
        elif self._open:
            process = ParsedProcess(
                pid=self._pid,
                command=self._command,
                parent_pid=self._parent,
                threads=mark_main_thread(self._threads, self._pid),
                fault=None if any(thread.frames for thread in self._threads) else self._fault(),
            )
            self._clear()
            self._add_process(process)
        else:
            self._clear()

    def _fault(self) -> Fault:
        subject = "process" if self._pid is None else f"pid {self._pid}"
        detail = ": ".join(error for error in self._errors if error)
        if not detail:
            return Fault(subject=subject, reason="NoStack", detail="the dump holds no stack and no error")
        fault = pyspy_json.fault_of_message(subject, detail)
        is_heard = fault.reason != pyspy_json.UNHEARD or self._reason is None
        return fault if is_heard else structs.replace(fault, reason=self._reason)

    def _json(self, line: str) -> None:
        """Read a line of a JSON dump. A bracket without indentation ends the dump."""
        self._text.append(line)
        self._size += len(line)
        if (line.rstrip().endswith("]") and not line.startswith((" ", "\t"))) or self._size > _LARGEST_JSON:
            self._end_json()

    def _end_json(self) -> None:
        text, self._text, self._size = "\n".join(self._text), [], 0
        try:
            processes = decoding.decode_json(text, list[_Pid])
            pid = next((process.pid for process in processes if process.pid is not None), None)
            threads = pyspy_json.parse_json(text, pid)
        except (pyspy_json.DumpError, msgspec.DecodeError, RecursionError):
            self._odd(text)
            return
        fault = None if threads else Fault(subject=f"pid {pid}", reason="NoStack", detail="the dump holds no thread")
        self._add_process(ParsedProcess(pid, "", None, threads, fault))
