"""XIDs, the error numbers of the NVIDIA driver: their meaning, severity and remedy (xids.toml)."""

import re
from functools import cache
from typing import Literal

from hangwatch import tables
from hangwatch.model import Value

FROM_NVML = ", reported by NVML"
"""The end of the text of an XID that only NVML reports."""

_RECOVERY_ACTION_CHANGED = 154
_PROCESS_NAME = re.compile(r"name=.{0,15}")  # a process chooses its name; the kernel keeps 15 bytes
_DETAIL = re.compile(r"[^)]*\): \d+, (?:Severity |Data \{)")
LINE = tables.compile_pattern("^{XID}")


class Meaning(Value, frozen=True):
    """One row of xids.toml."""

    meaning: str
    severity: Literal["critical", "warning", "notice", "as_told"]
    action: str


_UNLISTED = Meaning(
    meaning="not in hangwatch's table",
    severity="warning",
    action="look it up in https://docs.nvidia.com/deploy/xid-errors/",
)


@cache
def _meanings() -> dict[int, Meaning]:
    rows = tables.load("hangwatch.tables", "xids.toml", dict[str, Meaning])
    return {int(number): meaning for numbers, meaning in rows.items() for number in numbers.split(",")}


def find_meaning(code: int) -> Meaning:
    """Return the row of XID `code`. An XID that is not listed is a warning."""
    return _meanings().get(code, _UNLISTED)


def severity(code: int, text: str) -> Literal["critical", "warning", "notice"]:
    """Return the severity of XID `code`. If its row has `as_told`, the text of the log line states the severity.

    NVML does not report that text. Then such an XID is a warning.
    """
    in_table = find_meaning(code).severity
    if in_table != "as_told":
        return in_table
    text = _PROCESS_NAME.sub("", text)
    if text.endswith(FROM_NVML):
        return "warning"
    if code == _RECOVERY_ACTION_CHANGED:
        return "notice" if re.search(r"to 0x\w+ \(None\)", text) else "critical"
    return "critical" if re.search(r"\bFatal\b", text) else "warning"


def read_code(line: str) -> int | None:
    """Return the XID in a line of the kernel log; None if the line reports none."""
    found = LINE.match(line)
    return int(found["code"]) if found else None


def is_fatal_switch_line(text: str) -> bool:
    """True for the line of a fatal SXID: `SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up`."""
    return re.search(r"(?i)\): \d+, fatal\b", text) is not None


def is_detail(text: str) -> bool:
    """True for a line of registers that follows the line of an SXID under the same number."""
    return _DETAIL.match(text) is not None


def key_of_line(code: int, text: str) -> str:
    """Return a key of an XID or SXID line. A newer line replaces an older one of the same GPU, code and key.

    So a line with a lower severity does not replace one with a higher severity. Exception: XID 154 reports the
    present state of the GPU.
    """
    if code == _RECOVERY_ACTION_CHANGED:
        return ""
    return "critical" if is_fatal_switch_line(text) else severity(code, text)


def shorten_address(address: str) -> str:
    """Return a PCI address as in the driver's log lines, `0000:3b:00`. NVML writes `00000000:3B:00.0`. "" for none."""
    domain, _, rest = address.lower().partition(".")[0].partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}" if rest else ""
