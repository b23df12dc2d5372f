"""The fault table: each row is a fault, its consequences, a test, and the change that removes its guard.

`python -m tests.faults` proves the rows. `make golden` prints them into docs/reliability.md.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("faults.toml")
PAGE = ROOT / "docs" / "reliability.md"
USUAL = ("everything else", "at once", "nothing")
"""Consequences that the page leaves out: what works, when it is noticed, and what is lost."""


class Guard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The change that removes a guard. `text` occurs once in `file`, a path in the repository."""

    file: str
    text: str
    replacement: str

    def removed_from(self, source: str) -> str:
        """Return the source of the file without the guard. Raises ValueError if its text does not occur once."""
        if source.count(self.text) != 1:
            raise ValueError(f"{source.count(self.text)} places in {self.file}, not 1, have the text {self.text!r}")
        return source.replace(self.text, self.replacement)


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A guard and its test.

    `test` is the pytest node that fails without the guard. `fails_with` is a part of its traceback in pytest's short
    form: of an assertion, of another line of source, or of the exception.
    """

    name: str
    test: str
    fails_with: str
    guard: Guard


class Row(Proof, frozen=True, kw_only=True):
    """A fault. `noticed` is the time until hangwatch notices it, and how.

    The cells name settings and limits of the code: "{config:Gpu.sample_seconds + probes.base.child:KILL_SECONDS} s".
    """

    group: str
    broken: str
    works: str
    noticed: str
    lost: str


def load_rows() -> tuple[Row, ...]:
    """Return the rows of the table. Raises msgspec.ValidationError if a field is missing or unknown."""
    return msgspec.convert(msgspec.toml.decode(TABLE.read_text())["fault"], tuple[Row, ...])


def load_proofs() -> tuple[Proof, ...]:
    """Return the rows of the table, and the rules that are no consequence of a fault."""
    return (*load_rows(), *msgspec.convert(msgspec.toml.decode(TABLE.read_text())["rule"], tuple[Proof, ...]))


def _limit(reference: str) -> float:
    """Return a constant of the code, a field of an object, or the default of a parameter: "MODULE:NAME.NAME"."""
    module, _, path = reference.partition(":")
    value = importlib.import_module(f"hangwatch.{module}")
    for name in path.split("."):
        value = inspect.signature(value).parameters[name].default if callable(value) else getattr(value, name)
    return float(value)  # type: ignore[arg-type]


def filled(cell: str) -> str:
    """Replace each sum of limits in braces by its value."""
    return re.sub(r"\{(.+?)\}", lambda match: f"{sum(map(_limit, match[1].split(' + '))):g}", cell)


def page_lines(rows: tuple[Row, ...]) -> Iterator[str]:
    """Yield the lines of the table in docs/reliability.md. Rows with the same consequences share a line."""
    yield "| broken | still works | noticed | lost |"
    yield "|---|---|---|---|"
    for group, members in groupby(rows, lambda row: row.group):
        yield f"| **{group}** | | | |"
        for consequences, alike in groupby(members, lambda row: (row.works, row.noticed, row.lost)):
            cells = ("" if cell == usual else f"{cell} " for cell, usual in zip(consequences, USUAL, strict=True))
            yield filled(f"| {'; '.join(row.broken for row in alike)} | {'| '.join(cells)}|")
