"""The command line: only `cli/` and `tools/commands/` print or exit.

Exit codes:
    0   yes, or done
    1   no, for example: no job was found, or the demo named the wrong rank
    2   bad input, or a machine that is not set up; the message says what to type. systemd does not restart the daemon
    70  an error inside hangwatch
    75  a temporary failure, for example the port is in use. systemd restarts the daemon

`hangwatch check` has its own exit codes: 0/1/2/3 = OK/WARNING/CRITICAL/UNKNOWN.
"""

import contextlib
import gc
import importlib
import io
import logging
import os
import re
import shlex
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
    "cli.check": ("check",),
    "cli.daemon_commands": ("config", "run"),
    "cli.dump": ("dump",),
    "tools.commands.demo": ("demo",),
    "tools.commands.explain": ("explain",),
    "tools.commands.feedback": ("verdict",),
    "tools.commands.incidents": ("incidents", "report"),
    "tools.commands.many_nodes": ("merge",),
    "tools.commands.mcp_server": ("mcp",),
    "tools.commands.selftest": ("selftest",),
    "tools.commands.silence": ("silence",),
    "tools.commands.slow": ("slow",),
    "tools.commands.status": ("status",),
    "tools.commands.timeline": ("timeline",),
    "tools.commands.top": ("top",),
}
_MEANT = {
    "stacks": "dump --stacks",
    "ps": "status",
    "jobs": "status",
    "feedback": "verdict INCIDENT --right (or --wrong)",
    "logs": "explain FILE, or journalctl -u hangwatch",
    "--html": "dump -o DIR (for DIR/.../report.html), or report --html FILE",
    "--rank": "dump --pid PID",
    "--watch": "top",
    "hangwatch -v": "--version",
    "hangwatch -V": "--version",
    "incidents --full": "report NAME",
    "incidents --job": "incidents JOB",
    "silence --job": "silence JOB",
}
"""Commands and options of other programs, or of other commands, each with what to type here."""

_OWN = ("help", "version")
_BARE = re.compile(r"Got unexpected extra argument(s?) \((.+)\)$")
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


class Commands(click.Group):
    """The group of all commands. It imports a command only to run it, so the daemon loads no other command."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        """Return the names of all commands, sorted."""
        return sorted(_MODULE_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """Import and return the command with this name; None if there is none."""
        if cmd_name not in _MODULE_OF:
            return None
        module = importlib.import_module(f"hangwatch.{_MODULE_OF[cmd_name]}")
        gc.freeze()  # no later collection looks at what was imported
        gc.set_threshold(700 if cmd_name == "run" else 100_000)  # commands end soon: the daemon would hold 4 MiB more
        gc.enable()
        commands: dict[str | None, click.Command] = {command.name: command for command in module.COMMANDS}
        return commands[cmd_name]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command; `help COMMAND` is `COMMAND --help`, `version` is `--version`. Raises click.UsageError."""
        if args[0] in _OWN:
            if len(args) == 1 or args[1] in _OWN:
                click.echo(ctx.get_help() if args[0] == "help" else f"hangwatch, version {__version__}")
                ctx.exit()
            args = [args[1], "--help"]
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib  # only for a wrong name

            meant = _MEANT.get(args[0])
            similar = [
                f" Did you mean {name!r}?" for name in difflib.get_close_matches(args[0], (*_MODULE_OF, *_OWN), n=1)
            ]
            hint = f" Type: hangwatch {meant}" if meant else "".join(similar)
            raise click.UsageError(f"{error.message}{hint}", ctx) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="hangwatch")
def hangwatch() -> None:
    """Finds hung training jobs, takes the stacks of every rank and names the rank that blocks the job.

    \b
    Try it without a GPU:             hangwatch demo
    Find a hang on this node now:     hangwatch dump
    Explain dumps you already have:   hangwatch explain trace-*.out
    Check that this node is fit:      hangwatch check
    Monitor this node permanently:    hangwatch run

    Exit codes: 0 yes or done, 1 no, 2 bad input (the message says what to type), 70 an error inside hangwatch,
    75 temporary failure, for example the port is in use.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit. A traceback is printed only if HANGWATCH_DEBUG is set."""
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = _run(arguments)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # from now on Ctrl-C ends without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _drop(stream)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open /dev/null for each stream that the caller closed (`>&-`): the next file would get its descriptor number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `number`
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _run(arguments: list[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal cannot show is not an error
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
            _with_hint(error).show()
        return 2
    except click.Abort:
        with contextlib.suppress(OSError):
            click.echo("stopped", err=True)
        return 130
    except (TemporaryError, UserError) as error:
        screen.complain(str(error))
        return TRY_AGAIN if isinstance(error, TemporaryError) else 2
    except (BrokenPipeError, SystemExit):  # `hangwatch explain ... | head`; click exits with 1 after EPIPE
        _drop(sys.stdout)
        return 0
    except OSError as error:
        if os.environ.get("HANGWATCH_DEBUG"):
            raise
        _drop(sys.stdout)
        screen.complain(f"{error.filename or 'standard output or an output file'}: {error.strerror or error}")
        return 2
    except Exception as error:
        if os.environ.get("HANGWATCH_DEBUG"):
            raise
        logging.getLogger(__name__).debug("internal error", exc_info=True)
        screen.complain(
            f"an error inside hangwatch: {type(error).__name__}: {error}\n"
            "  this is a bug: please report it with the output of the same command under HANGWATCH_DEBUG=1"
        )
        return INTERNAL_ERROR
    return answer if isinstance(answer, int) else 0


def _with_hint(error: click.ClickException) -> click.ClickException:
    """Return the error. On an unknown option or a bare argument, it says what to type, or a similar option."""
    used = getattr(error, "ctx", None)
    options = [option for parameter in (used.command.params if used else ()) for option in parameter.opts]
    if used and "--job" in options and (bare := _BARE.match(error.message)):
        names = bare.group(2).split() if bare.group(1) else [bare.group(2)]
        are_pids = "--pid" in options and all(map(str.isdecimal, names))
        selected = " ".join(f"--pid {pid}" for pid in names) if are_pids else f"--job {shlex.quote(names[0])}"
        return click.UsageError(f"pids and jobs need an option: {used.command_path} {selected}", used)
    if not isinstance(error, click.NoSuchOption):
        return error
    meant = _MEANT.get(f"{getattr(error.ctx, 'info_name', '')} {error.option_name}", _MEANT.get(error.option_name))
    if error.possibilities and not meant:
        return error
    import difflib  # only for a wrong name

    from hangwatch.model import list_by_key

    context = click.Context(hangwatch)
    commands_of = list_by_key(
        (option, command)
        for command in hangwatch.list_commands(context)
        for parameter in getattr(hangwatch.get_command(context, command), "params", ())
        for option in (() if getattr(parameter, "hidden", False) else parameter.opts)
    )
    hints = (
        f" Did you mean {name!r} of `hangwatch {' | '.join(commands_of[name])}`?"
        for name in difflib.get_close_matches(error.option_name, commands_of, 1, 0.75)
    )
    return click.UsageError(f"{error.message}{f' Type: hangwatch {meant}' if meant else ''.join(hints)}", error.ctx)


def _refuse_empty(arguments: list[str]) -> None:
    """Raise UserError if an argument is empty: as a path, "" would be the current folder. Exception: --via-options."""
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        if not argument and previous != "--via-options":
            raise UserError("an argument is empty: is a shell variable not set?")


def _drop(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that Python does not fail when it flushes the stream at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
