"""Fill docs/support.md: test each part of the support matrix with the version that this machine has.

usage: python -m tests.support [PART...]

The rows are those of tests/data/support.toml. The results are kept in tests/data/support.json: a part that is not on
this machine keeps its version and its date. Exit status 1: a test of a part failed.
"""

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hangwatch.formats import toml_file

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
PAGE, RESULTS = ROOT / "docs/support.md", DATA / "support.json"
MOST_SECONDS = 900.0
_NUMBER = re.compile(r"\d+(?:\.\d+)+|\d+")
HEAD = """# Support matrix

This page lists for operators the versions that were tested. `make support` writes it, and renews the rows of the parts
that are on its machine. *Read*: the code follows sources or manuals, and was not run.

| part | version that ran | date | command | further |
|---|---|---|---|---|
"""
END = """
Releases of PyTorch by `make torch-release WHEEL=FILE` on 2026-11-28, which reads a wheel for Linux without an import.
All layouts are known. Of 2.15.0, `make long PART=torch-releases` compared 276,988 rows with the processes' own dumps:
gloo's, also without symbols, and those of a hook, as nccl2 has them. None differed.

| release | layout | recorder in libtorch_cpu | in libtorch_cuda |
|---|---|---|---|
| 2.5.1 | 2.5 | none | pointer |
| 2.6.0, 2.7.1 | 2.6 to 2.7 | none | pointer |
| 2.8.0, 2.9.1 | 2.8 to 2.9 | pointer | pointer |
| 2.10.0, 2.11.0, 2.12.1, 2.13.0 (CPU), 2.14.1 | 2.10 to 2.15 | pointer | pointer |
| 2.15.0 | 2.10 to 2.15 | pointer and registry | pointer |

First on real GPUs: `hangwatch check gpu_power gpu_health dump_rights`, then `sudo hangwatch dump` beside a job that
trains. The dump must say `Moving`, or show all ranks at work. Please report what differs.
"""


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the environment, the commands that show its version and test it, and what else is known."""

    part: str
    version: str = ""
    command: str = ""
    further: str = ""


class Result(msgspec.Struct):
    """The version of a part with which its command succeeded, and the date."""

    version: str
    date: str


def read_rows() -> list[Row]:
    text = (DATA / "support.toml").read_text()
    return msgspec.convert(toml_file.parse(text, "support.toml")["row"], list[Row])


def read_results() -> dict[str, Result]:
    return msgspec.json.decode(RESULTS.read_bytes(), type=dict[str, Result]) if RESULTS.exists() else {}


def render(rows: Sequence[Row], results: Mapping[str, Result]) -> str:
    """Return the page."""
    lines = []
    for row in rows:
        result = results.get(row.part, Result("not run", ""))
        command = f"`{row.command.removeprefix('python -m ')}`" if row.command else ""
        lines.append(f"| {row.part} | {result.version} | {result.date} | {command} | {row.further} |\n")
    return HEAD + "".join(lines) + END


def run(row: Row) -> Result | None:
    """Test a part. Return None if it is not on this machine. Raises AssertionError if its test fails."""
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"}
    if shutil.which("pyenv"):  # its shims run only chosen versions
        pyenv = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False)
        environ["PYENV_VERSION"] = ":".join([platform.python_version(), *pyenv.stdout.split()])
    shell = {"shell": True, "cwd": ROOT, "env": environ, "text": True, "check": False}
    asked = subprocess.run(row.version, capture_output=True, timeout=60.0, **shell)  # type: ignore[call-overload]
    version = _NUMBER.search(asked.stdout)
    if asked.returncode or version is None:
        return None
    done = subprocess.run(row.command, capture_output=True, timeout=MOST_SECONDS, **shell)  # type: ignore[call-overload]
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    return Result(version[0], datetime.datetime.now(datetime.timezone.utc).date().isoformat())


def main(wanted: Sequence[str]) -> int:
    """Test the wanted parts, by default all, and write the page. Return the exit status."""
    results, failures = read_results(), 0
    for row in read_rows():
        if not row.command or (wanted and row.part not in wanted):
            continue
        began = time.monotonic()
        try:
            result = run(row)
            outcome = f"{result.version} ran" if result is not None else "not on this machine"
            results |= {row.part: result} if result is not None else {}
        except (AssertionError, subprocess.TimeoutExpired) as error:
            outcome, failures = f"failed: {error}", failures + 1
        print(f"{row.part}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
        kept = {part: {"version": each.version, "date": each.date} for part, each in sorted(results.items())}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(render(read_rows(), results))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
