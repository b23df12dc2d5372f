"""Format log lines for the systemd journal. Their priority prefix makes `journalctl -p warning` work."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

# sd-daemon(3): "<N>" at the start of a line on stderr is its syslog priority.
_DEBUG, _INFO, _WARNING, _ERROR, _CRITICAL = 7, 6, 4, 3, 2


def is_journal(environ: Mapping[str, str], descriptor: int) -> bool:
    """True if `descriptor` writes to the journal: JOURNAL_STREAM holds its device and inode (systemd.exec(5))."""
    try:
        stream = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"


class JournalFormatter(logging.Formatter):
    """A formatter that puts `<N>` before every line. It omits time and level, which the journal stores itself."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Put the priority before each line, also before the lines of a traceback.

        The journal stores a line without a priority as information.
        """
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
