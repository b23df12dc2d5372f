"""The progress line of slow commands. On a terminal it is rewritten, and erased at the end."""

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
_LEAST_SHOWN_BYTES = 64 << 20

T = TypeVar("T")


class Step:
    """The current step of a command. One thread works and sets the step, another thread shows it.

    `what` is the text. `bytes_read` is the number of bytes read in this step. The line shows it from 64 MiB on.
    """

    def __init__(self) -> None:
        self.what = ""
        self.bytes_read = 0

    def say(self, what: str) -> None:
        """Set the text of the current step, and set `bytes_read` to 0."""
        self.what, self.bytes_read = what, 0

    def each(self, things: Iterable[T], total: int, doing: str) -> Iterator[T]:
        """Yield the things. Before each one, set the text of the step to `DOING 3 of 200: THING`."""
        for number, thing in enumerate(things, 1):
            self.say(f"{doing} {number:,} of {total:,}: {thing}")
            yield thing

    def line(self) -> str:
        """Return the step as one line, cut to the width of the terminal."""
        read = f" ({self.bytes_read >> 20:,} MiB)" if self.bytes_read >= _LEAST_SHOWN_BYTES else ""
        try:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return words.elided(self.what, (columns or screen.columns()) - len(read) - 1) + read


@contextmanager
def shown(quiet_seconds: float = QUIET_SECONDS) -> Iterator[Step]:
    """Show the current step on standard error, if that is a terminal and the work takes longer than `quiet_seconds`."""
    waiting = Step()
    if not screen.can_write_over(sys.stderr):
        yield waiting
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(waiting, done, quiet_seconds), name="waiting", daemon=True)
    thread.start()
    try:
        yield waiting
    finally:
        done.set()
        thread.join()


def _show(waiting: Step, done: threading.Event, quiet_seconds: float) -> None:
    if done.wait(quiet_seconds):
        return
    while True:
        click.echo(f"\r\x1b[K{waiting.line()}", nl=False, err=True)
        if done.wait(REFRESH_SECONDS):
            break
    click.echo("\r\x1b[K", nl=False, err=True)
