"""What a person sees of an answer: its colours, its width, and a pager where it is longer than the screen."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

import click

WIDEST = 110  # characters of a sentence that the eye still follows

_NO_PAGER = "hangwatch.no_pager"
_Command = TypeVar("_Command", bound=Callable[..., Any])
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


def complain(message: str) -> None:
    """Say on standard error what is wrong; it may quote a file of others, so nothing in it acts on the terminal.

    Where nothing can be written there the exit code says it alone.
    """
    from hangwatch import words  # costs as much as all that `--version` needs

    with contextlib.suppress(OSError):
        click.echo("\n".join(map(words.printable, f"hangwatch: {message}".split("\n"))), err=True)


def no_pager_option(command: _Command) -> _Command:
    """The option that keeps the pager away from what `show` prints; on the group as on each command."""
    told = "Print what is longer than the screen, too; so does an empty PAGER, or `PAGER=cat`."
    return click.option("--no-pager", is_flag=True, expose_value=False, callback=_keep_away, help=told)(command)


def _keep_away(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.meta[_NO_PAGER] = True  # shared by a group and its command


def show(answer: str) -> None:
    """Print; on a terminal with fewer lines by PAGER, else less(1), which leaves it on the screen (as git(1) does)."""
    wide, high = _size()
    rows = sum(-(-max(len(click.unstyle(line)), 1) // wide) for line in answer.splitlines())
    is_watched = _is_terminal(sys.stdout) and _is_terminal(sys.stdin)
    if rows < high or _is_dumb() or not is_watched or not _is_pager_wanted():
        click.echo(answer, nl=False, color=is_colored())
        return
    os.environ.setdefault("LESS", "FRX")
    click.echo_via_pager(answer.removesuffix("\n"))


def _is_pager_wanted() -> bool:
    """False for --no-pager and for a PAGER that pages nothing, as git(1) and systemctl(1) read it, or is no command."""
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
    """False as well for a stream that was closed by whoever started us, or that has been read to its end."""
    return stream is not None and not stream.closed and stream.isatty()


def _is_dumb() -> bool:
    return os.environ.get("TERM", "dumb") == "dumb"
