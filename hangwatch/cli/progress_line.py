"""What a command does that takes long: one line on a terminal, written over and gone at the end."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import click

from hangwatch import words
from hangwatch.cli import screen

QUIET_SECONDS = 2.0
REFRESH_SECONDS = 0.5
_BYTES_SAID = 64 << 20

T = TypeVar("T")


class Waiting:
    """What is done now. Set by the thread that does it, and shown by another one, so nothing waits to be shown."""

    def __init__(self) -> None:
        self.what = ""
        self.bytes_read = 0
        """Of the file that `what` names; said where it is big."""

    def say(self, what: str) -> None:
        """Say what is done from now on, in a few words."""
        self.what, self.bytes_read = what, 0

    def each(self, things: Iterable[T], total: int, doing: str) -> Iterator[T]:
        """These, each said as `doing 3 of 200: thing` while it is at hand."""
        for number, thing in enumerate(things, 1):
            self.say(f"{doing} {number:,} of {total:,}: {thing}")
            yield thing

    def line(self) -> str:
        """What is shown, in one line of the terminal."""
        read = f" ({self.bytes_read >> 20:,} MiB)" if self.bytes_read >= _BYTES_SAID else ""
        try:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return words.elided(self.what, (columns or screen.columns()) - len(read) - 1) + read


@contextmanager
def shown(quiet_seconds: float = QUIET_SECONDS) -> Iterator[Waiting]:
    """Show what is done on standard error, where that is a terminal, once it takes longer than `quiet_seconds`."""
    waiting = Waiting()
    if not screen.can_write_over(sys.stderr):
        yield waiting
        return
    over = threading.Event()
    showing = threading.Thread(target=_show, args=(waiting, over, quiet_seconds), name="waiting", daemon=True)
    showing.start()
    try:
        yield waiting
    finally:
        over.set()
        showing.join()


def _show(waiting: Waiting, over: threading.Event, quiet_seconds: float) -> None:
    if over.wait(quiet_seconds):
        return
    while True:
        click.echo(f"\r\x1b[K{waiting.line()}", nl=False, err=True)
        if over.wait(REFRESH_SECONDS):
            break
    click.echo("\r\x1b[K", nl=False, err=True)
