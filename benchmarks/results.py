"""Results of benchmarks: one data file each in `benchmarks/results/`, from which docs/benchmarks.md is made.

`python -m benchmarks.results NAME COMMAND < TABLE` keeps the rows of a Markdown table as the result NAME.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
_PACKAGES = ("hangwatch", "py-spy", "msgspec", "nvidia-ml-py")


class Table(msgspec.Struct, frozen=True):
    """Rows of text under their columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = (self.columns, tuple("---" for _ in self.columns), *self.rows)
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


class Result(msgspec.Struct, frozen=True):
    """One result: the command that made it, when, where and of what, its tables, and figures by name."""

    command: str
    date: str
    commit: str
    machine: str
    versions: dict[str, str]
    tables: tuple[Table, ...]
    figures: dict[str, float]

    def markdown(self) -> str:
        """Return the text of the page: command and date, then the tables."""
        head = f"`{self.command}`, {self.date}, {self.commit}.\n\n"
        return head + "\n".join(table.markdown() for table in self.tables)


def load(name: str) -> Result:
    """Return a kept result."""
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=Result)


def report(
    name: str, tables: Sequence[Table], figures: Mapping[str, float] | None = None, *, is_kept: bool = False
) -> None:
    """Print a result. With `is_kept`, write its data file and its part of docs/benchmarks.md, too."""
    result = Result(
        command=_command(),
        date=datetime.date.today().isoformat(),
        commit=_commit(),
        machine=_machine(),
        versions={package: metadata.version(package) for package in _PACKAGES} | {"python": platform.python_version()},
        tables=tuple(tables),
        figures=dict(figures or {}),
    )
    print(result.markdown())
    for figure, value in result.figures.items():
        print(f"{figure}: {value:g}")
    if is_kept:
        keep(name, result)


def keep(name: str, result: Result) -> None:
    """Write the data file of a result, and renew its part of docs/benchmarks.md."""
    FOLDER.mkdir(exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
    (FOLDER / f"{name}.json").write_bytes(encoded + b"\n")
    PAGE.write_text(renew(PAGE.read_text(), name, result.markdown()))


def renew(page: str, name: str, text: str) -> str:
    """Return the page with the generated part `name` replaced.

    Raises ValueError if the page has no such part.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{PAGE.name} has no marks of the part {name!r}: add {begin.strip()} and {end}")
    return before + begin + text + end + after


def _command() -> str:
    program = Path(sys.argv[0]).resolve()
    return " ".join((str(program.relative_to(ROOT)), *(one for one in sys.argv[1:] if one != "--write")))


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "hangwatch")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-changed" if changed else "")


def _machine() -> str:
    cpu_info = Path("/proc/cpuinfo").read_text()
    models = re.findall(r"^model name\s*: (.*)$", cpu_info, re.MULTILINE) or [platform.machine()]
    return f"{os.cpu_count()} x {models[0]}, Linux {platform.release()}"
