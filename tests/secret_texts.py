"""Exception texts, each with a secret in one form: the tables of tests/data/secret_texts.toml."""

import re
from typing import NamedTuple

from tests.conftest import load_table

_TABLES = load_table("secret_texts.toml")


class Text(NamedTuple):
    """A text, its parts that must never be shown, and the row of secret_forms.toml that hides them."""

    text: str
    secrets: tuple[str, ...]
    row: str


def _fill(text: str) -> str:
    """Return the text with its invented secrets, each with a name that no other text has."""
    text = re.sub(r"\{hidden (\w+)\}", r"Qz9\1/x7\1Wv", text)
    return re.sub(r"\{long (\w+)\}", r"Qz9\g<1>0123456789x7WvAbCdEf", text)


def _load(name: str) -> dict[str, Text]:
    rows = _TABLES[name].items()
    return {key: Text(_fill(text), tuple(map(_fill, secrets)), row) for key, (row, text, *secrets) in rows}


FORMS, MORE = _load("forms"), _load("more")
PLAIN: list[str] = _TABLES["plain"]
