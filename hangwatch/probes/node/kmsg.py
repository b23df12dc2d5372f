"""Read the kernel log from /dev/kmsg: XIDs, SXIDs, hung tasks, OOM kills, and lines of kernel_lines.toml.

See dev-kmsg in the kernel's ABI docs. A record is `priority,sequence,microseconds since boot,flags;text`. Lines that
begin with a blank continue it.
"""

import errno
import itertools
import os
import re
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from hangwatch.model import Fault, Value
from hangwatch.probes.node import oom_kills
from hangwatch.probes.node.oom_kills import KEYS_KEPT, OomKills
from hangwatch.tables import kernel_lines, xids
from hangwatch.tables.kernel_lines import MatchedLine

# The buffer must hold a whole record, else read fails with EINVAL: 8 KiB since Linux 3.5 (CONSOLE_EXT_LOG_MAX).
RECORD_BYTES = 8192
_FACILITY_BITS = 3  # the lower bits of the priority are the level, see syslog(2)
MAX_RECORDS_PER_READ = 200_000
COUNTED = ("xid", "sxid", "hung_task")
"""The rows of kernel_lines.toml for which every line is counted."""

# Of each row, so that many lines of one row do not displace those of another
LINES_KEPT = 512
MAY_READ = "run as root, or grant CAP_SYSLOG; in a container, mount /dev/kmsg and allow the device"

_RECORDS = re.compile(rb"^\d{1,9},(\d{1,20}),(\d{1,20}),[^;\n]*;.*\n", re.MULTILINE)
_RECORD = re.compile(r"(\d{1,9}),(\d{1,20}),(\d{1,20}),[^;]*;(.*)", re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\\x1b\[[0-9;]*[A-Za-z]")  # kmsg writes an escape character as \x1b
_LITERALS = ("\x1b", "\\x1b")  # with those of `kernel_lines`; an escape may split any literal


class KernelRecord(Value, frozen=True):
    """A record of the kernel log. `boot_seconds` is the time since boot. `text` has no terminal escapes."""

    sequence: int
    boot_seconds: float
    text: str


class LoggedLine(MatchedLine, frozen=True, kw_only=True):
    """A line of the kernel log that matches a row of kernel_lines.toml. "Problem cleared" lines do not count."""

    boot_seconds: float
    text: str


class KernelEvents(Value, frozen=True):
    """The newest line of each row of kernel_lines.toml and subject, of an XID or SXID also of each code and severity.

    The oldest comes first. `counts` are the totals by row, subject and code; for a hung task by comm, with code 0.
    `missed` counts the records that the kernel overwrote before they were read. `oom` are the OOM kills.
    """

    lines: tuple[LoggedLine, ...] = ()
    counts: tuple[tuple[str, str, int, int], ...] = ()
    missed: int = 0
    oom: OomKills = OomKills()


def parse_record(raw: str) -> KernelRecord | None:
    """Parse a record of /dev/kmsg; None for anything else, such as a continuation line.

    The text is cut to the length that patterns search. It is "" if a program wrote the record. It is not trusted,
    because processes choose names in it.
    """
    found = _RECORD.match(raw)
    if found is None:
        return None
    is_kernels = int(found.group(1)) >> _FACILITY_BITS == 0  # programs may write records, but not as facility 0
    text = _ESCAPES.sub("", found.group(4).partition("\n")[0][: kernel_lines.LONGEST_LINE]).strip() * is_kernels
    return KernelRecord(sequence=int(found.group(2)), boot_seconds=int(found.group(3)) / 1e6, text=text)


@cache
def _candidates() -> re.Pattern[bytes]:
    """Return a pattern that every record with a known line or an OOM kill contains. Few others do."""
    literals = (*_LITERALS, *kernel_lines.literals(), *oom_kills.LITERALS)
    return re.compile("|".join(map(re.escape, literals)).encode())


class KernelLog:
    """A reader of kernel logs that continues where the last read ended.

    A read also returns earlier lines, up to a limit. It parses only new records.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followed: dict[Path, _Follower] = {}

    def read(self, path: Path, since_boot_seconds: float = 0.0) -> KernelEvents | Fault | None:
        """Return the lines of the log at `path` since this time, perhaps also earlier lines; None without a log."""
        with self._lock:
            follower = self._followed.get(path)
            try:
                if follower is None or follower.since_boot_seconds > since_boot_seconds:
                    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                    follower = _Follower(descriptor, since_boot_seconds)
                follower.catch_up()
            except FileNotFoundError:
                return None
            except OSError as error:
                self._followed.pop(path, None)
                remedy = MAY_READ if error.errno in (errno.EPERM, errno.EACCES) else ""
                reason = "PermissionDenied" if remedy else "CannotRead"
                return Fault(subject=str(path), reason=reason, detail=error.strerror or str(error), remedy=remedy)
            self._followed[path] = follower
            return follower.events()


class _Follower:
    """An open kernel log: its last sequence number, and the kept lines. Lines of before its begin are not parsed."""

    def __init__(self, descriptor: int, since_boot_seconds: float) -> None:
        self._descriptor, self.since_boot_seconds = descriptor, since_boot_seconds
        weakref.finalize(self, os.close, descriptor)
        self._partial = b""
        self._last_sequence: int | None = None
        self._missed = 0
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._oom = oom_kills.OomLog()
        self._lines_by_row = defaultdict[str, OrderedDict[str, LoggedLine]](OrderedDict)

    def catch_up(self) -> None:
        since_boot_us = self.since_boot_seconds * 1e6
        for found in itertools.chain.from_iterable(map(_RECORDS.finditer, self._whole_lines())):
            sequence, boot_us = map(int, found.groups())
            if self._last_sequence is not None and sequence > self._last_sequence + 1:
                self._missed += sequence - self._last_sequence - 1
            self._last_sequence = sequence
            if boot_us < since_boot_us or not _candidates().search(found[0]):
                continue
            if (record := parse_record(found[0].decode("utf-8", "replace"))) is not None:
                self._keep(record)

    def _keep(self, record: KernelRecord) -> None:
        for name, subject in kernel_lines.find_ended(record.text):
            self._lines_by_row[name].pop(subject.partition(" ")[0].rstrip(":"), None)
        match = kernel_lines.find(record.text)
        if match is not None:
            self._keep_line(LoggedLine.copy_from(match, boot_seconds=record.boot_seconds, text=record.text[:512]))
        self._oom.read_line(record.text, record.boot_seconds)

    def _keep_line(self, line: LoggedLine) -> None:
        key, kept_as = (line.name, line.comm if line.name == "hung_task" else line.subject, line.code), line.subject
        if line.code:  # a harmless error does not replace another one of the same device
            if key in self._counts and xids.is_detail(line.text):
                return
            kept_as = f"{line.subject} {line.code} {xids.key_of_line(line.code, line.text)}"
        kept = self._lines_by_row[line.name]
        kept[kept_as] = line
        kept.move_to_end(kept_as)
        if len(kept) > LINES_KEPT:
            kept.popitem(last=False)
        if line.name in COUNTED and (key in self._counts or len(self._counts) < KEYS_KEPT):
            self._counts[key] += 1

    def _whole_lines(self) -> Iterator[bytes]:
        """Yield whole lines. A read of the device returns one record; a read of a file may end inside a line."""
        for _ in range(MAX_RECORDS_PER_READ):
            try:
                piece = os.read(self._descriptor, RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:  # records were overwritten: the next read returns the oldest one kept
                    raise
                continue
            if not piece:
                return
            lines, newline, self._partial = (self._partial + piece).rpartition(b"\n")
            yield lines + newline

    def events(self) -> KernelEvents:
        lines = [line for kept in self._lines_by_row.values() for line in kept.values()]
        return KernelEvents(
            lines=tuple(sorted(lines, key=lambda line: line.boot_seconds)),
            counts=tuple((*key, count) for key, count in sorted(self._counts.items())),
            missed=self._missed,
            oom=self._oom.kills(),
        )


SHARED = KernelLog()
