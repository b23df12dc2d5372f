"""The generated command reference: docs/commands.md and the man page.

python -m hangwatch.cli.reference man > hangwatch.1
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator

import click

from hangwatch import __version__
from hangwatch.cli import hangwatch

_WIDTH = 100

COMPLETION = (
    ("bash", "~/.bashrc", 'eval "$(_HANGWATCH_COMPLETE=bash_source hangwatch)"'),
    ("zsh", "~/.zshrc", 'eval "$(_HANGWATCH_COMPLETE=zsh_source hangwatch)"'),
    ("fish", "~/.config/fish/completions/hangwatch.fish", "_HANGWATCH_COMPLETE=fish_source hangwatch | source"),
)
"""Shell, its startup file, and the line in that file that turns on completion."""


def markdown() -> str:
    """Return docs/commands.md: the --help of every command. An option that several commands have is described once."""
    lines = ["# Commands", ""]
    lines += ["The help of every command (`hangwatch COMMAND --help`). An option is described where it is first used."]
    lines += [""]
    described: set[str] = set()
    for context in _contexts():
        text = _drop_described(context.get_help(), described).replace(" [OPTIONS]", "", 1)
        lines += [f"## {context.info_name}", "", "```", re.sub("(?m)^(Usage: |  )", "", text), "```", ""]
    lines += ["## Completion", "", "Add this line to the file of your shell to complete commands and options:", ""]
    lines += ["| shell | file | line |", "|---|---|---|"]
    lines += [f"| {shell} | `{file}` | `{line.replace('|', chr(92) + '|')}` |" for shell, file, line in COMPLETION]
    return "\n".join(lines) + "\n"


def _drop_described(text: str, described: set[str]) -> str:
    """Return a help text without --help, commands and options in `described`, to which its others are added."""
    before, heading, options = text.partition("\nOptions:\n")
    rest = options.partition("\n\nCommands:\n")[0]
    shown, repeated = [], []
    for option in re.split(r"\n(?=  -)", rest):
        key = " ".join(option.split())
        if key.startswith("-h, --help") and described:
            continue
        if key in described:
            repeated.append(key.split()[0 if key.startswith("--") else 1])
        else:
            shown.append(_narrow(option))
            described.add(key)
    shown += [f"  as above: {', '.join(repeated)}"] if repeated else []
    return before + heading + "\n".join(shown)


def _narrow(option: str) -> str:
    """Return an option of a help text with its description directly behind its name."""
    name, _, description = re.sub(r"\n {3,}", "  ", option.strip("\n").removeprefix("  "), count=0).partition("  ")
    return textwrap.fill(
        f"{name}  {' '.join(description.split())}",
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="      ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def man() -> str:
    """Return the man page as roff, see man(7)."""
    lines = [f'.TH HANGWATCH 1 "" "hangwatch {__version__}"', ".SH NAME"]
    lines += ["hangwatch \\- finds hung training jobs and names the blocking rank", ".SH SYNOPSIS"]
    lines += [".B hangwatch", "COMMAND [OPTIONS]"]
    for number, context in enumerate(_contexts()):
        lines += [".SH DESCRIPTION"] if number == 0 else [".SH COMMANDS"] if number == 1 else []
        lines += [f".SS {_roff(context.command_path)} {_roff(' '.join(context.command.collect_usage_pieces(context)))}"]
        lines += _paragraphs(context.command.help or "")
        for parameter in context.command.get_params(context):
            if (record := parameter.get_help_record(context)) is not None:
                lines += [".TP", f".B {_roff(record[0])}", _roff(record[1])]
    lines += [".SH COMPLETION", ".nf", *(_roff(f"{file}: {line}") for _, file, line in COMPLETION), ".fi"]
    return "\n".join(lines) + "\n"


def _contexts() -> Iterator[click.Context]:
    """Yield the click context of the group, then of each command."""
    settings = {"terminal_width": _WIDTH, "max_content_width": _WIDTH, "help_option_names": ["-h", "--help"]}
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
    click.echo({"man": man, "markdown": markdown}[sys.argv[1]](), nl=False)
