"""The man page deploy/man/hangwatch.1, from the help of the commands. `make golden` writes it."""

import inspect
import re
from collections.abc import Iterator

import click

from hangwatch import __version__
from hangwatch.cli import hangwatch

WIDTH = 100

COMPLETION = (
    ("bash", "~/.bashrc", 'eval "$(_HANGWATCH_COMPLETE=bash_source hangwatch)"'),
    ("zsh", "~/.zshrc", 'eval "$(_HANGWATCH_COMPLETE=zsh_source hangwatch)"'),
    ("fish", "~/.config/fish/completions/hangwatch.fish", "_HANGWATCH_COMPLETE=fish_source hangwatch | source"),
)
"""Shell, its startup file, and the line in that file that turns on completion."""


def render() -> str:
    """Return the man page as roff, see man(7)."""
    lines = [f'.TH HANGWATCH 1 "" "hangwatch {__version__}"', ".SH NAME"]
    lines += ["hangwatch \\- finds hung training jobs and names the blocking rank", ".SH SYNOPSIS"]
    lines += [".B hangwatch", "COMMAND [OPTIONS]"]
    for number, context in enumerate(contexts()):
        lines += [".SH DESCRIPTION"] if number == 0 else [".SH COMMANDS"] if number == 1 else []
        lines += [f".SS {_roff(context.command_path)} {_roff(' '.join(context.command.collect_usage_pieces(context)))}"]
        lines += _paragraphs(context.command.help or "")
        for parameter in context.command.get_params(context):
            if (record := parameter.get_help_record(context)) is not None:
                lines += [".TP", f".B {_roff(record[0])}", _roff(record[1])]
    lines += [".SH COMPLETION", ".nf", *(_roff(f"{file}: {line}") for _, file, line in COMPLETION), ".fi"]
    return "\n".join(lines) + "\n"


def contexts() -> Iterator[click.Context]:
    """Yield the click context of the group, then of each command."""
    settings = {"terminal_width": WIDTH, "max_content_width": WIDTH, "help_option_names": ["-h", "--help"]}
    parent = click.Context(hangwatch, info_name="hangwatch", **settings)  # type: ignore[arg-type]
    yield parent
    assert isinstance(hangwatch, click.Group)
    for name in hangwatch.list_commands(parent):
        command = hangwatch.get_command(parent, name)
        if command is not None and not command.hidden:
            yield click.Context(command, info_name=f"hangwatch {name}", **settings)  # type: ignore[arg-type]


def _paragraphs(text: str) -> Iterator[str]:
    r"""Yield the lines of a help text as roff. A paragraph that starts with \b keeps its line breaks."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        yield ".PP"
        lines = [_roff(line.strip()) for line in paragraph.lstrip("\b\n").splitlines()]
        yield from (".nf", *lines, ".fi") if paragraph.startswith("\b") else lines


def _roff(text: str) -> str:
    """Escape backslashes, hyphens and leading dots for roff."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    click.echo(render(), nl=False)
