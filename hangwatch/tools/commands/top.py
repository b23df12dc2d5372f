"""`hangwatch top`: what `hangwatch status` prints, again every second. The terminal is restored at the end."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from hangwatch import words
from hangwatch.cli import screen
from hangwatch.cli.config_choice import settings_from
from hangwatch.cli.options import config_option, url_option
from hangwatch.cli.usage_errors import InputError
from hangwatch.errors import UserError
from hangwatch.state.status import Status
from hangwatch.tools.commands.status_client import decode_status, fetch_status
from hangwatch.tools.commands.status_tables import status_text

REFRESH_SECONDS = 1.0


@click.command()
@config_option
@url_option
def top(config_path: Path | None, url: str | None) -> int:
    """Show jobs, GPUs and checks live, as `hangwatch status` prints them; Ctrl-C quits."""
    settings, source = settings_from(config_path)
    return watch(lambda: decode_status(fetch_status(settings, source, url)))


def watch(ask: Callable[[], Status]) -> int:
    """Call `ask` and show the returned status every second until the user quits. Return the exit code.

    If `ask` raises UserError, show the error above the last status and continue. Raises InputError if there is no
    suitable terminal.
    """
    if not screen.can_write_over(sys.stdout):
        raise InputError(
            "a terminal is needed, and output is a pipe, a file or a dumb terminal\n"
            "  `hangwatch status` prints the same tables once; `hangwatch status --json` is for programs"
        )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    shown, answered = "waiting for the daemon", ""
    try:
        with Console().screen() as whole_screen:
            while True:
                problem: list[str] = []
                try:
                    shown, answered = status_text(ask()), f"as of {words.utc(time.time())}:"
                except UserError as error:
                    problem = ["retrying every second:", *map(words.printable, str(error).splitlines()), "", answered]
                whole_screen.update(Text.from_ansi("\n".join([*problem, shown]), no_wrap=True, overflow="ellipsis"))
                time.sleep(REFRESH_SECONDS)
    except KeyboardInterrupt as ended:
        return int(ended.args[0])


def _end(number: int, _: object) -> None:
    """End the loop, which restores the terminal, with the exit code of a shell for this signal; 0 for Ctrl-C."""
    raise KeyboardInterrupt(0 if number == signal.SIGINT else 128 + number)


COMMANDS = (top,)
