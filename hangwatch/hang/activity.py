"""Pure: a stack -> what it is doing, by the rules of activities.toml."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from fnmatch import translate
from functools import cache, lru_cache
from importlib import resources
from typing import Literal, NamedTuple

import msgspec

from hangwatch import config
from hangwatch.hang import frames as stack_frames
from hangwatch.model import Frame

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Order = Literal["certain", "sync", "top", "leaf", "native", "context", "loop"]
WaitsFor = Literal["ranks", "gpu", "lock", "thread", "nothing", "unknown"]
Mark = Literal["wrapper", "collective", "service", "work", "rooted"]

_LEAF_DEPTH = 4
_AROUND = ("context", "loop")
_CACHE_LIMIT = 1 << 16


class Activity(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What the table says of an activity; the columns are explained at the top of activities.toml."""

    waits_for: WaitsFor
    says: str
    tells: int | None = None
    in_key: bool = False
    work_is_in: Literal["threads", "autograd", "workers"] | None = None
    unless_a_thread_is_in: str | None = None
    leaves_the_job: bool = False
    phase: str | None = None


class _Rule(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    activity: str
    order: Order
    why: str
    functions: tuple[str, ...]
    file: str = ""
    files: tuple[str, ...] = ()
    operation: str = ""


class _Marked(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    mark: Mark
    why: str
    functions: tuple[str, ...]
    file: str = ""
    files: tuple[str, ...] = ()


class _Tables(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    activities: dict[str, Activity]
    rules: tuple[_Rule, ...]
    marks: tuple[_Marked, ...]


class Doing(NamedTuple):
    """What a stack is doing: an activity of the table, the operation where one is known, a wait for ranks or not."""

    activity: str
    operation: str | None
    waits: bool


class Match(NamedTuple):
    """A rule's match: what the stack is doing, and how deep in it the frame stands that tells (-1: none)."""

    doing: Doing
    depth: int


class _Compiled(NamedTuple):
    activity: str
    order: Order
    function: re.Pattern[str]
    file: re.Pattern[str]
    operation: str


def _compile(rule: _Rule) -> _Compiled:
    return _Compiled(rule.activity, rule.order, *_patterns(rule), rule.operation)


def _patterns(row: _Rule | _Marked) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What a plain name of a function, and a path with a `/` before it, must match."""
    files = row.files or ((row.file,) if row.file else ("*",))
    return (
        re.compile("|".join(translate(pattern) for pattern in row.functions)),
        re.compile("|".join(translate(f"*/{pattern.removeprefix('*/')}") for pattern in files)),
    )


class Table:
    """The rules, compiled. Answers are remembered per frame and per stack, since most ranks show the same ones."""

    def __init__(self, rules: Sequence[_Rule]) -> None:
        self._rules = tuple(_compile(rule) for rule in rules)
        self._of_place: dict[stack_frames.Place, dict[Order, _Compiled]] = {}
        self._of_stack: dict[tuple[stack_frames.Place, ...], Match] = {}

    def classify(self, frames: Sequence[Frame]) -> Doing:
        """What a stack (innermost frame first) is doing: (activity, operation or None, waits for other ranks)."""
        return self.match(frames).doing

    def match(self, frames: Sequence[Frame]) -> Match:
        """As `classify`, with the place in the stack that told it."""
        stack = tuple((frame.function, frame.file) for frame in frames)
        found = self._of_stack.get(stack)
        if found is None:
            if len(self._of_stack) >= _CACHE_LIMIT:
                self._of_stack.clear()
            found = self._of_stack[stack] = self._find(stack)
        return found

    def context(self, frames: Sequence[Frame]) -> Doing | None:
        """What the part of the program around a stack does, whatever its innermost frames do; None: no frame tells."""
        stack = tuple((frame.function, frame.file) for frame in frames)
        python = [index for index, place in enumerate(stack) if not stack_frames.is_native(*place)]
        found = self._first(stack, python, "context")
        return self._widened(stack, *found).doing if found else None

    def phase(self, frames: Sequence[Frame]) -> str | None:
        """The activity of the part of the program around a stack ("evaluation"); None where no frame tells."""
        for frame in frames:
            rule = self._rules_of((frame.function, frame.file)).get("context")
            if rule and known(rule.activity).phase:
                return rule.activity
        return None

    def _find(self, stack: tuple[stack_frames.Place, ...]) -> Match:
        python = [index for index, place in enumerate(stack) if not stack_frames.is_native(*place)]
        native = [index for index, place in enumerate(stack) if stack_frames.is_native(*place)]
        if importing(stack, python):
            return Match(Doing("import", None, waits=False), python[0])
        places: tuple[tuple[Order, list[int]], ...] = (
            ("certain", python),
            ("sync", python),
            ("top", python[:1]),
            ("leaf", python[:_LEAF_DEPTH]),
            ("native", native),
            ("context", python),
            ("loop", python[:1]),
        )
        for order, indexes in places:
            found = self._first(stack, indexes, order)
            if found:
                return self._widened(stack, *found)
        name = _name(_leaf(stack)) if stack else None
        return Match(Doing("unknown", name, waits=False), -1)

    def _first(
        self, stack: tuple[stack_frames.Place, ...], indexes: Sequence[int], order: Order
    ) -> tuple[int, _Compiled] | None:
        for index in indexes:
            rule = self._rules_of(stack[index]).get(order)
            if rule:
                return index, rule
        return None

    def _widened(self, stack: tuple[stack_frames.Place, ...], index: int, rule: _Compiled) -> Match:
        """An activity is named by the call that the program made: the outermost frame of the same file.

        Around a wait, frames of thin wrappers (loggers, context managers) are passed over.
        """
        last, named, told = index, index, rule
        waits = known(rule.activity).waits_for == "ranks"
        while last + 1 < len(stack):
            last += 1
            outer = self._rules_of(stack[last]).get(rule.order)
            same = outer is not None and (waits or outer.activity == rule.activity)
            if outer and same and stack[last][1] == stack[named][1]:
                named, told = last, outer
            elif not (waits and is_marked("wrapper", *stack[last])):
                break
        name = _name(_leaf(stack) if rule.order in _AROUND else stack[named])
        operation = told.operation or (name.lstrip("_") if waits else name)
        return Match(Doing(told.activity, operation, waits), named)

    def _rules_of(self, place: stack_frames.Place) -> dict[Order, _Compiled]:
        found = self._of_place.get(place)
        if found is None:
            if len(self._of_place) >= _CACHE_LIMIT:
                self._of_place.clear()
            found = self._of_place[place] = self._match_place(place)
        return found

    def _match_place(self, place: stack_frames.Place) -> dict[Order, _Compiled]:
        function, file = place[0], "/" + stack_frames.short_path(place[1])
        if not stack_frames.is_native(*place):
            function = stack_frames.plain_name(function)
        found: dict[Order, _Compiled] = {}
        for rule in self._rules:
            if rule.order not in found and rule.function.match(function) and rule.file.match(file):
                found[rule.order] = rule
        return found


def _name(place: stack_frames.Place) -> str:
    """The plain name of a function; of compiled code without a name its library, since an address means nothing."""
    function, file = place
    if function.startswith("0x"):
        return stack_frames.short_path(file)
    return function if stack_frames.is_native(function, file) else stack_frames.plain_name(function)


def _leaf(stack: Sequence[stack_frames.Place]) -> stack_frames.Place:
    """The innermost Python frame; the innermost of all where there is none."""
    return next((place for place in stack if not stack_frames.is_native(*place)), stack[0])


def importing(stack: Sequence[stack_frames.Place], python: Sequence[int]) -> bool:
    """Whether nothing but module bodies lies between the innermost frame and the import machinery."""
    for index in python:
        if stack_frames.is_import(stack[index][1]):
            return True
        if stack[index][0] != "<module>":
            return False
    return False


@cache
def _built_in() -> _Tables:
    text = resources.files("hangwatch.hang").joinpath("activities.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), _Tables)


def load(extra_rules: tuple[config.ActivityRule, ...] = ()) -> Table:
    """The built-in table; `extra_rules` of the configuration come first and are certain.

    Raises config.ConfigError when a rule names no activity of the table in lower_case words.
    """
    tables = _built_in()
    extra = []
    for number, rule in enumerate(extra_rules):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", rule.activity):
            raise config.ConfigError(
                f"[activities] rules[{number}]: activity {rule.activity!r} is no name\n"
                f"  allowed: {', '.join(tables.activities)}, or a new name in lower_case"
            )
        near = difflib.get_close_matches(rule.activity, tables.activities, n=1, cutoff=0.8)
        if near and rule.activity not in tables.activities:  # a new name waits for nothing, and is accused first
            raise config.ConfigError(
                f"[activities] rules[{number}]: activity {rule.activity!r} looks like {near[0]!r}, misspelt\n"
                f"  type {near[0]!r}, or choose a name that is further from it"
            )
        extra.append(
            _Rule(rule.activity, "certain", "configured", (rule.function,), file=rule.file, operation=rule.operation)
        )
    return Table((*extra, *tables.rules))


def names() -> tuple[str, ...]:
    """The names of all activities of the built-in table."""
    return tuple(_built_in().activities)


@cache
def known(name: str) -> Activity:
    """What follows from an activity; one that only the user's rules name waits for nothing."""
    return _built_in().activities.get(name) or Activity("nothing", f"is in {name.replace('_', ' ')} ({{operation}})")


@cache
def _marks(mark: Mark) -> tuple[tuple[re.Pattern[str], re.Pattern[str]], ...]:
    return tuple(_patterns(row) for row in _built_in().marks if row.mark == mark)


@lru_cache(maxsize=_CACHE_LIMIT)
def is_marked(mark: Mark, function: str, file: str = "") -> bool:
    """Whether a frame, or the name of a collective, bears a mark of the table."""
    name, path = stack_frames.plain_name(function), f"/{file}"
    return any(functions.match(name) and files.match(path) for functions, files in _marks(mark))


def says(name: str, operation: str | None) -> str:
    """A clause for a sentence about one rank: "waits in all_reduce", "is loading data (DataLoader)"."""
    clause = known(name).says
    if operation:
        return clause.replace("{operation}", operation)
    return clause.replace(" ({operation})", "").replace("{operation}", name.replace("_", " "))


def phase_words(name: str, phase: str | None) -> str:
    """Where in the program an activity stands: "during evaluation"; empty where that is the activity itself."""
    return "" if phase is None or phase == name else known(phase).phase or ""
