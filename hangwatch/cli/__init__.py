"""The command line: the only room that prints or exits.

Exit codes: 0 done; 1 a negative answer (the demo was wrong, no such job);
2 bad input or a machine that is not set up, with a sentence that says what to type; 70 an error inside hangwatch;
75 what may pass by itself (a port that is taken): systemd starts the daemon again, which it does not after 2.
`hangwatch check` has its own: 0/1/2/3 = OK/WARNING/CRITICAL/UNKNOWN.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import signal
import sys
from typing import Any, TextIO

import click

from hangwatch import __version__
from hangwatch.cli import screen
from hangwatch.errors import TemporaryError, UserError

INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits(3)
TRY_AGAIN = 75  # EX_TEMPFAIL

_MODULES = {
    "explain": ("explain",),
    "check": ("check",),
    "incidents": ("incidents", "report"),
    "many_nodes": ("merge",),
    "selftest": ("selftest",),
    "dump": ("dump",),
    "status": ("status",),
    "top": ("top",),
    "daemon_commands": ("config", "demo", "run"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


class Commands(click.Group):
    """Commands by name, each imported when it is asked for: the daemon carries nothing of the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        """All names, sorted as in the help."""
        return sorted(_MODULE_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """The command of that name; None where there is none."""
        if cmd_name not in _MODULE_OF:
            return None
        module = importlib.import_module(f"hangwatch.cli.{_MODULE_OF[cmd_name]}")
        found: dict[str | None, click.Command] = {command.name: command for command in module.COMMANDS}
        return found[cmd_name]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is asked for. Raises click.UsageError, with the nearest name, where there is none."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib  # which no name that is right needs

            if near := difflib.get_close_matches(args[0], _MODULE_OF, n=1):
                raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from None
            raise


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@screen.no_pager_option
@click.version_option(__version__, prog_name="hangwatch")
def hangwatch() -> None:
    """Finds hung training jobs by GPU power, takes the stacks of every rank, and names the odd one.

    \b
    Try it without a GPU:      hangwatch demo
    Who hangs on this node?    hangwatch dump
    Dumps you already have:    hangwatch explain trace-*.out
    Is this node fit?          hangwatch check
    Watch it for good:         hangwatch run

    Exit codes: 0 done, 1 a negative answer, 2 bad input (the message says what to type), 70 an error inside hangwatch,
    75 what may pass by itself: the port is taken.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit; no exception reaches the user as a traceback, unless HANGWATCH_DEBUG is set."""
    _open_what_is_closed()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = _run(arguments)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nothing is left that a Ctrl-C could interrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _drop(stream)
    sys.exit(code)


def _open_what_is_closed() -> None:
    """A standard stream that whoever started us has closed (`>&-`) is /dev/null: no file of ours may get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _run(arguments: list[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character must not end a command
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _refuse_empty(sys.argv[1:] if arguments is None else arguments)
        answer: Any = hangwatch.main(args=arguments, prog_name="hangwatch", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        return 2
    except click.Abort:
        with contextlib.suppress(OSError):
            click.echo("stopped", err=True)
        return 130
    except TemporaryError as error:
        screen.complain(str(error))
        return TRY_AGAIN
    except UserError as error:
        screen.complain(str(error))
        return 2
    except BrokenPipeError:  # `hangwatch explain ... | head`
        _drop(sys.stdout)
        return 0
    except OSError as error:
        if os.environ.get("HANGWATCH_DEBUG"):
            raise
        _drop(sys.stdout)
        where = f"{error.filename}" if error.filename else "standard output, or a file that was written"
        screen.complain(f"{where}: {error.strerror or error}")
        return 2
    except Exception as error:
        if os.environ.get("HANGWATCH_DEBUG"):
            raise
        logging.getLogger(__name__).debug("internal error", exc_info=True)
        screen.complain(
            f"an error inside hangwatch: {type(error).__name__}: {error}\n"
            "  this is a bug; please report it with what HANGWATCH_DEBUG=1 prints in front of the same command"
        )
        return INTERNAL_ERROR
    return answer if isinstance(answer, int) else 0


def _refuse_empty(arguments: list[str]) -> None:
    """An argument that is "" would be the current folder as a path. Raises UserError; options of others may be none."""
    for before, word in zip(["", *arguments], arguments, strict=False):
        if not word and before != "--via-options":
            raise UserError("an argument is empty: is a variable of the shell not set?")


def _drop(stream: TextIO) -> None:
    """What is still to be printed has nowhere to go: the interpreter's own flush at exit must not fail over it."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
