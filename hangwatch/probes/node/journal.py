"""Formats log lines for the systemd journal: with a priority prefix, so that `journalctl -p warning` works."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

# sd-daemon(3): "<N>" at the start of a line on stderr is its syslog priority.
_DEBUG, _INFO, _WARNING, _ERROR, _CRITICAL = 7, 6, 4, 3, 2


def is_journal(environ: Mapping[str, str], descriptor: int) -> bool:
    """True if `descriptor` is the journal: JOURNAL_STREAM names its device and inode (systemd.exec(5))."""
    try:
        stream = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"


class JournalFormatter(logging.Formatter):
    """Puts `<N>` before every line; omits time and level name, which the journal stores."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Prefix each line, also of a traceback: the journal files lines without a priority as information."""
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
