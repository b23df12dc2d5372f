"""Tables for people: every cell is shown as it is, since names and messages come from other people's jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

import click

from hangwatch import words
from hangwatch.cli import screen


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> None:
    """Print rows under a header: folded to a terminal's width, one tab-separated line each for a pipe."""
    rows = [[words.printable(" ".join(cell.split())) for cell in row] for row in rows]
    if not rows:
        click.echo(nothing)
    elif not sys.stdout.isatty():
        for row in (header, *rows):
            click.echo("\t".join(row))
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for name in header:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        colors: Literal["auto"] | None = "auto" if screen.is_colored() else None
        # With a height as well: rich takes a dumb terminal for one of 80 columns, unless it is told both.
        Console(width=screen.columns(), height=1, color_system=colors).print(table)
