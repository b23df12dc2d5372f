"""Checks read the machine only through probes: no module of checks/ opens, lists or stats a file.

import-linter forbids modules such as `os`. This test covers `open` and the methods of `pathlib.Path`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

CHECKS = sorted((Path(__file__).parents[2] / "hangwatch" / "checks").glob("*.py"))

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
