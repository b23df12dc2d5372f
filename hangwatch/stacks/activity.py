"""The activity of a stack, by the rules of the table of activities. Pure."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from hangwatch import config
from hangwatch.model import Frame, Thread
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.activity_table import (
    CACHE_LIMIT,
    Activity,
    Order,
    Rule,
    built_in,
    find_activity,
    is_marked,
    make_patterns,
    packages,
)

_LEAF_DEPTH = 4
_AROUND = ("context", "loop")


class StackActivity(NamedTuple):
    """The activity and the operation (None: unknown) of a stack. `waits`: the stack waits for other ranks."""

    activity: str
    operation: str | None
    waits: bool

    @property
    def row(self) -> Activity:
        """The activity's row in the table."""
        return find_activity(self.activity)


class Table:
    """The compiled rules. Results are cached by frame and by stack, because most ranks have the same stacks.

    The parameter `installed_frames` separates library frames from frames of the user's program, see `model.Thread`.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = [(rule, make_patterns(rule)) for rule in rules]
        self._rules_of = lru_cache(CACHE_LIMIT)(self._match_place)
        self._classify_places = lru_cache(CACHE_LIMIT)(self._find)

    def classify(self, frames: Sequence[Frame], installed_frames: int | None = None) -> StackActivity:
        """Return the activity of a stack. The innermost frame comes first."""
        return self._classify_places(tuple(frame.place for frame in frames), installed_frames)

    def classify_thread(self, thread: Thread) -> StackActivity:
        """Return the activity of a thread's stack."""
        return self.classify(thread.frames, thread.installed_frames)

    def context(self, frames: Sequence[Frame]) -> StackActivity | None:
        """Return the activity of the program that surrounds the innermost call.

        None if no frame matches a "context" rule. Functions of the user's program may match, too.
        """
        stack = [_OwnedFrame(frame.place, None) for frame in frames]
        found = self._first(stack, _find_python(stack), "context")
        return self._extend_outwards(stack, *found)[0] if found else None

    def phase(self, frames: Sequence[Frame]) -> str | None:
        """Return the phase of the program: the name of an activity such as "evaluation". None if no frame matches."""
        rules = (self._rules_of(_OwnedFrame(frame.place, None)).get("context") for frame in frames)
        return next((rule.activity for rule in rules if rule and find_activity(rule.activity).phase), None)

    def _find(self, places: tuple[stack_frames.Place, ...], installed_frames: int | None) -> StackActivity:
        owned = stack_frames.find_owners([file for _, file in places], installed_frames)
        stack = tuple(map(_OwnedFrame, places, owned))
        python = _find_python(stack)
        native = [index for index, place in enumerate(places) if stack_frames.is_native(*place)]
        if _is_importing(places[index] for index in python):
            return StackActivity("import", None, waits=False)
        program = list(itertools.takewhile(lambda index: not is_marked("boot", *places[index]), python))
        # If the innermost frame is a boot frame, only `certain` rules apply to it, for example that of an idle actor.
        orders: Sequence[tuple[Order, list[int]]] = (("certain", python[:1]), ("native", native), ("base", native))
        if program:
            orders = (
                ("entered", program),
                ("certain", program),
                ("sync", program),
                ("top", program[:1]),
                ("leaf", program[:_LEAF_DEPTH]),
                ("native", native),
                ("base", [*program[:1], *native]),
                ("context", program),
                ("loop", program[:1]),
            )
        for order, indexes in orders:
            match = self._first(stack, indexes, order)
            if match:
                return _refine_by_native(stack, native, *self._extend_outwards(stack, *match))
        return StackActivity("unknown", _find_name(stack, _find_leaf(stack)) if stack else None, waits=False)

    def _first(self, stack: Sequence[_OwnedFrame], indexes: Sequence[int], order: Order) -> tuple[int, Rule] | None:
        for index in indexes:
            rule = self._rules_of(stack[index]).get(order)
            if rule is None or (rule.around_waits and not self._is_around_wait(stack, index)):
                continue
            if rule.is_caller and (index == _find_leaf(stack) or not _is_program_frame(stack[index])):
                continue
            may_run_program = rule.runs_program or is_marked("pickles", *stack[index].place)
            if not (may_run_program and any(map(_is_program_frame, stack[:index]))):
                return index, rule
        return None

    def _is_around_wait(self, stack: Sequence[_OwnedFrame], index: int) -> bool:
        """True if the frame at `index` has called a function that the table knows as a wait, a lock or I/O."""
        within = (place for place in _find_python(stack)[:_LEAF_DEPTH] if place < index)
        return any(self._rules_of(stack[place]).keys() & {"leaf", "base"} for place in within)

    def _extend_outwards(self, stack: Sequence[_OwnedFrame], index: int, rule: Rule) -> tuple[StackActivity, int]:
        """Return the activity, and the index of the outermost frame of the same file: the call that the program made.

        If the rank waits for other ranks, frames of thin wrappers (loggers, context managers) are skipped.
        """
        last, named, deciding = index, index, rule
        waits = find_activity(rule.activity).waits_for == "ranks"
        while last + 1 < len(stack):
            last += 1
            outer = self._rules_of(stack[last]).get(rule.order)
            same = outer is not None and (waits or outer.activity == rule.activity)
            if outer and same and stack[last].place[1] == stack[named].place[1]:
                named, deciding = last, outer
            elif not (waits and is_marked("wrapper", *stack[last].place)):
                break
        name = _find_name(stack, _find_leaf(stack) if rule.order in _AROUND else named)
        operation = deciding.operation or (name.lstrip("_") if waits else name)
        return StackActivity(deciding.activity, operation, waits), named

    def _match_place(self, owned: _OwnedFrame) -> dict[Order, Rule]:
        function, file = owned.place[0], _make_rooted_path(owned)
        if not stack_frames.is_native(*owned.place):
            function = stack_frames.plain_name(function)
        applies = {"anywhere": True, "library": owned.by_user is not True, "installed": owned.by_user is False}
        found: dict[Order, Rule] = {}
        for rule, patterns in self._rules:
            if rule.order not in found and applies[rule.defined_in] and patterns.match(function, file):
                found[rule.order] = rule
        return found


class _OwnedFrame(NamedTuple):
    """The place of a frame. `by_user` is true if the frame belongs to the user's program, None if unknown."""

    place: stack_frames.Place
    by_user: bool | None


def _refine_by_native(
    stack: Sequence[_OwnedFrame], native: Sequence[int], doing: StackActivity, depth: int
) -> StackActivity:
    """Return the activity of a match, or a more exact one if compiled frames show it.

    They show that a collective still creates its communicator, or that data is read from a device.
    """
    row = doing.row
    if row.if_creating and any(is_marked("creates", *stack[index].place) for index in native):
        return doing._replace(activity=row.if_creating)
    around = [stack[index].place for index in native if index > depth]
    if row.below_device and depth in native and any(is_marked("device", *place) for place in around):
        return doing._replace(activity=row.below_device)
    return doing


def _make_rooted_path(owned: _OwnedFrame) -> str:
    """Return the short path of a frame's file with `/` before it.

    A user's file with the name of a standard module (`queue.py`) gets the folder `/./`, which no pattern matches.
    Exception: a whole path keeps its folder, because the standard library may lie in an archive with a whole path.
    """
    file = stack_frames.short_path(owned.place[1])
    is_users = owned.by_user is True and not owned.place[1].startswith("/")
    return f"/./{file}" if is_users and _find_root(file) in sys.stdlib_module_names else f"/{file}"


def _is_program_frame(owned: _OwnedFrame) -> bool:
    """True for a Python frame of the user's program, or of an unknown owner with a package that the table lacks."""
    if stack_frames.is_native(*owned.place):
        return False
    file = stack_frames.short_path(owned.place[1])
    is_library = file.startswith("<") or _find_root(file) in packages()
    return owned.by_user is True or (owned.by_user is None and not is_library)


def _find_root(file: str) -> str:
    """Return the package or module with which a short path begins; "" for an absolute path."""
    return file.partition("/")[0].removesuffix(".py")


def _find_python(stack: Sequence[_OwnedFrame]) -> list[int]:
    return [index for index, owned in enumerate(stack) if not stack_frames.is_native(*owned.place)]


def _find_leaf(stack: Sequence[_OwnedFrame]) -> int:
    """Return the index of the innermost Python frame; without one, of the innermost frame outside the C library."""
    outside = (index for index, owned in enumerate(stack) if not stack_frames.is_in_c_library(owned.place[1]))
    return next(itertools.chain(_find_python(stack), outside), 0)


def _find_name(stack: Sequence[_OwnedFrame], index: int) -> str:
    """Return the name of a frame.

    A frame without a name (a lambda, an address) gets the name of the next caller with one. For compiled code, the
    compiled frames directly around it are tried before the Python frames. If no frame has a name, an address gets the
    name of its library.
    """
    around = [owned.place for owned in stack[index:]]
    compiled = itertools.takewhile(lambda place: stack_frames.is_native(*place), around)
    python = (place for place in around if not stack_frames.is_native(*place))
    names = (stack_frames.display_name(place) for place in (*compiled, *python))
    function, file = around[0]
    nameless = stack_frames.short_path(file) if function.startswith("0x") else stack_frames.plain_name(function)
    return next(filter(None, names), nameless)


def _is_importing(python: Iterable[stack_frames.Place]) -> bool:
    """True if the import machinery has called the innermost Python frame, directly or through module bodies only."""
    outside = itertools.dropwhile(lambda place: place[0] == "<module>" and not stack_frames.is_import(place[1]), python)
    caller = next(outside, None)
    return caller is not None and stack_frames.is_import(caller[1])


def load(extra_rules: tuple[config.ActivityRule, ...] = ()) -> Table:
    """Return the built-in table with the `extra_rules` of the configuration.

    These are tried first, with order `certain`. Raises config.ConfigError if the activity of a rule is not a lower_case
    name, or resembles one in the table: then it is probably misspelt.
    """
    table, extra = built_in(), []
    for number, rule in enumerate(extra_rules):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", rule.activity):
            raise config.ConfigError(
                f"[activities] rules[{number}]: activity {rule.activity!r} is not a valid name\n"
                f"  allowed: {', '.join(table.activities)}, or a new name in lower_case"
            )
        import difflib  # only for rules of the site

        near = difflib.get_close_matches(rule.activity, table.activities, n=1, cutoff=0.8)
        if near and rule.activity not in table.activities:  # a new activity waits for nothing
            raise config.ConfigError(
                f"[activities] rules[{number}]: activity {rule.activity!r} looks like a misspelt {near[0]!r}\n"
                f"  type {near[0]!r}, or choose a name that is less similar"
            )
        extra.append(
            Rule(
                activity=rule.activity,
                order="certain",
                why="configured",
                functions=(rule.function,),
                file=f"*/{rule.file.removeprefix('*/')}",
                operation=rule.operation,
            )
        )
    return Table((*extra, *table.rules))
