"""Strict reading of the YAML of Prometheus web configuration. Errors name the file, line and key."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from hangwatch.errors import UserError
from hangwatch.formats import bounded_read, typed_values

MOST_BYTES = 1 << 20
MOST_NODES = 10_000  # aliases turn a few bytes into many values
MOST_DEEP = 16
_VALUES = {"tag:yaml.org,2002:bool": bool, "tag:yaml.org,2002:int": int, "tag:yaml.org,2002:null": type(None)}
_LOADER = yaml.SafeLoader

T = TypeVar("T")


class YamlError(UserError):
    """A YAML file that cannot be used. The message names the file, the line and the key."""


class Document(NamedTuple):
    """The content of a YAML file as plain values. `lines` has the line of each key, by the path of keys."""

    path: Path
    value: Any
    lines: Mapping[tuple[str, ...], int]

    def error_at(self, keys: tuple[str, ...], what: str) -> YamlError:
        """Return an error about a key. It names the line of that key, or of the nearest outer key with a line."""
        near = next((keys[:end] for end in range(len(keys), -1, -1) if keys[:end] in self.lines), ())
        where = f"{self.path}:{self.lines.get(near, 1)}"
        return YamlError(f"{where}: {'.'.join(keys)}: {what}" if keys else f"{where}: {what}")


def read(path: Path) -> Document:
    """Read a file that holds one mapping of texts, whole numbers, booleans, lists and mappings. Raises YamlError.

    The YAML is composed, not constructed: tags create no objects, and a duplicate key is an error.
    """
    try:
        content = bounded_read.read(path, MOST_BYTES, flags=os.O_NONBLOCK).decode("utf-8")
        root = yaml.compose(content, Loader=_LOADER)
    except bounded_read.FileError as error:
        raise YamlError(str(error)) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise YamlError(f"{path}:{line}: is not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlError(f"{path}:1: is not valid YAML: {str(error).partition(chr(10))[0]}") from None
    reading = _Reading(path)
    value = reading.plain(root, ()) if root is not None else {}
    document = Document(path, {} if value is None else value, reading.lines)
    if not isinstance(document.value, dict):
        raise document.error_at((), "must be a mapping of keys to values")
    return document


def decode(document: Document, kind: type[T], not_carried: Mapping[tuple[str, ...], str]) -> T:
    """Convert the document to a value of this type. Unknown keys are errors. Raises YamlError.

    `not_carried` are the keys of the format that hangwatch does not support, with what to do instead.
    """
    for keys, instead in not_carried.items():
        if keys in document.lines:
            raise document.error_at(keys, f"is not supported by hangwatch\n  {instead}")
    misfits: list[typed_values.Misfit] = []
    value: T = typed_values.read(document.value, kind, (), misfits)
    for misfit in misfits:
        keys = tuple(key for key in misfit.keys if not key.startswith("["))
        raise document.error_at(keys, misfit.problem or "is not a key of this format")
    return value


class _Reading:
    """Converter of the YAML nodes of one file to plain values. It records the line of each key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nodes_left = MOST_NODES
        self.lines: dict[tuple[str, ...], int] = {}

    def plain(self, node: yaml.Node, keys: tuple[str, ...]) -> Any:
        self.lines.setdefault(keys, node.start_mark.line + 1)
        self._nodes_left -= 1
        if self._nodes_left < 0 or len(keys) > MOST_DEEP:
            raise self._wrong(node, keys, "is too large or nested too deeply")
        if isinstance(node, yaml.MappingNode):
            return dict(self._items(node, keys))
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, (*keys, str(number))) for number, item in enumerate(node.value)]
        kind = _VALUES.get(node.tag, str)
        if kind is bool:
            return node.value.lower() in ("true", "yes", "on")
        if kind is int and re.fullmatch(r"[0-9]{1,18}", node.value):
            return int(node.value)
        return None if kind is type(None) else node.value

    def _items(self, node: yaml.MappingNode, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise self._wrong(name, keys, "has a key that is not a text")
            item_keys = (*keys, name.value)
            if name.value in seen:
                raise self._wrong(name, item_keys, "is given twice")
            seen.add(name.value)
            self.lines[item_keys] = name.start_mark.line + 1
            yield name.value, self.plain(value, item_keys)

    def _wrong(self, node: yaml.Node, keys: tuple[str, ...], what: str) -> YamlError:
        return Document(self._path, None, {(): node.start_mark.line + 1, keys: node.start_mark.line + 1}).error_at(
            keys, what
        )
