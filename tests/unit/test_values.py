"""Values: the garbage collector does not track them, so none may be part of a cycle."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hangwatch"
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
