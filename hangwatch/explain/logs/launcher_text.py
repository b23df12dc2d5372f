"""Pure: how the ranks of a job ended, by what torchrun prints at its end. Measured with torch 2.13.

Whoever can write into that log can write such lines there: the owner's word on his own job.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LONGEST_LINE = 1024

_FIRST = re.compile(r"failed \(exitcode: (-?\d{1,9})\) local_rank: \d{1,7} \(pid: (\d{1,10})\)")
_SUMMARY = re.compile(r"^  exitcode  : (-?\d{1,9}) \(pid: (\d{1,10})\)", re.MULTILINE)
_ROOT_CAUSE = "Root Cause (first observed failure):"


class Exited(NamedTuple):
    """How a rank ended: its exit code, negative for a signal; `is_first`: its launcher calls it the first failure."""

    code: int
    is_first: bool


def exits(text: str) -> dict[int, Exited]:
    """By the pid that the launcher gives; of two starts in one log the later one counts.

    Of a line its first `LONGEST_LINE` characters count.
    """
    text = "\n".join(line[:LONGEST_LINE] for line in text.split("\n"))
    found = {int(pid): Exited(int(code), is_first=False) for code, pid in _SUMMARY.findall(text)}
    first = [(code, pid) for part in text.split(_ROOT_CAUSE)[1:] for code, pid in _SUMMARY.findall(part)[:1]]
    return found | {int(pid): Exited(int(code), is_first=True) for code, pid in (*_FIRST.findall(text), *first)}
