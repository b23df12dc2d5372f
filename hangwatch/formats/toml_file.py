"""Strict decoding of TOML files that people write. All problems are reported at once, with file, line, section and
key.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from hangwatch.formats import typed_values

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

MOST_PROBLEMS = 20  # reported for one file
MOST_PARTS = 16  # of one dotted key; the parser keeps every prefix of it
MOST_DEPTH = 64  # of nested tables and lists
_MOST_READ = 1 << 20  # characters that are parsed to find the line of one key
_KEY_PART = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*{_KEY_PART}(?:\.[ \t]*{_KEY_PART}){{{MOST_PARTS}}}", re.MULTILINE)
_WORDS: dict[Any, str] = {
    float: "a number",
    int: "a whole number",
    str: "a text in quotes",
    bool: "true or false",
    tuple[str, ...]: "a list of texts in quotes",
}


class TomlError(Exception):
    """A text that is not valid TOML. The message names the file, and the line if the parser reports it."""


class Problem(NamedTuple):
    """A problem with one key. `keys` is the list of keys from the top of the file to it. `line` is None if unknown."""

    keys: tuple[str, ...]
    message: str
    line: int | None = None


def parse(text: str, source: str) -> dict[str, Any]:
    """Parse a TOML text to a table. Errors name the file `source`. Raises TomlError."""
    if long_key := _LONG_KEY.search(text):
        line = text.count("\n", 0, long_key.end()) + 1
        raise TomlError(
            f"{source}:{line}: a key has more than {MOST_PARTS} parts between its dots\n"
            "  `hangwatch config --sample` prints every key"
        )
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(source) from None
    except ValueError as error:  # TOMLDecodeError is a subclass; a number with too many digits raises ValueError itself
        raise TomlError(f"{source}: is not valid TOML: {error}") from None
    if _is_deeper(table, MOST_DEPTH):
        raise _too_deep(source)
    return table


def _too_deep(source: str) -> TomlError:
    return TomlError(f"{source}: is not valid TOML for hangwatch: nested too deeply")


def _is_deeper(value: object, depth: int) -> bool:
    """True if lists and tables in `value` are nested more than `depth` deep. No depth can exhaust the stack."""
    level = [value]
    for _ in range(depth):
        inner = [
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        ]
        level = [item for items in inner for item in items]
    return any(isinstance(value, dict | list) for value in level)


def decode(
    table: object, kind: type[T], source: str, path: tuple[str, ...] = (), text: str = ""
) -> tuple[T | None, tuple[Problem, ...]]:
    """Decode a table to a value of this type. Return the value and the problems of the keys that it lacks.

    The value is None if even the other keys cannot be decoded. `path` is the list of keys from the top of the file to
    the table. `text` is the text of the file, needed to find lines. After `MOST_PROBLEMS` problems, one more says that
    there are others.
    """
    misfits: list[typed_values.Misfit] = []
    value = typed_values.read(table, kind, path, misfits)
    problems = []
    for misfit in misfits[:MOST_PROBLEMS]:
        line = line_of(text, misfit.keys)
        message = f"{source}{f':{line}' if line else ''}: {_explain(misfit, kind)}"
        problems.append(Problem(misfit.keys, message, line))
    problems.sort(key=lambda problem: (problem.line is None, problem.line))
    if len(misfits) > MOST_PROBLEMS:
        more = Problem((), f"{source}: more errors follow: fix these {MOST_PROBLEMS} first")
        return None, (*problems, more)
    return None if value is msgspec.UNSET else value, tuple(problems)


def line_of(text: str, keys: tuple[str, ...]) -> int | None:
    """Return the line on which a key begins; None if the text does not contain it, or the search takes too long.

    The parser does not report lines. So the beginning of the file is parsed up to each line that mentions the key,
    until the result contains the key.
    """
    names = [key for key in keys if not key.startswith("[")]
    if not names:
        return None
    mentions = re.compile(rf"(?<![\w-]){re.escape(names[-1])}(?![\w-])")
    lines = text.split("\n")
    key_line, length, read = 0, 0, 0
    for number, line in enumerate(lines, 1):
        length += len(line) + 1
        if not line.lstrip().startswith("#") and mentions.search(line):
            key_line = number
        if not key_line:
            continue
        read += length
        if read > _MOST_READ:
            return None
        try:
            table = tomllib.loads("\n".join(lines[:number]))
        except (ValueError, RecursionError):
            continue  # this line is in the middle of a value of several lines
        if _holds(table, keys):
            return key_line
        key_line = 0
    return None


def _holds(table: object, keys: tuple[str, ...]) -> bool:
    for key in keys:
        if isinstance(table, dict) and key in table:
            table = table[key]
        elif isinstance(table, list) and key.startswith("[") and int(key[1:-1]) < len(table):
            table = table[int(key[1:-1])]
        else:
            return False
    return True


def _explain(misfit: typed_values.Misfit, root: type[Any]) -> str:
    """Return a message about a misfit: [section], key, problem, allowed values."""
    keys, problem = misfit.keys, misfit.problem
    if misfit.owner is not None:
        where = f"[{_joined(keys[:-1])}]" if len(keys) > 1 else "top level"
        return f"{where}: unknown key {keys[-1]!r}\n  {_known(keys[-1], misfit.owner, root)}"
    last = next((at for at in range(len(keys) - 1, 0, -1) if not keys[at].startswith("[")), 0)
    where = f"[{_joined(keys[:last])}]: {_joined(keys[last:])}" if last else (_joined(keys) or "top level")
    if "missing required field" in problem:
        return f"[{_joined(keys)}]: {problem}"
    if "matching regex" in problem:
        problem = "has the wrong form"
    kind = typed_values.plain_type(misfit.hint)
    has_struct = any(map(typed_values.is_struct, (kind, *get_args(kind))))
    limits = "" if has_struct else describe_allowed(misfit.hint)
    return f"{where}: {problem}" + (f"\n  allowed: {limits}" if limits else "")


def _joined(steps: Sequence[str]) -> str:
    """Return the steps of a path as text: `activities.rules[0]`."""
    return "".join(step if step.startswith("[") else f".{step}" for step in steps).removeprefix(".")


def _known(unknown: str, owner: type[Any], root: type[Any]) -> str:
    """Return a hint about an unknown key: a similar key or the right section, and the allowed keys."""
    known = sorted(owner.__struct_fields__)
    sections = {name: hint for name, hint in get_type_hints(root).items() if typed_values.is_struct(hint)}
    other_sections = [f"[{name}]" for name, section in sections.items() if unknown in section.__struct_fields__]
    if other_sections:
        return f"{unknown} is a key of {' and '.join(other_sections)}; allowed: {', '.join(known)}"
    import difflib  # only for a wrong name

    near = difflib.get_close_matches(unknown, known, n=1)
    near = near or [key for key in known if len(unknown) > 2 and _shares_words(key, unknown)][:1]
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(known)}"


def _shares_words(key: str, unknown: str) -> bool:
    return key.startswith(unknown) or key in unknown.split("_") or unknown in key.split("_")


def describe_allowed(hint: Any) -> str:
    """Return the allowed values of a type as text: type, form and limits."""
    base, words = hint, []
    if get_origin(hint) is Annotated:
        base, *metas = get_args(hint)
        for meta in metas:
            words += [f"{word} {_plain(value)}" for word, value in _limits(meta)]
            words += [meta.title] if meta.title else []
            words += [f"as {msgspec.json.encode(example).decode()}" for example in meta.examples or ()]
    if get_origin(base) is Literal:
        return " | ".join(repr(value) for value in get_args(base))
    return ", ".join([_WORDS.get(base, "a table" if get_origin(base) is dict else str(base)), *words])


def _limits(meta: Meta) -> Iterator[tuple[str, float]]:
    for word, value in (("from", meta.ge), ("above", meta.gt), ("to", meta.le), ("below", meta.lt)):
        if value is not None:
            yield word, value


def _plain(value: float) -> str:
    """Return a number as text with all digits and no exponent: `1048576`, `0.02`."""
    return f"{Decimal(str(value)):f}".removesuffix(".0")
