"""The table of facts of outside tools: what hangwatch relies on, and what would notice a change.

usage: python -m tests.outside_facts

Ask each tool on this machine for its version, and write versions and date into docs/outside-facts.toml. A tool that is
not there keeps the version with which it was seen last. `make golden` prints the table into docs/outside-facts.md.
"""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "outside-facts.toml"
PAGE = ROOT / "docs" / "outside-facts.md"


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool, the command that prints its version, and the version that it printed last; empty if it never ran."""

    name: str
    command: str
    version: str
    date: str


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fact of a tool. `text` is in the file `used`. `noticed` is a pytest node, or a script of findings/."""

    tool: str
    fact: str
    used: str
    text: str
    noticed: str


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    tools: dict[str, Tool]
    facts: tuple[Fact, ...]


def load() -> Table:
    """Read the table. Raises msgspec.ValidationError for a wrong row."""
    return msgspec.convert(msgspec.toml.decode(TABLE.read_text()), Table)


def page_lines(table: Table) -> Iterator[str]:
    """Yield the lines of the page between its marks: versions first, then the facts."""
    yield from ("| tool | version that ran | date |", "|---|---|---|")
    for tool in table.tools.values():
        yield f"| {tool.name} | {tool.version or 'not run'} | {tool.date or '-'} |"
    yield from ("", "| tool | fact | used in | a change is noticed by |", "|---|---|---|---|")
    for fact in table.facts:
        path, _, test = fact.noticed.partition("::")
        used = f"[{Path(fact.used).name}](../{fact.used})"
        noticed = f"[{test or Path(path).name}](../{path})"
        yield f"| {table.tools[fact.tool].name} | {fact.fact} | {used} | {noticed} |"


def main() -> None:
    """Renew the versions in the table."""
    text = TABLE.read_text()
    for key, tool in load().tools.items():
        done = subprocess.run(tool.command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
        printed = re.search(r"\d[\w.+-]*", done.stdout)
        print(f"{tool.name}: {printed[0] if printed else 'not here'}")
        if done.returncode == 0 and printed is not None:
            head = re.escape(f"[tools.{key}]\n")
            lines = f"version = '{printed[0]}'\ndate = '{time.strftime('%Y-%m-%d')}'\n"
            text = re.sub(rf"({head}(?:name|command).*\ncommand.*\n)version.*\ndate.*\n", rf"\g<1>{lines}", text)
    TABLE.write_text(text)


if __name__ == "__main__":
    main()
