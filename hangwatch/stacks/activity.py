"""The activity of a stack, by the rules of activities.toml. Pure."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import translate
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import msgspec

from hangwatch import config, tables
from hangwatch.model import Frame, Thread
from hangwatch.stacks import frames as stack_frames
from hangwatch.tables.environment_names import WILD

Order = Literal["entered", "certain", "sync", "top", "leaf", "native", "base", "context", "loop"]
WaitsFor = Literal["ranks", "gpu", "lock", "thread", "nothing", "unknown"]
DefinedIn = Literal["anywhere", "library", "installed"]
Mark = Literal[
    "wrapper",
    "collective",
    "service",
    "work",
    "rooted",
    "orders",
    "at_master",
    "boot",
    "joins",
    "all_processes",
    "creates",
    "device",
    "awaits",
    "pickles",
]

RENDEZVOUS = "rendezvous"
"""The activity of a rank that waits for other ranks to join."""
GPU_SYNC = "gpu_sync"
"""The activity of a rank in a call that waits for its GPU."""
SERVING = "serving"
"""The activity of a rank that was measured waiting for clients, whatever its functions are called."""
RPC_WAIT = "rpc_wait"
"""The activity of a rank that waits for an answer or a task of another process."""
EXITING = "exiting"
"""The activity of a rank that is exiting: its interpreter or an exit handler waits for threads or processes."""
AWAITS_CHILD = "subprocess"
"""The activity of a rank that measurements show waiting for a child process in an event loop."""
_LEAF_DEPTH = 4
_AROUND = ("context", "loop")
_CHECKOUT = r"/(?:/(?:.*/)?)?"  # the root, or any folder of a whole path: a short path that still begins with `/`
_CACHE_LIMIT = 1 << 16


class Activity(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An activity of the table. The columns are explained at the top of activities.toml."""

    waits_for: WaitsFor
    says: str
    tells: int | None = None
    in_key: bool = False
    work_is_in: Literal["threads", "autograd", "workers"] | None = None
    unless_a_thread_is_in: str | None = None
    leaves_the_job: bool = False
    held_elsewhere: bool = False
    is_between_two: bool = False
    phase: str | None = None
    idles: bool = False
    by_name_alone: bool = False
    may_read_gpu: bool = False
    look_at: str | None = None
    meets_at_store: bool = False
    if_creating: str | None = None
    below_device: str | None = None

    @property
    def is_collective(self) -> bool:
        """True if the rank waits for other ranks to join the same call. False for every other wait."""
        return self.waits_for == "ranks" and self.work_is_in is None and not self.leaves_the_job


class _Row(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A row with the patterns of a frame: of the name of its function, and of its file."""

    why: str
    functions: tuple[str, ...]
    file: str = ""
    files: tuple[str, ...] = ()


class _Rule(_Row, forbid_unknown_fields=True, frozen=True, kw_only=True):
    activity: str
    order: Order
    defined_in: DefinedIn = "anywhere"
    operation: str = ""
    around_waits: bool = False
    is_caller: bool = False
    runs_program: bool = False


class _Marked(_Row, forbid_unknown_fields=True, frozen=True, kw_only=True):
    mark: Mark


class _Awaiting(_Row, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A caller that waits for other threads, and how these threads are recognised: by a frame, or by their name."""

    thread_functions: tuple[str, ...] = ()
    thread_file: str = ""
    thread_names: tuple[str, ...] = ()


class _Tables(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    packages: tuple[str, ...]
    checkouts: frozenset[str]
    activities: dict[str, Activity]
    rules: tuple[_Rule, ...]
    marks: tuple[_Marked, ...]
    awaits_threads: tuple[_Awaiting, ...]


class StackActivity(NamedTuple):
    """The activity and the operation of a stack. `operation` is None if unknown.

    `waits` is true if the stack waits for other ranks.
    """

    activity: str
    operation: str | None
    waits: bool

    @property
    def row(self) -> Activity:
        """The activity's row in the table."""
        return find_activity(self.activity)


class _Globs:
    """A set of globs, see fnmatch(3). A glob without wildcards is a plain name, unless `expression` is given.

    It compiles the globs only when a name contains the literal part of one of them. Few names do, and compiling all
    globs takes longer than reading the table.
    """

    def __init__(self, globs: Iterable[str], expression: Callable[[str], str] | None = None) -> None:
        every = tuple(globs)
        self._plain = frozenset[str]() if expression else frozenset(glob for glob in every if WILD.isdisjoint(glob))
        self._globs = tuple(glob for glob in every if glob not in self._plain)
        self._literals = tuple(map(_find_literal, self._globs))
        self._expression = expression or translate
        self._pattern: re.Pattern[str] | None = None

    def match(self, name: str) -> bool:
        """True if a glob matches the whole name."""
        if name in self._plain:
            return True
        for literal in self._literals:  # any() takes twice the time
            if literal in name:
                break
        else:
            return False
        if self._pattern is None:
            self._pattern = re.compile("|".join(map(self._expression, self._globs)))
        return self._pattern.match(name) is not None


def _find_literal(glob: str) -> str:
    """Return the longest part without wildcards before a `[`. Every name that the glob matches contains it."""
    return max(re.split(r"[*?]", glob.partition("[")[0]), key=len)


class _Patterns(NamedTuple):
    """The compiled patterns of a row."""

    function: _Globs
    file: _Globs

    def match(self, function: str, file: str) -> bool:
        """True if they match a plain name, and a short path with a `/` before it."""
        return self.file.match(file) and self.function.match(function)

    def match_place(self, function: str, file: str) -> bool:
        """True if they match the function and the file of a frame."""
        return self.match(stack_frames.plain_name(function), f"/{stack_frames.short_path(file)}")


def _make_patterns(row: _Row) -> _Patterns:
    """Return the patterns of a row: for a function's plain name, and for a file's short path with a `/` before it."""
    files = row.files or ((row.file,) if row.file else ("*/*",))
    return _Patterns(_Globs(row.functions), _Globs(files, _make_path_pattern))


def _make_path_pattern(pattern: str) -> str:
    """Return the regular expression of a file pattern. It matches a path that begins at the root of a package.

    Exceptions: a pattern that begins with `*/` matches at any depth. A package in `checkouts` also matches within a
    whole path, because such a path does not show where the package begins.
    """
    if pattern.startswith("*/"):
        return translate(pattern)
    package, folder, _ = pattern.partition("/")
    is_run_from_checkout = bool(folder) and package in built_in().checkouts
    return f"{_CHECKOUT}{translate(pattern)}" if is_run_from_checkout else translate(f"/{pattern}")


class Table:
    """The compiled rules. Results are cached by frame and by stack, because most ranks have the same stacks.

    The parameter `installed_frames` separates library frames from frames of the user's program, see `model.Thread`.
    """

    def __init__(self, rules: Sequence[_Rule]) -> None:
        self._rules = [(rule, _make_patterns(rule)) for rule in rules]
        self._rules_of = lru_cache(_CACHE_LIMIT)(self._match_place)
        self._classify_places = lru_cache(_CACHE_LIMIT)(self._find)

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

    def _first(self, stack: Sequence[_OwnedFrame], indexes: Sequence[int], order: Order) -> tuple[int, _Rule] | None:
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

    def _extend_outwards(self, stack: Sequence[_OwnedFrame], index: int, rule: _Rule) -> tuple[StackActivity, int]:
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

    def _match_place(self, owned: _OwnedFrame) -> dict[Order, _Rule]:
        function, file = owned.place[0], _make_rooted_path(owned)
        if not stack_frames.is_native(*owned.place):
            function = stack_frames.plain_name(function)
        applies = {"anywhere": True, "library": owned.by_user is not True, "installed": owned.by_user is False}
        found: dict[Order, _Rule] = {}
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
    """True for a Python frame of the user's program.

    If the owner of the frame is unknown, true unless the table contains its package.
    """
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


@cache
def built_in() -> _Tables:
    """Return the built-in tables of activities."""
    return tables.load("hangwatch.tables", "activities.toml", _Tables)


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
            _Rule(
                activity=rule.activity,
                order="certain",
                why="configured",
                functions=(rule.function,),
                file=f"*/{rule.file.removeprefix('*/')}",
                operation=rule.operation,
            )
        )
    return Table((*extra, *table.rules))


@cache
def packages() -> frozenset[str]:
    """Return the packages that do not belong to a user's program: those in the rules, and `packages` of the table."""
    paths = (path for rule in built_in().rules for path in (*rule.files, rule.file) if "/" in path)
    named = (path.partition("/")[0] for path in paths)
    return frozenset(package for package in named if package.isidentifier()).union(built_in().packages)


class Vocabulary:
    """The words in the rules and marks of the built-in table: names of functions, or parts of paths."""

    def __init__(self, patterns: Iterable[str]) -> None:
        words = frozenset(patterns)
        self.plain = frozenset(word for word in words if WILD.isdisjoint(word))
        globs = sorted(words - self.plain - {"*", "*.py"}, key=lambda glob: (-len(glob), glob))
        self._globs = [(re.compile(translate(glob)), glob) for glob in globs if "[" not in glob]

    def find_glob(self, name: str) -> str | None:
        """Return the longest pattern with `*` or `?` that matches a name; None if no pattern does."""
        return next((glob for pattern, glob in self._globs if pattern.match(name)), None)


@cache
def load_vocabularies() -> tuple[Vocabulary, Vocabulary]:
    """Return the names of functions, and the names of folders and files, in the rules and marks of the table."""
    rows: tuple[_Row, ...] = (*built_in().rules, *built_in().marks)
    paths = (path for row in rows for path in (*row.files, row.file))
    return (
        Vocabulary(name for row in rows for name in row.functions),
        Vocabulary(part for path in paths for part in path.split("/")),
    )


@cache
def find_activity(name: str) -> Activity:
    """Return the activity of this name. If only rules of the configuration define it, it waits for nothing."""
    return built_in().activities.get(name) or Activity("nothing", f"is in {name.replace('_', ' ')} ({{operation}})")


@cache
def _load_marks(mark: Mark) -> tuple[_Patterns, ...]:
    return tuple(_make_patterns(row) for row in built_in().marks if row.mark == mark)


@lru_cache(maxsize=_CACHE_LIMIT)
def is_marked(mark: Mark, function: str, file: str = "") -> bool:
    """True if the table gives this mark to a function in a file, or to the name of a collective."""
    return any(patterns.match_place(function, file) for patterns in _load_marks(mark))


def has_mark(mark: Mark, frames: Iterable[Frame]) -> bool:
    """True if the table gives this mark to one of these frames."""
    return any(is_marked(mark, *frame.place) for frame in frames)


class AwaitedBy(NamedTuple):
    """A row of the table `awaits_threads`, compiled."""

    caller: _Patterns
    thread: _Patterns
    names: _Globs

    def calls(self, frames: Iterable[Frame]) -> bool:
        """True if one of these frames is the caller of this row."""
        return _has_frame(self.caller, frames)

    def awaits(self, thread: Thread) -> bool:
        """True if the caller waits for threads like this one."""
        return self.names.match(thread.name or "") or _has_frame(self.thread, thread.frames)


def _has_frame(patterns: _Patterns, frames: Iterable[Frame]) -> bool:
    return any(patterns.match_place(*frame.place) for frame in frames)


@cache
def awaits_threads() -> tuple[AwaitedBy, ...]:
    """Return the table of callers that wait for threads of a library, in its order."""
    rows = built_in().awaits_threads
    return tuple(
        AwaitedBy(
            _make_patterns(row),
            _Patterns(_Globs(row.thread_functions), _Globs((row.thread_file,), _make_path_pattern)),
            _Globs(row.thread_names),
        )
        for row in rows
    )


def describe_activity(name: str, operation: str | None) -> str:
    """Return a clause for a sentence about one rank: "waits in all_reduce", "is loading data (DataLoader)"."""
    clause = find_activity(name).says
    if operation:
        return clause.replace("{operation}", operation)
    return clause.replace(" ({operation})", "").replace("{operation}", name.replace("_", " "))


def describe_phase(name: str, phase: str | None) -> str:
    """Return a phrase for the phase of the program: "during evaluation".

    "" if there is no phase, or if the phase is the activity itself.
    """
    return "" if phase is None or phase == name else find_activity(phase).phase or ""
