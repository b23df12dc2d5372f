"""The table of activities: activities.toml, with its patterns compiled. Pure."""

import re
from collections.abc import Callable, Iterable
from fnmatch import translate
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import msgspec

from hangwatch import tables
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
# The root, or any folder of a whole path: a short path that still begins with `/`
_CHECKOUT = r"/(?:/(?:.*/)?)?"
CACHE_LIMIT = 1 << 16


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


class Rule(_Row, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A row that gives an activity to the stacks with a frame."""

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
    rules: tuple[Rule, ...]
    marks: tuple[_Marked, ...]
    awaits_threads: tuple[_Awaiting, ...]


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

    def match_any(self, frames: Iterable[Frame]) -> bool:
        """True if they match one of these frames."""
        return any(self.match_place(*frame.place) for frame in frames)


def make_patterns(row: _Row) -> _Patterns:
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


@cache
def built_in() -> _Tables:
    """Return the built-in tables of activities."""
    return tables.load("hangwatch.tables", "activities.toml", _Tables)


@cache
def packages() -> frozenset[str]:
    """Return the packages that do not belong to a user's program: those in the rules, and `packages` of the table."""
    paths = (path for rule in built_in().rules for path in (*rule.files, rule.file) if "/" in path)
    named = (path.partition("/")[0] for path in paths)
    return frozenset(package for package in named if package.isidentifier()).union(built_in().packages)


@cache
def find_activity(name: str) -> Activity:
    """Return the activity of this name. If only rules of the configuration define it, it waits for nothing."""
    return built_in().activities.get(name) or Activity("nothing", f"is in {name.replace('_', ' ')} ({{operation}})")


@cache
def _load_marks(mark: Mark) -> tuple[_Patterns, ...]:
    return tuple(make_patterns(row) for row in built_in().marks if row.mark == mark)


@lru_cache(maxsize=CACHE_LIMIT)
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

    def awaits(self, thread: Thread) -> bool:
        """True if the caller waits for threads like this one."""
        return self.names.match(thread.name or "") or self.thread.match_any(thread.frames)


@cache
def awaits_threads() -> tuple[AwaitedBy, ...]:
    """Return the table of callers that wait for threads of a library, in its order."""
    rows = built_in().awaits_threads
    return tuple(
        AwaitedBy(
            make_patterns(row),
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
    """Return a phrase for the phase: "during evaluation"; "" without a phase, or if it is the activity itself."""
    return "" if phase is None or phase == name else find_activity(phase).phase or ""
