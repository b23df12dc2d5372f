"""Write log lines to stderr with the priority by which the systemd journal sorts them (`journalctl -p warning`)."""

import logging
import os
import select
from collections.abc import Mapping
from typing import TextIO

from hangwatch import words

# sd-daemon(3): "<N>" at the start of a line on stderr is its syslog priority.
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def is_journal(environ: Mapping[str, str], descriptor: int) -> bool:
    """True if `descriptor` writes to the journal: JOURNAL_STREAM holds its device and inode (systemd.exec(5))."""
    try:
        stream = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"


class NonBlockingHandler(logging.Handler):
    """A log handler that drops a line if nothing reads the log, for example if journald hangs.

    A thread that waits to write a line would stop the monitoring. The next line that can be written says how many
    were lost.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._descriptor = stream.fileno()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)
        self._lost = 0
        self._is_inside_line = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, if that is possible at once. The caller holds the lock of the handler."""
        try:
            if self._lost and self._write(_lost_lines(self._lost)):
                self._lost = 0
            if self._lost or not self._write(record):
                self._lost += 1
        except Exception:
            self.handleError(record)

    def _write(self, line: logging.LogRecord) -> bool:
        """Write a line in pieces that a writable pipe takes without waiting. Return False if a piece was dropped."""
        data = f"{self._is_inside_line * chr(10)}{self.format(line)}\n".encode("utf-8", "backslashreplace")
        for begin in range(0, len(data), select.PIPE_BUF):
            if not self._poll.poll(0):
                return False
            os.write(self._descriptor, data[begin : begin + select.PIPE_BUF])
            self._is_inside_line = begin + select.PIPE_BUF < len(data)
        return True


def _lost_lines(number: int) -> logging.LogRecord:
    text = f"{words.count(number, 'log line')} lost: nothing read the log"
    return logging.LogRecord("hangwatch", logging.WARNING, __file__, 0, text, None, None)


class JournalFormatter(logging.Formatter):
    """A formatter that puts `<N>` before every line. It omits time and level, which the journal stores itself."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Put the priority before each line, also before the lines of a traceback.

        The journal stores a line without a priority as information.
        """
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), _DEBUG)
        prefix = f"<{priority}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())
