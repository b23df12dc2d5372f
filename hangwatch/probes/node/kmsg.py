"""The kernel's log through /dev/kmsg: XIDs, SXIDs, hung tasks, OOM kills (`oom_kills`), and lines of kernel_lines.toml.

See dev-kmsg in the kernel's ABI docs.

A record is `priority,sequence,microseconds since boot,flags;text`, followed by lines that begin with a blank.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path

from hangwatch.model import Fault, Value
from hangwatch.probes.node import oom_kills
from hangwatch.probes.node.oom_kills import OomKills
from hangwatch.tables import kernel_lines

# The kernel wants room for a whole record, and answers EINVAL otherwise: 8 KiB since 3.5, CONSOLE_EXT_LOG_MAX.
RECORD_BYTES = 8192
MAX_RECORDS_PER_READ = 200_000
EVENTS_KEPT = 128  # of each kind: a flood of one hides no other
KEYS_KEPT = 512
LINES_KEPT = 512  # of each row of kernel_lines.toml, by what they name
MAY_READ = "run as root, or grant CAP_SYSLOG; in a container, mount /dev/kmsg and allow the device"

_RECORD = re.compile(r"(\d+),(\d+),(\d+),[^;]*;(.*)", re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\\x1b\[[0-9;]*[A-Za-z]")  # kmsg writes an escape character as \x1b
_PATTERNS = (
    ("xid", re.compile(r"^NVRM: Xid \((?:PCI:)?(?P<subject>[0-9A-Fa-f:.]+)\): (?P<code>\d+)")),
    ("sxid", re.compile(r"^nvidia-nvswitch\d*: SXid \((?:PCI:)?(?P<subject>[0-9A-Fa-f:.]+)\): (?P<code>\d+)")),
    ("hung_task", re.compile(r"task (?P<subject>.{1,64}?):(?P<code>\d+) blocked for more than \d+ seconds")),
)


class KernelRecord(Value, frozen=True):
    """One record. `boot_seconds` is the time since boot, `text` free of terminal escapes."""

    sequence: int
    boot_seconds: float
    text: str


class KernelEvent(Value, frozen=True):
    """A record that matters. `kind` is xid, sxid or hung_task.

    `subject` is the PCI address of the GPU or switch, or the comm of the process; `code` the XID, or the pid.
    """

    kind: str
    subject: str
    code: int
    boot_seconds: float
    text: str


class SaidLine(Value, frozen=True):
    """A line of which kernel_lines.toml has a row, see `kernel_lines.Said`; one whose trouble is over is none."""

    name: str
    subject: str
    where: str
    boot_seconds: float
    text: str


class KernelEvents(Value, frozen=True):
    """What the log holds: the newest event of each kind, subject and code, oldest first, and how many were seen in all.

    `lines` are the newest of each row and subject, oldest first. `counts` is by kind, subject and code; pids are not
    told apart, their code is 0. `missed` counts records that the kernel overwrote before they were read. `oom` are the
    processes that were killed for lack of memory.
    """

    events: tuple[KernelEvent, ...] = ()
    lines: tuple[SaidLine, ...] = ()
    counts: tuple[tuple[str, str, int, int], ...] = ()
    missed: int = 0
    oom: OomKills = OomKills()


def parse_record(raw: str) -> KernelRecord | None:
    """One record as /dev/kmsg gives it; None for anything else, such as a continuation line.

    Of its text so many characters as a pattern is tried on: processes choose names in it, and may write records.
    """
    found = _RECORD.match(raw)
    if found is None:
        return None
    text = _ESCAPES.sub("", found.group(4).partition("\n")[0][: kernel_lines.LONGEST_LINE]).strip()
    return KernelRecord(sequence=int(found.group(2)), boot_seconds=int(found.group(3)) / 1e6, text=text)


def parse_event(record: KernelRecord) -> KernelEvent | None:
    """The event that a record tells of, None for most."""
    for kind, pattern in _PATTERNS:
        found = pattern.search(record.text)
        if found:
            return KernelEvent(
                kind=kind,
                subject=found.group("subject"),
                code=int(found.group("code")),
                boot_seconds=record.boot_seconds,
                text=record.text[:512],
            )
    return None


class KernelLog:
    """Follows the log: each read gives what came before too, bounded, and costs only what is new."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followed: dict[Path, _Follower] = {}

    def read(self, path: Path) -> KernelEvents | Fault | None:
        """The events of the log at `path`; None where there is no log. Never blocks."""
        with self._lock:
            follower = self._followed.get(path)
            try:
                follower = follower or _Follower(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
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
    """One open log. Holds the last sequence number, and of what it read only what matters."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._rest = b""
        self._last_sequence: int | None = None
        self._missed = 0
        self._events: dict[str, OrderedDict[tuple[str, int], KernelEvent]] = {
            kind: OrderedDict() for kind, _ in _PATTERNS
        }
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._oom = oom_kills.Listener()
        self._said: dict[str, OrderedDict[str, SaidLine]] = {name: OrderedDict() for name in kernel_lines.load()}

    def catch_up(self) -> None:
        for raw in self._lines():
            record = parse_record(raw)
            if record is None:
                continue
            if self._last_sequence is not None and record.sequence > self._last_sequence + 1:
                self._missed += record.sequence - self._last_sequence - 1
            self._last_sequence = record.sequence
            event = parse_event(record)
            if event is not None:
                self._keep(event)
            self._hear(record)
            self._oom.hear(record.text, record.boot_seconds)

    def _hear(self, record: KernelRecord) -> None:
        for name, subject in kernel_lines.ended(record.text):
            self._said[name].pop(subject, None)
        said = kernel_lines.find(record.text)
        if said is None:
            return
        kept = self._said[said.name]
        kept[said.subject] = SaidLine(**said._asdict(), boot_seconds=record.boot_seconds, text=record.text[:512])
        kept.move_to_end(said.subject)
        if len(kept) > LINES_KEPT:
            kept.popitem(last=False)

    def _keep(self, event: KernelEvent) -> None:
        kept = self._events[event.kind]
        kept[event.subject, event.code] = event
        kept.move_to_end((event.subject, event.code))
        if len(kept) > EVENTS_KEPT:
            kept.popitem(last=False)
        key = (event.kind, event.subject, event.code if event.kind.endswith("xid") else 0)
        if key in self._counts or len(self._counts) < KEYS_KEPT:
            self._counts[key] += 1

    def _lines(self) -> Iterator[str]:
        """Whole lines; the device gives one record a read, a regular file any piece."""
        for _ in range(MAX_RECORDS_PER_READ):
            try:
                piece = os.read(self._descriptor, RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:  # records were overwritten: the next read goes on with the oldest left
                    raise
                continue
            if not piece:
                return
            *lines, self._rest = (self._rest + piece).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)

    def events(self) -> KernelEvents:
        events = [event for kept in self._events.values() for event in kept.values()]
        lines = [line for kept in self._said.values() for line in kept.values()]
        return KernelEvents(
            events=tuple(sorted(events, key=lambda event: event.boot_seconds)),
            lines=tuple(sorted(lines, key=lambda line: line.boot_seconds)),
            counts=tuple((*key, count) for key, count in sorted(self._counts.items())),
            missed=self._missed,
            oom=self._oom.kills(),
        )


SHARED = KernelLog()
