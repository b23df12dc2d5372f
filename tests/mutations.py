"""Mutation test: change one place of the code, run the tests, and list the changes that no test detects.

usage: python -m tests.mutations [--count 200] [--seed 1] [--only WORDS] [--workers 2]

Run `--count` mutants: `--seed` draws them from all mutants of the modules of `TESTS`. Each mutant runs in a copy of
the tree against the tests of its module, up to the first failure. `tests/equivalent_mutants.toml` lists mutants that
no test has to detect, with the reason. Exit with 1 if at least one in ten of the other mutants survives. Guards that
must not go have rows in tests/faults/faults.toml.
"""

import argparse
import ast
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
RUN_SECONDS = 900.0
TEST_SECONDS = 150.0  # a test that hangs is stopped
UNCHANGED_SECONDS = 1800.0  # for all tests of all modules, on the unchanged code
MOST_SURVIVORS = 0.10

VERDICT_TESTS = (
    "unit/test_rules.py",
    "unit/test_by_number.py",
    "unit/test_check_first.py",
    "unit/test_waiting_launchers.py",
    "unit/test_hangs.py",
    "unit/test_verdicts_page.py",
    "unit/test_grouping.py",
)
DETECTOR_TESTS = (
    "unit/test_detector_bounds.py",
    "unit/test_detector.py",
    "unit/test_progress.py",
    "unit/test_progress_bounds.py",
    "unit/test_on_progress.py",
    "unit/test_waiting_launchers.py",
    "unit/test_pauses.py",
)
CAPTURE_TESTS = (
    "unit/test_capture_bounds.py",
    "unit/test_waiting_launchers.py",
    "integration/test_capture.py",
    "integration/test_silent_mount.py",
)
PROGRESS_TESTS = (
    "unit/test_progress_bounds.py",
    "unit/test_progress.py",
    "unit/test_waiting_launchers.py",
    "unit/test_metrics.py",
)
STORE_TESTS = ("unit/test_store_bounds.py", "unit/test_store.py", "unit/test_status.py", "integration/test_readers.py")
DETECTOR_MODULES = (
    *("capture_due", "baseline", "on_capture", "gpu_quorum", "on_power"),
    *("transitions", "job_watch", "watch_parts"),
)
CAPTURE_MODULES = ("process_dump", "rank_dumps", "rounds")
STATE_MODULES = (
    *("on_crash", "ended_jobs", "job_identity", "incident_timeline"),
    *("restored_incidents", "on_diagnosis", "on_sample", "on_scan"),
)
# Tests by module, the quickest first.
CHILD_TESTS = (
    "unit/test_child.py",
    "unit/test_pyspy_faults.py",
    "integration/test_pyspy.py",
    "integration/test_pystack.py",
)
TESTS = {
    **dict.fromkeys((f"verdict/{name}.py" for name in ("judge", "rules", "scene", "check_first")), VERDICT_TESTS),
    **dict.fromkeys((f"detector/{name}.py" for name in DETECTOR_MODULES), DETECTOR_TESTS),
    **dict.fromkeys((f"capture/{name}.py" for name in CAPTURE_MODULES), CAPTURE_TESTS),
    "probes/process/pyspy.py": ("unit/test_pyspy_faults.py", "integration/test_pyspy.py"),
    **dict.fromkeys(("probes/base/child.py", "probes/base/child_runner.py"), CHILD_TESTS),
    **dict.fromkeys((f"state/{name}.py" for name in STATE_MODULES), PROGRESS_TESTS),
    "formats/incident_file.py": (*STORE_TESTS, "unit/test_json.py", "integration/test_feedback.py"),
    **dict.fromkeys((f"store/{name}.py" for name in ("incident_folders", "store_lock", "sharing")), STORE_TESTS),
}


class Mutant(NamedTuple):
    """The source of a module with one change at `line`, counted from 1, and the tests that must fail."""

    module: str
    line: int
    source: str
    changed: str
    tests: tuple[str, ...]

    @property
    def diff(self) -> tuple[str, str]:
        """Return the removed and the added lines, without indentation: the key in the list of equivalents."""
        before, after = self.source.splitlines(), self.changed.splitlines()
        most = min(len(before), len(after))
        begin = next((at for at in range(most) if before[at] != after[at]), most)
        end = next((at for at in range(most - begin) if before[-1 - at] != after[-1 - at]), most - begin)
        removed, added = before[begin : len(before) - end], after[begin : len(after) - end]
        return "\n".join(map(str.strip, removed)), "\n".join(map(str.strip, added))

    def __str__(self) -> str:
        before, after = (
            "\n".join(f"  {sign} {line}" for line in text.split("\n"))
            for sign, text in zip("-+", self.diff, strict=True)
        )
        return f"hangwatch/{self.module}:{self.line}\n{before}\n{after}"


class Equivalent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mutant that may survive: its removed lines, its added lines, and the reason why no test has to detect it."""

    module: str
    before: str
    after: str
    why: str


# --- making mutants ------------------------------------------------------------------------------------------------

_SWAPPED = {
    ast.Lt: ("<", ("<=", ">=")), ast.LtE: ("<=", ("<", ">")), ast.Gt: (">", (">=", "<=")), ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)), ast.NotEq: ("!=", ("==",)), ast.Is: ("is", ("is not",)), ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)), ast.NotIn: ("not in", ("in",)),
    ast.And: ("and", ("or",)), ast.Or: ("or", ("and",)),
    ast.Add: ("+", ("-",)), ast.Sub: ("-", ("+",)), ast.Mult: ("*", ("/",)), ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("/",)), ast.Mod: ("%", ("*",)), ast.LShift: ("<<", (">>",)), ast.RShift: (">>", ("<<",)),
    ast.BitAnd: ("&", ("|",)), ast.BitOr: ("|", ("&",)),
}  # fmt: skip
_WORD = re.compile(r"[A-Za-z]\w*")

Edit = tuple[int, int, str]
"""First byte, end byte, and the new text."""


def mutants(module: str, source: str) -> list[Mutant]:
    """Return every mutant of a module, in source order.

    A mutant changes an operator, a comparison or its boundary, a constant, a `not` or a condition, or removes an
    argument, a returned result or a statement.
    """
    raw, tree = source.encode(), ast.parse(source)
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    plain = ast.dump(tree)
    found = {}
    for begin, end, text in _edits(tree, raw, starts):
        changed = (raw[:begin] + text.encode() + raw[end:]).decode()
        try:
            differs = ast.dump(ast.parse(changed)) != plain
        except SyntaxError:
            continue
        if differs:
            line = raw.count(b"\n", 0, begin) + 1
            found[begin, end, text] = Mutant(module, line, source, changed, TESTS[module])
    return [found[edit] for edit in sorted(found)]


def _edits(tree: ast.Module, raw: bytes, starts: Sequence[int]) -> Iterator[Edit]:
    skipped = {id(node) for part in _not_code(tree) for node in ast.walk(part)}

    def place(node: ast.AST) -> tuple[int, int]:
        return (
            starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def between(before: ast.AST, after: ast.AST, operator: ast.AST) -> Iterator[Edit]:
        begin, end = place(before)[1], place(after)[0]
        old, others = _SWAPPED.get(type(operator), ("", ()))
        at = raw.find(old.encode(), begin, end)
        for new in others if at >= 0 else ():
            yield at, at + len(old), new

    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare):
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from between(left, right, operator)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from between(left, right, node.op)
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield *place(node), f"({ast.unparse(node.operand)})"
        elif isinstance(node, ast.Constant):
            yield from ((*place(node), text) for text in _other_constants(node.value))
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield *place(node.test), f"(not ({ast.unparse(node.test)}))"
        elif isinstance(node, ast.Return) and node.value is not None:
            yield *place(node), "return None"
        elif isinstance(node, ast.Call):
            yield from (_left_out(*place(keyword), raw) for keyword in node.keywords if keyword.arg)
        elif _may_go(node):
            yield *place(node), "pass"


def _not_code(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that are not mutated: docstrings, annotations, decorators, class arguments, texts of
    f-strings.

    No test detects a change of them, or every test does.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield from (one for one in node.body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        if isinstance(node, ast.ClassDef):
            yield from (*node.keywords, *node.decorator_list)
        elif isinstance(node, ast.FunctionDef):
            yield from (*node.decorator_list, *filter(None, [node.returns]))
        elif isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.JoinedStr):
            yield from (part for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            yield node.format_spec


def _may_go(node: ast.AST) -> bool:
    """True if the statement can be removed without an undefined name."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    return isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete))


def _other_constants(value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (str(not value),)
    if isinstance(value, int):
        return (str(value + 1),)
    if isinstance(value, float):
        return (repr(value * 2 if value else 1.0),)
    if isinstance(value, str) and _WORD.fullmatch(value):
        return (repr(f"X{value}"),)
    return ()


def _left_out(begin: int, end: int, raw: bytes) -> Edit:
    """Return the edit that removes an argument and the comma after it, or before it if it is the last argument."""
    behind = re.compile(rb"\s*,\s*").match(raw, end)
    if behind:
        return begin, behind.end(), ""
    before = re.compile(rb",\s*$").search(raw[:begin])
    return (before.start() if before else begin), end, ""


# --- running them --------------------------------------------------------------------------------------------------


class Copy:
    """A copy of the tree in a separate folder. It runs the tests of one mutant after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
        # Python checks the bytecode by content: two mutants made in the same second may have the same size.
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "hangwatch", "tests"],
            cwd=folder,
            check=True,
        )

    def failing(self, mutant: Mutant) -> str:
        """Return pytest's line about the first test that fails with this mutant, or "" if the mutant survives."""
        with self.changed(f"hangwatch/{mutant.module}", mutant.changed):
            return self.first_failure(mutant.tests)

    @contextmanager
    def changed(self, name: str, text: str) -> Iterator[None]:
        """Replace the text of a file of the copy, until the block ends."""
        path = self.folder / name
        source = path.read_text()
        path.write_text(text)
        try:
            yield
        finally:
            path.write_text(source)

    def first_failure(
        self, tests: Sequence[str], run_seconds: float = RUN_SECONDS, test_seconds: float = TEST_SECONDS
    ) -> str:
        """Run these tests until one fails. Return the line of pytest about it, or an empty text if all pass."""
        report = self.report(tests, run_seconds, test_seconds)
        failed = re.search(r"^(?:FAILED|ERROR) tests/.*", report, re.MULTILINE)
        return failed[0] if failed else report.strip().rpartition("\n")[2]

    def report(self, tests: Sequence[str], run_seconds: float = RUN_SECONDS, test_seconds: float = TEST_SECONDS) -> str:
        """Run these tests until one fails. Return the output of pytest, or an empty text if all pass.

        For each call that led to the failure the output has a line of the source.
        """
        options = ["-x", "-q", "--no-header", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider"]
        command = [ROOT / "tests" / "worker", sys.executable, "-m", "pytest", *options]
        environ = {**os.environ, "PYTHONPATH": str(self.folder), "COLUMNS": "400"}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # pytest then rewrites the tests once, not for each mutant
        try:
            done = subprocess.run(
                [*command, f"--timeout={test_seconds:g}", *(f"tests/{test}" for test in tests)],
                cwd=self.folder, env=environ, capture_output=True, text=True, timeout=run_seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no end after {run_seconds:g} s"
        return f"{done.stdout}\npytest ended with {done.returncode}" if done.returncode else ""


def run_in_copies(
    copies: Sequence[Copy], task: Callable[[Copy, T], str], items: Sequence[T]
) -> Iterator[tuple[T, str]]:
    """Run `task` for each item, in parallel in the copies. Yield each item and its result, in order."""
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run_one(item: T) -> str:
        copy = free.get()
        try:
            return task(copy, item)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from zip(items, pool.map(run_one, items), strict=True)


def run(tried: Sequence[Mutant], copies: Sequence[Copy]) -> list[Mutant]:
    """Run the tests of all mutants, in parallel in the copies. Return the mutants that survive."""
    began, survivors = time.monotonic(), []
    for mutant, noticed in run_in_copies(copies, Copy.failing, tried):
        place = f"hangwatch/{mutant.module}:{mutant.line}"
        print(f"{time.monotonic() - began:6.0f} s  {place}  {noticed or 'SURVIVES'}", flush=True)
        if not noticed:
            survivors.append(mutant)
    return survivors


def source_of(module: str) -> str:
    """Return the source of a module of hangwatch. `module` is its path below the package."""
    return (ROOT / "hangwatch" / module).read_text()


def draw_mutants(count: int, seed: int, words: str = "") -> list[Mutant]:
    """Return `count` random mutants of the modules with `words` in their path, in source order."""
    every = [mutant for module in TESTS if words in module for mutant in mutants(module, source_of(module))]
    chosen = sorted(random.Random(seed).sample(range(len(every)), min(count, len(every))))
    print(f"{len(chosen)} of {len(every)} mutants, seed {seed}")
    return [every[number] for number in chosen]


def equivalent_rows() -> list[Equivalent]:
    return msgspec.convert(msgspec.toml.decode(EQUIVALENT.read_text()).get("mutant", []), list[Equivalent])


def equivalents() -> dict[tuple[str, str, str], str]:
    """Return the reasons of the equivalent mutants, by module and diff. Exit if one of them is no longer a mutant."""
    rows = equivalent_rows()
    known = {(row.module, row.before, row.after): row.why for row in rows}
    named_modules = {row.module for row in rows}
    every = {(module, *mutant.diff) for module in named_modules for mutant in mutants(module, source_of(module))}
    for module, before, after in known.keys() - every:
        sys.exit(f"{EQUIVALENT.name}: no mutant of hangwatch/{module} any more:\n  - {before}\n  + {after}")
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description="changes the code and lists what no test notices")
    parser.add_argument("--count", type=int, default=200, help="how many mutants to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: %(default)s)")
    parser.add_argument("--only", default="", help="only modules with these words in their path")
    parser.add_argument("--workers", type=int, default=2, help="number of parallel workers (default: %(default)s)")
    chosen = parser.parse_args()
    known = equivalents()
    drawn = draw_mutants(chosen.count, chosen.seed, chosen.only)
    if not drawn:
        parser.error(f"--only {chosen.only}: no mutant is in a module with these words in its path")
    with tempfile.TemporaryDirectory(prefix="hangwatch-mutations-") as folder:
        copies = [Copy(Path(folder) / str(number)) for number in range(chosen.workers)]
        needed = {test for mutant in drawn for test in mutant.tests}
        if broken := copies[0].first_failure(sorted(needed), UNCHANGED_SECONDS):
            sys.exit(f"without any mutant: {broken}")
        survivors = run(drawn, copies)
    unknown = [mutant for mutant in survivors if (mutant.module, *mutant.diff) not in known]
    for mutant in unknown:
        print(f"\n{mutant}")
    share = len(unknown) / len(drawn)
    print(
        f"\nof {len(drawn)} mutants {len(unknown)} survive ({share:.1%}), "
        f"and {len(survivors) - len(unknown)} that change nothing"
    )
    return int(share >= MOST_SURVIVORS)


if __name__ == "__main__":
    sys.exit(main())
