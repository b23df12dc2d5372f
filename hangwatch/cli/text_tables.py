"""Tables on the terminal. Cells are printed without markup: names and messages come from jobs of any user."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hangwatch import words
from hangwatch.cli import screen

if TYPE_CHECKING:
    from hangwatch.state.status import EngineStatus

_COLORS = {"OK": "green", "UNKNOWN": "magenta", "WARNING": "yellow", "CRITICAL": "red"}
_STYLES = {"CRITICAL": "bold red", "hung": "bold red", "WARNING": "yellow", "stalled": "yellow", "suspected": "yellow"}
"""The style of a cell that begins with this word."""


_LEAST_COLUMNS = 30  # of the last column of a table; fewer would break words


def _is_too_narrow(rows: Sequence[Sequence[str]]) -> bool:
    """True if the screen has too few columns for the text in the last column of these rows."""
    *others, last = (max(map(len, cells)) for cells in zip(*rows, strict=True))
    return screen.columns() - sum(others) - 2 * len(others) < min(last, _LEAST_COLUMNS)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> None:
    """Print rows under a header, see `table_text`."""
    click.echo(table_text(header, rows, nothing), color=screen.is_colored())


def table_text(header: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> str:
    """Return rows under a header as text. If there are no rows, return the text `nothing`.

    On a terminal the cells are wrapped, or each is a line on a narrow one. Elsewhere each row is a tab-separated line.
    """
    rows = [[words.printable(" ".join(cell.split())) for cell in row] for row in rows]
    if not rows:
        return nothing
    if not sys.stdout.isatty():
        return "\n".join("\t".join(row) for row in (header, *rows))
    if _is_too_narrow((header, *rows)):
        named = ([f"{name}: {cell}" for name, cell in zip(header, row, strict=True) if cell] for row in rows)
        return "\n".join(
            textwrap.fill(cell, screen.columns(), subsequent_indent="  ") for row in named for cell in (*row, "")
        )
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell.partition(" ")[0], "")) for cell in row))
    # Both width and height are set: with only one of them, rich uses 80 columns for a dumb terminal.
    console = Console(width=screen.columns(), height=1, color_system="standard" if screen.is_colored() else None)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def print_checks(rows: Sequence[Sequence[str]]) -> None:
    """Print a paragraph for each row (name, status, reason, message, remedy)."""
    width, is_colored = max(60, screen.columns()), screen.is_colored()
    margin = 11 + max((len(name) for name, *_ in rows), default=0)
    for name, status, reason, message, remedy in rows:
        colored = click.style(f"{status:10}", fg=_COLORS.get(status), bold=status == "CRITICAL")
        text = message if status == "OK" or not reason else f"{reason}: {message}"
        lines = _wrapped(text, width - margin) or [""]
        lines += [f"   {line}" for line in _wrapped(f"-> {remedy}", width - margin - 3)] if remedy else []
        click.echo(f"{colored}{name:{margin - 10}}{lines[0]}", color=is_colored)
        for line in lines[1:]:
            click.echo(" " * margin + line)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)  # so that `timedatectl set-ntp true` can be copied


def engine_text(engine: EngineStatus) -> str:
    """Return an inference engine as one line: `engine, 4 workers: vLLM (pid7-81, uid 1000), not monitored`."""
    workers = words.count(engine.workers, "worker")
    return words.printable(f"engine, {workers}: {engine.program} ({engine.job_id}, {engine.owner}), not monitored")
