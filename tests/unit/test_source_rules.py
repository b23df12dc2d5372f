"""Rules for the source that ruff and import-linter do not have.

* No function is longer than 60 lines, except with a reason: `def name(...): # long: REASON`.
* The garbage collector does not track values, so none may be part of a cycle.
* Checks read the machine only through probes: no module of checks/ opens, lists or stats a file.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

from hangwatch import tables

ROOT = Path(__file__).parents[2]
FOLDERS = ("hangwatch", "benchmarks", "deploy", "docs", "grafana", "tests")
MOST_LINES = 60
REASON = re.compile(r"# long: \w.*")


def too_long(source: str) -> Iterator[str]:
    """Yield the first line of each function that is too long and has no reason."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        length = node.end_lineno - node.lineno + 1
        head = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
        if length > MOST_LINES and not REASON.search(head):
            yield f"{node.lineno}: {node.name}: {length} lines"


def test_function_is_at_most_60_lines_or_says_why() -> None:
    found = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        found += [f"{path.relative_to(ROOT)}:{name}" for name in too_long(path.read_text())]
    assert found == [], "split by subject, or give the reason: # long: REASON"


def test_lint_finds_a_long_function_and_takes_a_reason() -> None:
    body = "    pass\n" * MOST_LINES
    assert list(too_long(f"def f() -> None:\n{body}")) == ["1: f: 61 lines"]
    assert list(too_long(f"async def f() -> None:\n{body}")) == ["1: f: 61 lines"]
    assert list(too_long(f"def f(\n    a: int,\n) -> None:  # long: a list, in order\n{body}")) == []
    assert list(too_long(f"def f() -> None:\n{body}".replace("    pass\n", "", 1))) == []


PACKAGE = ROOT / "hangwatch"
PATTERNS = re.compile(r'\bPatterns\("([a-z_]+\.toml)"\)')


@pytest.mark.parametrize(
    "name", sorted({name for path in PACKAGE.rglob("*.py") for name in PATTERNS.findall(path.read_text())})
)
def test_patterns_of_a_table_are_valid(name: str) -> None:
    table = tables.Patterns(name)
    assert [table[row].pattern for row in table.rows]


NO_VALUE = re.compile(r"Callable|threading\.|Popen")


def untracked_with_more_than_values(source: str) -> Iterator[str]:
    """Yield the classes of values with a function or an event in a field, unless they set `gc=True`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or "Value" not in map(ast.unparse, node.bases):
            continue
        fields = [ast.unparse(field.annotation) for field in node.body if isinstance(field, ast.AnnAssign)]
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        if any(map(NO_VALUE.search, fields)) and options.get("gc") != "True":
            yield node.name


def test_value_that_holds_a_function_is_tracked_by_the_garbage_collector() -> None:
    found = {path: list(untracked_with_more_than_values(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


def test_untracked_value_with_a_function_is_found() -> None:
    body = "frozen=True):\n    stop: threading.Event\n    limit: int"
    assert list(untracked_with_more_than_values(f"class Request(Value, {body}")) == ["Request"]
    assert list(untracked_with_more_than_values(f"class Request(Value, gc=True, {body}")) == []


CHECKS = sorted((PACKAGE / "checks").glob("*.py"))

# Methods of Path that are not in PurePath. Names that strings, matches and dictionaries also have are excluded.
SHARED = {"replace", "group", "copy"}
TOUCHING = {name for name in set(dir(Path)) - set(dir(PurePath)) if not name.startswith("_")} - SHARED


def touches(source: str) -> Iterator[str]:
    """Yield the calls of a module that access a file. Calls of functions of an imported module do not count."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hangwatch"
        for alias in node.names
    }
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Name(id="open"):
                yield f"line {call.lineno}: open()"
            case ast.Attribute(value=ast.Name(id=name)) if name in modules:
                continue
            case ast.Attribute(attr=attribute) if attribute in TOUCHING:
                yield f"line {call.lineno}: .{attribute}()"


@pytest.mark.parametrize("path", CHECKS, ids=lambda path: path.stem)
def test_a_check_opens_nothing(path: Path) -> None:
    assert list(touches(path.read_text())) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("text = (node.proc_root / 'cpuinfo').read_text()", ["line 2: .read_text()"]),
        ("for comm in node.proc_root.glob('[0-9]*/comm'): pass", ["line 2: .glob()"]),
        ("with open('/proc/stat') as file: pass", ["line 2: open()"]),
        ("Path('/proc/stat').open().close()", ["line 2: .open()"]),
        ("network.resolve('node-1')", []),
        ("'a-b'.replace('-', '_')", []),
    ],
)
def test_what_is_seen_as_touching_a_file(line: str, expected: list[str]) -> None:
    assert list(touches(f"from hangwatch.probes.network import interfaces as network\n{line}\n")) == expected
