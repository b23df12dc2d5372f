"""Strict decoding of TOML files that people write. All problems are reported at once, with file, line, section and
key.
"""

import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from hangwatch.formats import decoding

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

MOST_PROBLEMS = 20  # reported for one file
MOST_PARTS = 16  # of one dotted key; the parser keeps every prefix of it
MOST_DEPTH = 64  # of nested tables and lists
_MOST_READ = 1 << 20  # characters that are parsed to find the line of one key
_SECTION_OF_PATH = re.compile(r" - at `\$?\.?([^`]*)`$")
UNKNOWN_FIELD = re.compile(r"unknown field `([^`]+)`")
_KEY_PART = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*{_KEY_PART}(?:\.[ \t]*{_KEY_PART}){{{MOST_PARTS}}}", re.MULTILINE)
_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")
_ANY_ITEM = "[...]"
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
    """True if lists and tables in `value` are nested more than `depth` deep.

    The function is not recursive, so that no depth can exhaust the stack.
    """
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
    problems: list[Problem] = []
    rest = table
    while True:
        try:
            return decoding.convert(rest, kind), _in_order(problems)
        except msgspec.ValidationError as error:
            steps, what = _explain(str(error), rest, kind, path)
        keys = (*path, *steps)
        if len(problems) == MOST_PROBLEMS:
            more = Problem((), f"{source}: more errors follow: fix these {MOST_PROBLEMS} first")
            return None, (*_in_order(problems), more)
        line = line_of(text, keys)
        problems.append(Problem(keys, f"{source}{f':{line}' if line else ''}: {what}", line))
        shorter = _without(rest, steps)
        if shorter is rest:
            return None, _in_order(problems)
        rest = shorter


def _in_order(problems: list[Problem]) -> tuple[Problem, ...]:
    """Sort problems by line. Problems without a line come last."""
    return tuple(sorted(problems, key=lambda problem: (problem.line is None, problem.line)))


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


def _without(table: object, steps: tuple[str, ...]) -> object:
    """Return the table without the key at the end of the path `steps`; the same table if it has no such key.

    If the path leads into a list, the whole list is removed.
    """
    if not steps or not isinstance(table, dict) or steps[0] not in table:
        return table
    inner = table[steps[0]]
    shorter = _without(inner, steps[1:])
    others = {key: value for key, value in table.items() if key != steps[0]}
    return others if shorter is inner else {**others, steps[0]: shorter}


def _explain(message: str, table: object, root: type[Any], path: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Translate an error message of msgspec.

    Return the path of the wrong key, and a message: [section], key, problem, allowed values.
    """
    location = _SECTION_OF_PATH.search(message)
    problem = message[: location.start()] if location else message
    steps = [step for step in _STEP.findall(location[1]) if step != "$"] if location else []
    steps = _named(steps, table)
    owner, key = _walk(root, steps)
    whole = [*path, *steps]
    if unknown := UNKNOWN_FIELD.search(problem):
        where = f"[{_joined(whole)}]" if whole else "top level"
        return (*steps, unknown[1]), f"{where}: unknown key {unknown[1]!r}\n  {_known(unknown[1], owner, root)}"
    last = next((at for at in range(len(whole) - 1, 0, -1) if not whole[at].startswith("[")), 0)
    where = f"[{_joined(whole[:last])}]: {_joined(whole[last:])}" if last else (_joined(whole) or "top level")
    if "missing required field" in problem:
        return tuple(steps), f"[{_joined(whole)}]: {problem}"
    if "matching regex" in problem:
        problem = "has the wrong form"
    limits = describe_allowed(owner, key) if owner and key else ""
    return tuple(steps), f"{where}: {problem}" + (f"\n  allowed: {limits}" if limits else "")


def _joined(steps: list[str]) -> str:
    """Return the steps of a path as text: `activities.rules[0]`."""
    return "".join(step if step.startswith("[") else f".{step}" for step in steps).removeprefix(".")


def _named(steps: list[str], table: object) -> list[str]:
    """Return the steps of a path, with real keys in place of "[...]", which msgspec writes for a key of a table."""
    named: list[str] = []
    for step in steps:
        if step == _ANY_ITEM and isinstance(table, dict):
            step = next((key for key, value in table.items() if not isinstance(value, dict)), step)  # noqa: PLW2901
        table = table.get(step) if isinstance(table, dict) else None
        named.append(step)
    return named


def _known(unknown: str, owner: type[Any] | None, root: type[Any]) -> str:
    """Return a hint about an unknown key: a similar key or the right section, and the allowed keys."""
    known = sorted(_fields(owner)) if owner else []
    other_sections = [f"[{name}]" for name, section in _sections(root) if unknown in _fields(section)]
    if other_sections:
        return f"{unknown} is a key of {' and '.join(other_sections)}; allowed: {', '.join(known)}"
    import difflib  # only for a wrong name

    near = difflib.get_close_matches(unknown, known, n=1)
    near = near or [key for key in known if len(unknown) > 2 and _shares_words(key, unknown)][:1]
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(known)}"


def _shares_words(key: str, unknown: str) -> bool:
    return key.startswith(unknown) or key in unknown.split("_") or unknown in key.split("_")


def _fields(section: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(section))


def _sections(root: type[Any]) -> Iterator[tuple[str, type[Any]]]:
    for name, hint in get_type_hints(root).items():
        if _is_section(hint):
            yield name, hint


def _is_section(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _walk(root: type[Any], steps: list[str]) -> tuple[type[Any] | None, str | None]:
    """Follow a path from the struct `root`. Return the struct and the key in it to which the path leads.

    The key is None if the path ends at a struct.
    """
    owner: type[Any] | None = root
    key: str | None = None
    for step in steps:
        if owner is None or step.startswith("["):
            continue
        hint = get_type_hints(owner).get(step)
        if hint is None:
            return owner, key
        inner = next((part for part in (hint, *get_args(hint)) if _is_section(part)), None)
        if inner is None:
            return owner, step
        owner, key = inner, None
    return owner, key


def describe_allowed(owner: type[Any], key: str) -> str:
    """Return the allowed values of a key as text: type, form and limits."""
    hint = get_type_hints(owner, include_extras=True)[key]
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
