"""Output on a terminal: colours and line width."""

import contextlib
import os
import shutil
import sys
from typing import TextIO

import click

WIDEST = 110  # characters; longer lines are hard to read

_USUAL = os.terminal_size((WIDEST, 24))  # if there is no terminal. COLUMNS is not used then: readline(3) may set it


def is_colored() -> bool:
    """True if standard output is a terminal that is not dumb, and NO_COLOR is not set (no-color.org)."""
    return _is_terminal(sys.stdout) and not _is_dumb() and not os.environ.get("NO_COLOR")


def can_write_over(stream: TextIO) -> bool:
    """True if a line on this stream can be rewritten: the stream is a terminal that is not dumb."""
    return _is_terminal(stream) and not _is_dumb()


def columns() -> int:
    """Return the number of characters in a line: COLUMNS, else the width of the terminal, else `WIDEST`."""
    return _size().columns


def width() -> int:
    """Return the width for wrapped text: the width of the terminal, but at most `WIDEST` characters."""
    return min(columns(), WIDEST)


def complain(message: str) -> None:
    """Print an error message on standard error. If standard error is closed, do nothing.

    Control characters are escaped, because the message may quote any file.
    """
    from hangwatch import words  # slow to import, and not needed by `--version`

    with contextlib.suppress(OSError):
        click.echo("\n".join(map(words.printable, f"hangwatch: {message}".split("\n"))), err=True)


def show(answer: str) -> None:
    """Print text, with its colours on a terminal that shows them."""
    click.echo(answer, nl=False, color=is_colored())


def _size() -> os.terminal_size:
    return shutil.get_terminal_size(_USUAL) if _is_terminal(sys.stdout) else _USUAL


def _is_terminal(stream: TextIO | None) -> bool:
    """True if the stream is an open terminal."""
    return stream is not None and not stream.closed and stream.isatty()


def _is_dumb() -> bool:
    return os.environ.get("TERM", "dumb") == "dumb"
