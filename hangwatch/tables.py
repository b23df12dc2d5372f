"""The tables that are shipped with hangwatch: TOML files beside the modules that read them."""

from __future__ import annotations

from importlib import resources
from typing import TypeVar

from hangwatch import decoding

T = TypeVar("T")


def load(package: str, name: str, kind: type[T]) -> T:
    """The table `name` that lies in `package`, as values of `kind`. Raises MsgspecError where a row is not of it."""
    return decoding.toml(resources.files(package).joinpath(name).read_text(encoding="utf-8"), kind)
