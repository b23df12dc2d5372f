"""The generated tables of docs/measurements.md, each between two marks.

`python -m tests.measurements_page first-hour "make first-hour" < TABLE` replaces the table `first-hour`.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "measurements.md"
MOST_NAMES = 3


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def part(name: str) -> str:
    """Return the generated text of the table `name` on the page."""
    return re.findall(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", PAGE.read_text(), re.DOTALL)[0]


def list_names(names: list[str], *, are_counted: bool = False) -> str:
    """Return the first names of a row, and the number of all others. With `are_counted`, return only their number."""
    shown = names[: 0 if are_counted else MOST_NAMES]
    more = [f"{len(names) - len(shown)} more"] if len(names) > len(shown) else []
    return "; ".join((*shown, *more))


def write(name: str, command: str, text: str) -> None:
    """Replace the generated text of the table `name`. Write the command and today's date above it."""
    head = f"<!-- {name}: begin -->\n`{command}`, {datetime.date.today().isoformat()}.\n\n"
    page, places = re.subn(
        rf"<!-- {name}: begin -->.*?(?=<!-- {name}: end -->)", lambda _: head + text, PAGE.read_text(), flags=re.DOTALL
    )
    if places != 1:
        raise SystemExit(f"{PAGE}: the marks of {name} are missing")
    PAGE.write_text(page)
    print(f"{PAGE}: {name} renewed", file=sys.stderr)


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], sys.stdin.read())
