"""Fails if hangwatch/ has more statements than its budget: what a stranger must read only grows on purpose.

usage: python -m tests.statement_budget STATEMENTS

Imports and docstrings do not count. A commit that takes statements out lowers the number in .ci/run; a commit that
raises it does nothing else, and says why.
"""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hangwatch"


def count(tree: ast.AST) -> int:
    """Return the number of statements of a module, without its imports and docstrings."""
    return sum(
        isinstance(node, ast.stmt)
        and not isinstance(node, ast.Import | ast.ImportFrom)
        and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        for node in ast.walk(tree)
    )


def main() -> int:
    """Print the number of statements and the budget; 1 if it is exceeded."""
    budget = int(sys.argv[1])
    statements = sum(count(ast.parse(file.read_text())) for file in PACKAGE.rglob("*.py"))
    print(f"hangwatch/ has {statements} statements; the budget of .ci/run is {budget}")
    return int(statements > budget)


if __name__ == "__main__":
    sys.exit(main())
