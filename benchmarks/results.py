"""Results of benchmarks: one data file each in `benchmarks/results/`, from which docs/benchmarks.md is made.

`python -m benchmarks.results NAME COMMAND < TABLE` keeps a Markdown table as the result NAME. `python -m
benchmarks.results` renews the page and the figures of the README from the data files.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
_PACKAGES = ("hangwatch", "py-spy", "msgspec", "nvidia-ml-py", "torch")
_LIST_PACKAGES = """import json, platform
from importlib import metadata
found = {one.metadata["Name"]: one.version for one in metadata.distributions()}
print(json.dumps(found | {"python": platform.python_version()}))"""
FIGURES = {
    "detection": "{false pages:g} of {healthy runs:g} healthy runs page, and {pages of long pauses:g} of "
    "{long pauses:g} with a pause of 100 s to an hour; {recall:.1%} of {hung runs:g} hangs, "
    "{found in 3 minutes:.0%} in 3 minutes",
    "culprit": "{guilty:g} of our own cases with a guilty rank: named in {right:g}, to check first in {check first:g}; "
    "an innocent named in {wrong:g} of all, to check first in {misleads:g}",
    "dump": "`hangwatch dump --rounds 1`, 72 processes: {CPU ratio of dump to py-spy:.1f} times the CPU of "
    "`py-spy dump` for each; with the usual rounds {CPU of all rounds, py-spy = 1:.1f} times",
    "overhead": "daemon, 8 fake GPUs, 64 loader workers without torch: {CPU ratio, 8 ranks, 64 loader workers:.2f} "
    "times the CPU of nvitop-exporter, {Rss MiB, 8 ranks, 64 loader workers:.0f} MiB; more than it on one real GPU",
}
"""The figures of the README: a sentence for each result."""
GOALS = {
    "detection": {
        "false pages": 0.0,
        "hangs without a page, ratio": 0.01,
        "median seconds to the verdict, counter readable": 30.0,
        "median seconds to the page": 135.0,
        "kinds of hangs without a page in a minute": 10.0,
    },
    "culprit": {"wrong": 0.0},
    "hangbench": {"failed answers": 0.0},
    "dump": {
        "CPU ratio of dump to py-spy": 0.8,
        "CPU ratio of dump to py-spy, torch": 0.8,
        "wall seconds of check": 0.3,
        "start of --version, empty Python = 1": 2.0,
        "start of status --help, empty Python = 1": 7.0,
        "start of dump --help, empty Python = 1": 7.0,
        "start of explain --help, empty Python = 1": 7.0,
    },
    "overhead": {
        "CPU ratio, 8 ranks, 64 loader workers": 0.35,
        "CPU ratio, 8 ranks, 2,000 processes": 0.5,
        "CPU ratio, the node's own GPUs": 1.0,
        "Rss MiB, 8 ranks, 64 loader workers": 64.0,
        "Rss MiB, 8 ranks, 2,000 processes": 64.0,
        "most Rss MiB, 8 ranks with torch, 2,000 processes": 62.0,
    },
    "scale": {
        "group and verdict, 16384": 0.35,
        "group and verdict, 100000": 2.5,
        "rules, 16384": 1.5,
        "rules, 100000": 4.0,
        "largest slope": 1.1,
    },
    "day": {"wrong": 0.0},
}
"""The goals of each result: the most that a figure may be. A figure that was not measured misses its goal."""


class Table(msgspec.Struct, frozen=True):
    """Rows of text under their columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        head, *rows = (f"| {' | '.join(line)} |\n" for line in (self.columns, *self.rows))
        return "".join((head, f"|{'---|' * len(self.columns)}\n", *rows))


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """One result: the command that made it, when, where and of what.

    `summary` are lines of text. Only the data file has `details`. `goals` are those of the figures.
    """

    command: str
    date: str
    commit: str
    machine: str
    versions: dict[str, str]
    summary: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    details: tuple[Table, ...] = ()
    figures: dict[str, float] = {}
    goals: dict[str, float] = {}

    @property
    def missed(self) -> tuple[str, ...]:
        """The figures that miss their goal, as text."""
        return tuple(
            f"{name}: {f'{self.figures[name]:.3g} > {goal:g}' if name in self.figures else 'not measured'}"
            for name, goal in self.goals.items()
            if not self.figures.get(name, math.inf) <= goal
        )

    def markdown(self) -> str:
        """Return the text of the page: command, date and commit, the missed goals, the summary, then the tables."""
        head = f"`{self.command}`, {', '.join(filter(None, (self.date, self.commit)))}.\n"
        missed = (f"Goal missed: {line}." for line in self.missed)
        lines = "".join(f"* {line}\n" for line in (*missed, *self.summary))
        return "\n".join((head, *filter(None, (lines,)), *(table.markdown() for table in self.tables)))


def load(name: str) -> Result:
    """Return a kept result."""
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=Result)


def report(
    name: str,
    tables: Sequence[Table] = (),
    figures: Mapping[str, float] | None = None,
    *,
    summary: Sequence[str] = (),
    details: Sequence[Table] = (),
    command: str | None = None,
    versions: Mapping[str, str] | None = None,
    is_kept: bool = False,
) -> int:
    """Print a result. With `is_kept`, write its data file and renew the page, too. Return 1 if it misses a goal, or 0.

    `command` is the command that makes the result; without it, this program with its arguments. `versions` are those
    of what was measured; without them, those of this Python.
    """
    result = Result(
        command=command or _command(),
        date=datetime.date.today().isoformat(),
        commit=_commit(),
        machine=_machine(),
        versions=dict(versions or find_versions()),
        summary=tuple(summary),
        tables=tuple(tables),
        details=tuple(details),
        figures={figure: value for figure, value in (figures or {}).items() if math.isfinite(value)},
        goals=GOALS.get(name, {}),
    )
    print(result.markdown())
    for figure, value in result.figures.items():
        print(f"{figure}: {value:g}")
    if is_kept:
        keep(name, result)
    for line in result.missed:
        print(f"{name}: goal missed: {line}", file=sys.stderr)
    return int(bool(result.missed))


def keep(name: str, result: Result) -> None:
    """Write the data file of a result, and renew its part of docs/benchmarks.md."""
    FOLDER.mkdir(exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
    (FOLDER / f"{name}.json").write_bytes(encoded + b"\n")
    PAGE.write_text(renew(PAGE.read_text(), name, result.markdown()))
    README.write_text(make_readme(README.read_text()))


def names() -> list[str]:
    """Return the names of all kept results."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def make_page(page: str) -> str:
    """Return docs/benchmarks.md with all its parts made from the data files."""
    for name in names():
        page = renew(page, name, load(name).markdown())
    return page


def make_readme(text: str) -> str:
    """Return the README with its figures made from the data files."""
    kept = [(sentence, load(name)) for name, sentence in FIGURES.items() if (FOLDER / f"{name}.json").exists()]
    rows = ((sentence.format_map(result.figures), f"`{result.command}`") for sentence, result in kept)
    return renew(text, "figures", Table(("measured", "by"), tuple(rows)).markdown())


def renew(page: str, name: str, text: str) -> str:
    """Return the page with the generated part `name` replaced.

    Raises ValueError if the page has no such part.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"no marks of the part {name!r}: add {begin.strip()} and {end}")
    return before + begin + text + end + after


def _command() -> str:
    program = Path(sys.argv[0]).resolve()
    return " ".join((str(program.relative_to(ROOT)), *(one for one in sys.argv[1:] if one != "--write")))


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.toml", "deploy")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-changed" if changed else "")


def find_versions(programs: Iterable[str | Path] = (), python: str | Path = sys.executable) -> dict[str, str]:
    """Return the versions of the measured programs, of the measured Python, and of the packages that it has."""
    done = subprocess.run([python, "-I", "-c", _LIST_PACKAGES], capture_output=True, text=True, check=True)
    listed: dict[str, str] = json.loads(done.stdout)
    found = {name: listed[name] for name in ("python", *_PACKAGES) if name in listed}
    for program in filter(shutil.which, programs):
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        numbers = re.findall(r"\d+(?:\.\d+)+", done.stdout + done.stderr)
        found[Path(program).name] = numbers[0] if numbers else "unknown"
    return found


def _machine() -> str:
    cpu_info = Path("/proc/cpuinfo").read_text()
    models = re.findall(r"^model name\s*: (.*)$", cpu_info, re.MULTILINE) or [platform.machine()]
    return f"{os.cpu_count()} x {models[0]}, Linux {platform.release()}"


def _read_table(lines: Iterable[str]) -> Table:
    """Return the table of Markdown lines."""
    columns, _, *rows = (tuple(line.strip().strip("|").split("|")) for line in lines if line.startswith("|"))
    return Table(tuple(cell.strip() for cell in columns), tuple(tuple(cell.strip() for cell in row) for row in rows))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        report(sys.argv[1], [_read_table(sys.stdin)], command=sys.argv[2], is_kept=True)
    else:
        PAGE.write_text(make_page(PAGE.read_text()))
        README.write_text(make_readme(README.read_text()))
