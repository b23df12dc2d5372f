"""Log lines as the systemd journal takes them: a priority in front, so that `journalctl -p warning` works."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

# sd-daemon(3): "<N>" at the start of a line on stderr is its syslog priority.
_DEBUG, _INFO, _WARNING, _ERROR, _CRITICAL = 7, 6, 4, 3, 2


def is_journal(environ: Mapping[str, str], descriptor: int) -> bool:
    """Whether `descriptor` is connected to the journal: JOURNAL_STREAM names its device and inode (systemd.exec(5))."""
    try:
        stream = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"


class JournalFormatter(logging.Formatter):
    """Puts `<N>` before every line of a record; no time and no level name, the journal keeps both."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Each line of a traceback carries the priority: a line without one would be filed as plain information."""
        prefix = f"<{_priority(record.levelno)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def _priority(level: int) -> int:
    for threshold, priority in (
        (logging.CRITICAL, _CRITICAL),
        (logging.ERROR, _ERROR),
        (logging.WARNING, _WARNING),
        (logging.INFO, _INFO),
    ):
        if level >= threshold:
            return priority
    return _DEBUG
