"""The table `kinds.toml`: the meaning of each kind of verdict, its first step, and how other rules treat it. Pure."""

from functools import cache
from typing import Literal

from hangwatch import tables
from hangwatch.model import Value


class Kind(Value, frozen=True, forbid_unknown_fields=True):
    """A row of the table, which describes its columns. A kind without a row has the defaults."""

    means: str = ""
    first: str = ""
    first_of_all: str = ""
    first_on_cpus: str = ""
    job: Literal["stuck", "working", "idle", "at rest"] = "stuck"
    by_kernel: bool = False
    by_order: bool = False
    all_wait: bool = False
    is_final: bool = False
    at_line: bool = False
    needs_calls: bool = False


@cache
def load() -> dict[str, Kind]:
    """Return the rows by kind of verdict, in the order of the runbook. Raises MsgspecError if a row does not fit."""
    return tables.load("hangwatch.verdict", "kinds.toml", dict[str, Kind])


def find(kind: str) -> Kind:
    """Return the row of a kind of verdict."""
    return load().get(kind, Kind())
