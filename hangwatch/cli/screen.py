"""What a person sees of an answer: its colours, its width, and a pager where it is longer than the screen."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO

import click

WIDEST = 110  # characters of a sentence that the eye still follows

_USUAL = os.terminal_size((WIDEST, 24))  # of what is no terminal, whatever COLUMNS says there: readline(3) sets it


def is_colored() -> bool:
    """Whether standard output takes colours: a terminal that is not dumb, and no NO_COLOR (no-color.org)."""
    return _is_terminal(sys.stdout) and not _is_dumb() and not os.environ.get("NO_COLOR")


def can_write_over(stream: TextIO) -> bool:
    """Whether a line may take the place of the one before: on a terminal that knows how."""
    return _is_terminal(stream) and not _is_dumb()


def columns() -> int:
    """Characters in a line: COLUMNS, else what the terminal says."""
    return _size().columns


def width() -> int:
    """Where sentences wrap: at the edge of the screen, and never beyond `WIDEST`."""
    return min(columns(), WIDEST)


def show(answer: str) -> None:
    """Print; on a terminal with fewer lines by PAGER, else less(1), which leaves it on the screen (as git(1) does)."""
    wide, high = _size()
    rows = sum(-(-max(len(click.unstyle(line)), 1) // wide) for line in answer.splitlines())
    if rows < high or _is_dumb() or not (_is_terminal(sys.stdout) and _is_terminal(sys.stdin)):
        click.echo(answer, nl=False, color=is_colored())
        return
    os.environ.setdefault("LESS", "FRX")
    click.echo_via_pager(answer.removesuffix("\n"))


def _size() -> os.terminal_size:
    return shutil.get_terminal_size(_USUAL) if _is_terminal(sys.stdout) else _USUAL


def _is_terminal(stream: TextIO | None) -> bool:
    """False as well for a stream that was closed by whoever started us, or that has been read to its end."""
    return stream is not None and not stream.closed and stream.isatty()


def _is_dumb() -> bool:
    return os.environ.get("TERM", "dumb") == "dumb"
