"""Run every finding, print which changed, and renew the table of README.md.

usage: python findings/run_all.py [NAME...]
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- table: begin, printed by `make findings` -->\n", "<!-- table: end -->"
HEAD = re.compile(r"# (tool|finding|last run): (.*(?:\n#  +.*)*)")


def heads(script: Path) -> dict[str, str]:
    """Return what the head of a script says: tool, finding, last run."""
    return {name: re.sub(r"\n#\s+", " ", text) for name, text in HEAD.findall(script.read_text())}


def run(script: Path) -> bool:
    """Run a script and print its answer; where it is as described, its head gets the date of today."""
    begin = time.monotonic()
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    as_described = done.returncode == 0
    print(f"{script.stem}: {'as described' if as_described else 'CHANGED'} ({time.monotonic() - begin:.0f} s)")
    if as_described:
        today = time.strftime("%Y-%m-%d")
        script.write_text(re.sub(r"# last run: .*", f"# last run: {today}", script.read_text(), count=1))
    else:
        print(done.stdout[-1000:], done.stderr[-1000:], sep="\n")
    return as_described


def write_table() -> None:
    """Write one row for each script between the two marks of README.md."""
    rows = ["| name | tool | finding | last run |", "|---|---|---|---|"]
    for script in sorted(FOLDER.glob("*-*.sh")):
        head = heads(script)
        rows.append(f"| [{script.stem}]({script.name}) | {head['tool']} | {head['finding']} | {head['last run']} |")
    page = FOLDER / "README.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + "\n".join(rows) + "\n" + END + rest.split(END, 1)[1])


def main() -> int:
    """Run the named scripts, or all; 1 if one changed."""
    names = sys.argv[1:]
    scripts = [script for script in sorted(FOLDER.glob("*-*.sh")) if not names or script.stem in names]
    answers = [run(script) for script in scripts]
    write_table()
    print(f"{sum(answers)} of {len(answers)} findings as described")
    return 0 if all(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
