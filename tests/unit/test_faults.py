"""The fault table is whole: its tests and guards exist. `python -m tests.faults` proves that each test needs its guard.

`make golden` prints the table into docs/reliability.md.
"""

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.faults import PAGE, ROOT, Proof, load_proofs, load_rows, page_lines

FEWEST = 50
SHORTEST_REASON = 15  # an "AssertionError" can have any cause


def function_names(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_the_table_has_at_least_fifty_rows_each_with_its_own_name_and_cells() -> None:
    rows = load_rows()
    assert len({row.name for row in rows}) == len(rows) >= FEWEST
    for row in rows:
        assert all((row.broken, row.works, row.noticed, row.lost, row.fails_with)), row.name
        cells = row.broken + row.works + row.noticed + row.lost
        assert "|" not in cells, row.name
        assert not re.search(r"\d (?:s|min|h)\b", cells), f"{row.name}: name the setting or limit in braces"
        assert len(row.fails_with) >= SHORTEST_REASON and "Timeout (" not in row.fails_with, row.name
        assert row.guard.replacement != row.guard.text, row.name


@pytest.mark.parametrize("row", load_proofs(), ids=lambda row: row.name)
def test_row_of_the_table_names_a_test_and_a_guard_that_exist(row: Proof) -> None:
    path, _, test = row.test.partition("::")
    assert test.partition("[")[0] in function_names(ROOT / path)
    changed = row.guard.removed_from((ROOT / row.guard.file).read_text())
    if row.guard.file.endswith(".py"):
        ast.parse(changed)


@pytest.mark.golden
def test_the_page_prints_the_table(golden_part: Callable[[Path, str, Iterable[str]], None]) -> None:
    golden_part(PAGE, "faults", page_lines(load_rows()))
