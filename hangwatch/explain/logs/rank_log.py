"""Pure: what a rank's log says: its last line with its time, and where it fails. What is kept of it is bounded.

A log is written by the job and by whoever can write there: it is evidence, and accuses nobody.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from hangwatch.explain.logs import kernel_text
from hangwatch.explain.stacks.parsed_processes import LONGEST_LINE
from hangwatch.formats import decoding, pyspy_json
from hangwatch.model import RankId
from hangwatch.tables import nccl_messages, secret_forms

MOST_FAILURES = 8  # of one rank: the first ones
MOST_TOLD = 4096  # failures of ranks that a launcher's summary tells
LONGEST_TEXT = 400
LONGEST_LOG_LINE = 4096
"""Characters of a line of a log that are looked at, behind its prefix: patterns take time by the square of them."""

LARGEST_ERROR_FILE = 1 << 20
_CALLSTACK_CHARACTERS = 1 << 16

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b.|[\x00-\x08\x0b\x0c\x0e-\x1f]")
_TOLD_RANK = re.compile(r"^\[rank(\d{1,7})\]: ?")
_DATED = re.compile(
    r"(\d{4})[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\d*(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_GLOG = re.compile(r"^\[?[IWEFD](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?", re.ASCII)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SYSLOG = re.compile(rf"^({'|'.join(_MONTHS)}) {{1,2}}(\d\d?) (\d\d):(\d\d):(\d\d)", re.ASCII)
_STAMP_WITHIN = 64
_LEAP_YEAR = 2000

_TRACEBACK = "Traceback (most recent call last):"
_OF_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|EXCEPTION)\b|^\[?[EF]\d{4} ", re.IGNORECASE)
_CODE = re.compile(
    r'^ +File "([\w./+-]{1,1000})", line (\d{1,9}), '
    r"in ([^\W\d]\w{0,199}|<(?:module|lambda|genexpr|(?:list|set|dict)comp)>)$"
)
"""A place in a program: other names of files and functions can hold anything, and places are shown to everybody."""

_EXCEPTION_TYPE = re.compile(r"((?:[A-Za-z_]\w{0,63}\.){0,8}_{0,2}(?:[A-Z]\w{0,63}|error|timeout)):(?: |$)", re.ASCII)
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]{0,200})(?:: ?(.*))?$")
_FATAL = re.compile(
    r"Watchdog caught collective operation timeout|Fatal Python error: |terminate called after throwing"
    r"|CUDA error: |^Segmentation fault\b|^Killed\b|\bout of memory\b.*\bKill"
    r"|^srun: error: .*(?:Killed|Terminated|Segmentation fault|Exited with)"
)
_OF_OTHERS = re.compile(
    r"collective operation timeout|\bNCCL\b.*\b(?:time[d -]?out|abort)|communicator was aborted|remote process exited"
    r"|Dist(?:Backend|Network|Store)Error|Connection closed by (?:remote )?peer"
    r"|SignalException|ChildFailedError|KeyboardInterrupt|SIGTERM"
    r"|(?:timed? ?out|timeout).*\b(?:store|barrier|rendezvous)"
    r"|pair closure|Rendezvous\w*ClosedError|NCCL error in: .*unhandled system error"
    r"|mismatch between collectives|killed by signal: Terminated"
    r"|\bWait timeout|\bSocket Timeout|reached monitoredBarrier, but|failed to pass monitoredBarrier",
    re.IGNORECASE,
)
_LOST = (
    r"(?:closed|reset|refused) by (?:remote )?peer|Connection (?:reset|refused|aborted)|Broken pipe|closed connection"
    r"|failed to (?:recv|connect)|(?:timed? ?out|timeout).*\b(?:wait(?:ing)?|connect|socket)"
)
_LOST_IN_THE_JOB = re.compile(
    r"(?:\bNCCL\b|gloo|c10d|TCPStore|tensorpipe|torch[./]distributed|client socket|(?<![/:])\[[\d.:a-f]+\]:\d)"
    rf".*(?:{_LOST})|(?:{_LOST}).*(?:\bNCCL\b|gloo|c10d|TCPStore|tensorpipe|(?<![/:])\[[\d.:a-f]+\]:\d)"
    rf"|^RuntimeError: (?:{_LOST})",
    re.IGNORECASE,
)
"""Words that any connection has, to a database as well: of the job where they name what it is connected by.

"[address]:port" is gloo's way to write an address; torch before 2.1 says nothing but RuntimeError of its store.
"""
_ANOTHER = r"(?:rank|worker|peer)s?[ :#=]{0,2}\[?(\d{1,7})\b"
_OF_ANOTHER = re.compile(
    rf"\b{_ANOTHER}\]?,? (?:(?:(?:did|does|has|is|was|could|will)(?: not|n't)"
    r"|never|no longer|failed|died|exited|crashed|disconnected|timed out)"
    r"|(?:is|was|has) (?:gone|dead|lost|missing|unreachable|stuck|silent|timed out))"
    r"|\b(?:wait(?:ed|ing)? (?:for|on)|(?:response|answer|reply|heartbeat|message|ack) from"
    rf"|(?:contact|connection) (?:with|to)) {_ANOTHER}",
    re.IGNORECASE,
)
_SUMMARY = re.compile(r"^  (time|host|rank|exitcode|error_file|traceback) *: ?(.*)$")
_SUMMARY_PID = re.compile(r"\(pid: (\d{1,10})\)")
_SUMMARY_RANK = re.compile(r"^(\d{1,7}) \(local_rank: (\d{1,7})\)$")


class Moment(NamedTuple):
    """A time as a log gives it: `text` as it is written; `seconds` count on `clock`, and compare on one clock alone.

    "unix": since 1970, by UTC; "local": a wall clock of unknown zone; "yearless": one without a year.
    """

    clock: str
    seconds: float
    text: str


def common_clock(moments: Sequence[Moment | None]) -> str:
    """The clock that most of them have."""
    clocks = Counter(moment.clock for moment in moments if moment)
    return clocks.most_common(1)[0][0] if clocks else ""


def time_on(moment: Moment | None, clock: str) -> tuple[bool, float]:
    """Sorts by time; what has none on this clock comes last."""
    return (False, moment.seconds) if moment and moment.clock == clock else (True, 0.0)


class Line(NamedTuple):
    """A line of a log, without the time in front."""

    number: int
    text: str
    moment: Moment | None


class Failure(NamedTuple):
    """An exception or another end; `where` is the program's own line, `rank` whose it is where the text says that.

    `text` has no secrets of known forms. `of_others`: it complains of a lost or silent rank, so it follows a failure or
    a hang elsewhere. `exception` is its type, empty where that is not known.
    """

    text: str
    where: str
    moment: Moment | None
    number: int
    of_others: bool
    rank: RankId | None = None
    exception: str = ""


class Message(NamedTuple):
    """The first line that a row of nccl_messages.toml is of, the value that it tells, and its number."""

    value: str
    text: str
    number: int


class Log:
    """Reads the lines of one log; `told_rank` is the global rank that torch wrote before its lines.

    `messages` are what NCCL says, by the names of the table's rows; `kernel` the first lines as of the kernel's log,
    one for each row and subject, without those that are over, and `is_kernel_cut` where they were too many;
    `is_kernels`: all lines have the shape of that log; `processes`: whose each is that torchrun's summary lists.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.is_kernels = True
        self.is_kernel_cut = False
        self.kernel: dict[tuple[str, str], kernel_text.Heard] = {}
        self.last: Line | None = None
        self.failures: list[Failure] = []
        self.processes: set[RankId] = set()
        self.messages: dict[str, Message] = {}
        self.told_rank: int | None = None
        self._in_traceback = False
        self._indent = 0
        self._where = ""
        self._began: Moment | None = None
        self._ordinary_line = (0, 0, "")  # the how-manieth, its number in the file, its text
        self._summary: dict[str, str] = {}

    def feed(self, line: str, number: int) -> None:
        """Take a line, without its prefix and line end; `number` is that of its file."""
        text = clean(line)
        if found := _TOLD_RANK.match(text):
            text, self.told_rank = text[found.end() :], int(found.group(1))
        if not text.strip():
            return
        self.lines += 1
        if (said := nccl_messages.find(text)) and said.name not in self.messages:
            self.messages[said.name] = Message(said.value, _kept(text.strip()), number)
        self._hear_kernel(text)
        if not (self._of_summary(text, number) or self._of_traceback(text, number)):
            self._ordinary(text, number)

    def _hear_kernel(self, text: str) -> None:
        heard = kernel_text.find(text)
        self.is_kernels = self.is_kernels and (heard is not None or kernel_text.has_shape(text))
        if heard is not None and len(self.kernel) < kernel_text.MOST_KEPT:
            self.kernel.setdefault(heard.said[:2], heard)
        elif self.kernel:
            self.is_kernel_cut |= heard is not None and heard.said[:2] not in self.kernel
            for over in kernel_text.ended(text):
                self.kernel.pop(over, None)

    def end(self) -> None:
        """Close what is still open; `last` is known from here on: to read the time of every line takes too long."""
        self._end_summary(0)
        _, number, text = self._ordinary_line
        if text:
            moment = read_moment(text)
            self.last = Line(number, secret_forms.mask(_without(text, moment)), moment)

    def _ordinary(self, text: str, number: int) -> None:
        if text.endswith(_TRACEBACK):
            before, _, said = self._ordinary_line  # logging.exception prints a line of its own first
            self._began = read_moment(text) or (
                read_moment(said) if before == self.lines - 1 and _OF_ERROR.search(said[:_STAMP_WITHIN]) else None
            )
            self._in_traceback, self._where = True, ""
            self._indent = len(text) - len(text.lstrip())
        elif _FATAL.search(text):
            self._fail(text, "", read_moment(text), number)
        else:
            self._ordinary_line = self.lines, number, text

    def _of_traceback(self, text: str, number: int) -> bool:
        if not self._in_traceback:
            return False
        text = text[self._indent :] if text[: self._indent].isspace() else text
        if text[0] in " \t":
            self._where = _where(text) or self._where
            return True
        self._in_traceback = False
        if not _EXCEPTION.match(text):
            return False
        self._fail(text, self._where, self._began, number)
        return True

    def _of_summary(self, text: str, number: int) -> bool:
        """What torchrun prints at its end of each rank that failed: `time`, `host`, `rank`, `exitcode`, `traceback`."""
        if found := _SUMMARY.match(text):
            key, value = found.groups()
            if key == "time":
                self._end_summary(number)
            if key == "time" or self._summary:
                self._summary[key] = _kept(value.strip())
                return True
        if not self._summary:
            return False
        if text.startswith("  "):
            if not text.startswith("   ") and _EXCEPTION.match(text.strip()):
                self._summary.setdefault("exception", _kept(text.strip()))
            elif where := _where(text[2:]):
                self._summary["where"] = where
            return True
        self._end_summary(number)
        return re.match(r"^\[\d+\]:$|^[-=]{20,}$|^Root Cause", text) is not None

    def _end_summary(self, number: int) -> None:
        told, self._summary = self._summary, {}
        found = _SUMMARY_RANK.match(told.get("rank", ""))
        if found is None or len(self.failures) >= MOST_TOLD:
            return
        rank = RankId(rank=int(found.group(1)), local_rank=int(found.group(2)))
        text = told.get("exception") or " ".join(filter(None, ("exit code", told.get("exitcode"))))
        of_others = _is_of_others(f"{text} {told.get('exitcode', '')}")
        moment = read_moment(told.get("time", ""))
        self.failures.append(Failure(text, told.get("where", ""), moment, number, of_others, rank))
        if pid := _SUMMARY_PID.search(told.get("exitcode", "")):
            self.processes.add(replace(rank, node=told.get("host") or None, pid=int(pid.group(1))))

    def _fail(self, text: str, where: str, moment: Moment | None, number: int) -> None:
        if sum(failure.rank is None for failure in self.failures) < MOST_FAILURES:
            text = _without(text, moment)
            self.failures.append(Failure(_kept(text), where, moment, number, _is_of_others(text[:LONGEST_TEXT])))


def _kept(text: str) -> str:
    """What is kept of a text: without secrets of known forms, and bounded."""
    return secret_forms.mask(text)[:LONGEST_TEXT]


def _is_of_others(text: str) -> bool:
    return (_OF_OTHERS.search(text) or _LOST_IN_THE_JOB.search(text)) is not None


def blames_another(failure: Failure, rank: int | None) -> bool:
    """Whether a failure of this rank complains of others: of a lost connection, or of a rank that is not itself."""
    found = (found.group(1) or found.group(2) for found in _OF_ANOTHER.finditer(failure.text))
    return failure.of_others or any(int(number) != rank for number in found)


def latest(lines: Sequence[Line]) -> Line | None:
    """The line that was written last, by the clock that the first one with a time has; else the first."""
    clock = next((line.moment.clock for line in lines if line.moment), None)
    timed = [(line.moment.seconds, line) for line in lines if line.moment and line.moment.clock == clock]
    return max(timed, key=lambda entry: entry[0])[1] if timed else next(iter(lines), None)


def clean(line: str) -> str:
    """A line of a log without colours and control characters."""
    return _ESCAPES.sub("", line[:LONGEST_LOG_LINE]).rstrip()


def without_colours(line: str) -> str:
    """A line without the escape sequences of a terminal."""
    return _ESCAPES.sub("", line[:LONGEST_LINE])


def last_written(line: str) -> str:
    """What a terminal shows in the end of a line with carriage returns: a progress bar is one line for hours."""
    parts = [part for part in line[-LONGEST_LINE:].split("\r") if part.strip()]
    return parts[-1] if parts else ""


def read_moment(text: str) -> Moment | None:
    """The time at the beginning of a line: ISO 8601, glog's, syslog's; None where there is none that can be one."""
    for pattern, make in ((_DATED, _dated), (_GLOG, _glog), (_SYSLOG, _syslog)):
        if found := pattern.search(text, 0, _STAMP_WITHIN):
            try:
                return make(found)
            except (ValueError, OverflowError):
                return None
    return None


def _dated(found: re.Match[str]) -> Moment:
    *parts, fraction, zone = found.groups()
    seconds = _seconds(*map(int, parts), fraction=fraction)
    if zone is None:
        return Moment("local", seconds, found.group(0))
    ahead = 0 if zone == "Z" else int(f"{zone[0]}1") * (int(zone[1:3]) * 60 + int(zone[-2:])) * 60
    return Moment("unix", seconds - ahead, found.group(0))


def _glog(found: re.Match[str]) -> Moment:
    *parts, fraction = found.groups()
    seconds = _seconds(_LEAP_YEAR, *map(int, parts), fraction=fraction)
    return Moment("yearless", seconds, found.group(0).lstrip("[IWEFD"))


def _syslog(found: re.Match[str]) -> Moment:
    month, *parts = found.groups()
    seconds = _seconds(_LEAP_YEAR, _MONTHS.index(month) + 1, *map(int, parts), fraction=None)
    return Moment("yearless", seconds, found.group(0))


def _seconds(*parts: int, fraction: str | None) -> float:
    """Seconds since 1970 of year, month, day, hour, minute and second, as if they were UTC."""
    year, month, day, hour, minute, second = parts
    whole = datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc).timestamp()
    return whole + float(f"0.{fraction or 0}")


def _without(text: str, moment: Moment | None) -> str:
    """The text without the time in front of it."""
    if moment is None:
        return text.strip()
    before, _, after = text.partition(moment.text)
    return f"{'' if re.fullmatch(r'[^A-Za-z]*[IWEFD]?', before) else before}{after}".strip(" \t[]|,:-")


class _Extra(msgspec.Struct):
    py_callstack: str = ""
    timestamp: str | int | float | None = None


class _Message(msgspec.Struct):
    message: str = ""
    extraInfo: _Extra = msgspec.field(default_factory=_Extra)  # noqa: N815 - torchelastic's word


class _ErrorFile(msgspec.Struct):
    message: _Message | str


_ERROR_FILE = decoding.decoder(_ErrorFile)


def is_error_file(first_line: str) -> bool:
    """Whether a file begins as torchelastic's error.json."""
    return re.match(r'^\s*\{\s*"message"\s*:', first_line) is not None


def parse_error_file(text: str) -> Failure:
    """Read what `record` of torch.distributed.elastic leaves of a failed rank (error_handler.py: record_exception).

    `timestamp` is in whole seconds since 1970. Raises ValueError where it is no such file.
    """
    if len(text) > LARGEST_ERROR_FILE:
        raise ValueError(f"is larger than {LARGEST_ERROR_FILE >> 20} MiB: is no error.json of torchelastic")
    try:
        found = _ERROR_FILE.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"is no error.json of torchelastic: {error}") from None
    has_type = not isinstance(found.message, str)
    told = _Message(message=found.message) if isinstance(found.message, str) else found.message
    where = _raised_in(told.extraInfo.py_callstack, told.message)
    first_line = clean(told.message.partition("\n")[0])
    text, of_others = _kept(first_line), _is_of_others(first_line[:LONGEST_TEXT])
    exception = _EXCEPTION_TYPE.match(text) if has_type else None
    moment = _unix(told.extraInfo.timestamp)
    return Failure(text, where, moment, 1, of_others, exception=exception.group(1) if exception else "")


def _raised_in(callstack: str, message: str) -> str:
    """The innermost place in the program of the traceback in front of an exception's own line; empty without one.

    `message` is "Type: text", as record_exception writes it, and the call stack has it behind the module's name. Lines
    of its text, and of the exceptions that it came of, can look like a traceback and hold anything.
    """
    said = message.removesuffix(": ")
    before = callstack.removesuffix("\n").removesuffix(said)
    if not callstack.startswith(f"{before}{said}"):  # notes follow
        before = callstack[: max(callstack.find(said), 0)]
    lines = before[-_CALLSTACK_CHARACTERS:].split("\n")
    if re.fullmatch(r"[\w.<>]{0,1000}", lines.pop()) is None:
        return ""
    frames = itertools.takewhile(lambda line: line.startswith("  "), reversed(lines))
    return next(filter(None, map(_where, frames)), "")


def _where(line: str) -> str:
    """The place that a line of a traceback names, where it is in the program; empty for other lines."""
    found = _CODE.match(line)
    if found is None or pyspy_json.is_installed(found.group(1)):
        return ""
    place = f"{found.group(3)} ({found.group(1).rpartition('/')[2]}:{found.group(2)})"
    return place if secret_forms.mask(place) == place else ""


def _unix(timestamp: str | float | None) -> Moment | None:
    try:
        seconds = float(timestamp) if timestamp is not None else None
        if seconds is None:
            return None
        text = datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return None
    return Moment("unix", seconds, text)
