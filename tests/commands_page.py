"""The page docs/commands.md, from the help of the commands. `make golden` writes it."""

import re
import textwrap

import click

from tests.man_page import COMPLETION, WIDTH, contexts


def page() -> str:
    """Return docs/commands.md: the --help of every command. An option that several commands have is described once."""
    lines = ["# Commands", ""]
    lines += ["The help of every command (`hangwatch COMMAND --help`). An option is described where it is first used."]
    lines += [""]
    described: set[str] = set()
    for context in contexts():
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
        WIDTH,
        initial_indent="  ",
        subsequent_indent="      ",
        break_on_hyphens=False,
        break_long_words=False,
    )


if __name__ == "__main__":
    click.echo(page(), nl=False)
