"""Prove the fault table: the test of each row passes, and fails for the stated reason without the guard of the row.

usage: python -m tests.faults [--workers 2] [ROW...]

Work on copies of the tree. Without names, prove all rows. Exit with 1 if a row is not proved.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faults import Proof, load_proofs
from tests.mutations import Copy, run_in_copies

TEST_SECONDS = 60.0  # without its guard, a test may wait for what never happens
BROKEN_CODE = re.compile(r"^E +(?:NameError|UnboundLocalError|AttributeError|TypeError|ImportError)\b", re.MULTILINE)


def find_flaw(copy: Copy, row: Proof) -> str:
    """Run the test of the row with its guard and without it. Return why the row is not proved, or an empty text."""
    tests = [row.test.removeprefix("tests/")]
    if report := copy.report(tests, test_seconds=TEST_SECONDS):
        return f"fails with its guard: {traceback(report)}"
    changed = row.guard.removed_from((copy.folder / row.guard.file).read_text())
    with copy.changed(row.guard.file, changed):
        if row.guard.file.endswith(".py"):  # an undefined name or a syntax error is no proof
            command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F82", row.guard.file]
            checked = subprocess.run(command, cwd=copy.folder, capture_output=True, text=True, check=False)
            if checked.returncode:
                return f"its change is not valid: {checked.stdout}"
        report = copy.report(tests, test_seconds=TEST_SECONDS)
    if not report:
        return "passes without its guard"
    is_meant = f"\nFAILED {row.test}" in report and row.fails_with in traceback(report)
    is_broken = BROKEN_CODE.search(report) is not None and not BROKEN_CODE.search(row.fails_with)
    return "" if is_meant and not is_broken else f"fails for another reason: {traceback(report)}"


def traceback(report: str) -> str:
    """Return the part of pytest's output about the failure; the whole output if it has no such part."""
    found = re.search(
        r"^=+ (?:FAILURES|ERRORS) =+\n[^\n]*\n(.*?)^=+ short test summary", report, re.MULTILINE | re.DOTALL
    )
    return found[1] if found else report


def main() -> int:
    parser = argparse.ArgumentParser(description="proves that each row of the fault table has a test and a guard")
    parser.add_argument("names", nargs="*", metavar="ROW", help="the rows to prove (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="number of parallel workers (default: %(default)s)")
    chosen = parser.parse_args()
    names = chosen.names
    rows = [row for row in load_proofs() if not names or row.name in names]
    if unknown := set(names) - {row.name for row in rows}:
        sys.exit(f"no row has the name {', '.join(sorted(unknown))}")
    os.environ.setdefault("HANGWATCH_NOTHING_MAY_SKIP", "1")  # a test that is skipped proves nothing
    began, unproved = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="hangwatch-faults-") as folder:
        Path(folder).chmod(0o755)  # some tests import the copy as another user
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder  # pytest else deletes folders of earlier runs, which takes long
        copies = [Copy(Path(folder, str(number))) for number in range(chosen.workers)]
        for row, flaw in run_in_copies(copies, find_flaw, rows):
            if flaw:
                unproved.append(row.name)
            print(f"{time.monotonic() - began:6.0f} s  {row.name}: {flaw or 'proved'}", flush=True)
    print(f"\n{len(rows)} rows: the tests of {len(rows) - len(unproved)} pass with their guard and fail without it")
    if unproved:
        print(f"not proved: {' '.join(unproved)}")
    return int(bool(unproved))


if __name__ == "__main__":
    sys.exit(main())
