"""The exit codes of ranks in the summary that torchrun prints at its end. Measured with torch 2.13. Pure.

A crash needs them; `explain` reads the summary in `logs`. The owner of the job can forge it for that job only.
"""

import re
from typing import NamedTuple

LONGEST_LINE = 1024

FAILED = re.compile(r"failed \(exitcode: (-?\d{1,9})\) local_rank: (\d{1,7}) \(pid: (\d{1,10})\)")
_SUMMARY = re.compile(r"^  exitcode  : (-?\d{1,9}) \(pid: (\d{1,10})\)", re.MULTILINE)
_ROOT_CAUSE = "Root Cause (first observed failure):"


class RankExit(NamedTuple):
    """The exit code of a rank, negative for a signal. `is_first`: the launcher reports it as the first failure."""

    code: int
    is_first: bool


def exits(text: str) -> dict[int, RankExit]:
    """Return the exit of each rank, keyed by the pid in the log.

    A later restart in the same log overrides an earlier one. Only the first `LONGEST_LINE` characters of each line are
    read.
    """
    text = "\n".join(line[:LONGEST_LINE] for line in text.split("\n"))
    all_exits = {int(pid): RankExit(int(code), is_first=False) for code, pid in _SUMMARY.findall(text)}
    first = [(code, pid) for part in text.split(_ROOT_CAUSE)[1:] for code, pid in _SUMMARY.findall(part)[:1]]
    first += [(code, pid) for code, _, pid in FAILED.findall(text)]
    return all_exits | {int(pid): RankExit(int(code), is_first=True) for code, pid in first}
