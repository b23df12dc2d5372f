"""Output for people: colours, line width, and a pager for output longer than the screen."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

import click

WIDEST = 110  # characters in a line that is still easy to read

_NO_PAGER = "hangwatch.no_pager"
_Command = TypeVar("_Command", bound=Callable[..., Any])
_USUAL = os.terminal_size((WIDEST, 24))  # without a terminal; COLUMNS is not used: readline(3) sets it


def is_colored() -> bool:
    """True if standard output shows colours: a terminal that is not dumb, and no NO_COLOR (no-color.org)."""
    return _is_terminal(sys.stdout) and not _is_dumb() and not os.environ.get("NO_COLOR")


def can_write_over(stream: TextIO) -> bool:
    """True if a line on this stream can be rewritten: a terminal that is not dumb."""
    return _is_terminal(stream) and not _is_dumb()


def columns() -> int:
    """Return the characters in a line: COLUMNS, else the terminal's width."""
    return _size().columns


def width() -> int:
    """Return the width of wrapped text: that of the screen, at most `WIDEST`."""
    return min(columns(), WIDEST)


def complain(message: str) -> None:
    """Print an error on standard error, if possible. Control characters are escaped: it may quote any file."""
    from hangwatch import words  # slow to import, and not needed by `--version`

    with contextlib.suppress(OSError):
        click.echo("\n".join(map(words.printable, f"hangwatch: {message}".split("\n"))), err=True)


def no_pager_option(command: _Command) -> _Command:
    """Add the option --no-pager to a command or group."""
    text = "Print long output without a pager, as with PAGER=cat."
    return click.option("--no-pager", is_flag=True, expose_value=False, callback=_set_no_pager, help=text)(command)


def _set_no_pager(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.meta[_NO_PAGER] = True  # shared by a group and its command


def show(answer: str) -> None:
    """Print text. If it is longer than the terminal, use PAGER or less(1), as git(1) does."""
    screen_columns, screen_rows = _size()
    rows = sum(-(-max(len(click.unstyle(line)), 1) // screen_columns) for line in answer.splitlines())
    is_interactive = _is_terminal(sys.stdout) and _is_terminal(sys.stdin)
    if rows < screen_rows or _is_dumb() or not is_interactive or not _is_pager_wanted():
        click.echo(answer, nl=False, color=is_colored())
        return
    os.environ.setdefault("LESS", "FRX")
    click.echo_via_pager(answer.removesuffix("\n"))


def _is_pager_wanted() -> bool:
    """False for --no-pager, and if PAGER is empty, `cat` or not a command line. git(1) does the same."""
    context = click.get_current_context(silent=True)
    if context is not None and context.meta.get(_NO_PAGER, False):
        return False
    try:
        return shlex.split(os.environ.get("PAGER", "less")) not in ([], ["cat"])
    except ValueError:
        return False


def _size() -> os.terminal_size:
    return shutil.get_terminal_size(_USUAL) if _is_terminal(sys.stdout) else _USUAL


def _is_terminal(stream: TextIO | None) -> bool:
    """True for a terminal, False also for a closed stream."""
    return stream is not None and not stream.closed and stream.isatty()


def _is_dumb() -> bool:
    return os.environ.get("TERM", "dumb") == "dumb"
