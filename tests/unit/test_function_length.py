"""No function is longer than 60 lines, except with a reason: `def name(...): # long: REASON`.

ruff limits parameters and complexity, see pyproject.toml.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

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
