"""Pure: finds the rank in the prefix of a line (torchrun, mpirun, srun --label, pdsh, kubectl and other programs).

Also extracts the line from logs that store each line as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from hangwatch.formats import decoding
from hangwatch.model import RankId

_HOST_RANK = re.compile(r"^\[([^\[\]\s:]+):(\d{1,7})\](:?)")
_TORCHRUN = re.compile(r"^\[([A-Za-z_][\w.-]*?)(\d{1,7})\]:")
_OF_RANK = re.compile(r"^\[[Rr](?:ank|ANK)[ =:_-]?(\d{1,7})\](?::|(?= |$))")  # torch's, and of many programs
_MPIRUN = re.compile(r"^\[(?:[^\[\],]*@)?\d+,(\d{1,7})\]<std\w+>:")
_KUBECTL = re.compile(r"^\[pod/([^/\]\s]+)/[^\]\s]+\] ?")
_LABEL = re.compile(r"^\s*([\w.-]+): ?")
_LABELLED = re.compile(r"^\s*([\w.-]+): ?(?:Process \d+:|Thread (?:0x[0-9A-Fa-f]+|\d+) \()")
_LABEL_OF_TASK = re.compile(r"^ *(\d{1,7}): ")


class _Entry(msgspec.Struct):
    """An entry of Docker's json-file log, or of journalctl -o json."""

    log: str = ""
    MESSAGE: str = ""


def unwrap_json(line: str) -> list[str]:
    """Return the lines in a line of JSON (Docker's json-file log, journalctl -o json); else the line itself."""
    if not line.startswith("{"):
        return [line]
    try:
        entry = decoding.decode_json(line, _Entry)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return [line]
    return (entry.log or entry.MESSAGE or line).rstrip("\r\n").split("\n")


def are_labelled(head: Sequence[str]) -> bool:
    """True if lines begin with `N: ` (srun --label) or `host: ` (pdsh, clush): a label precedes `Process`.

    In a log, nearly every line must begin with `N: `, with few different numbers.
    """
    if any(found and found.group(1) not in {"Process", "Error"} for found in map(_LABELLED.match, head)):
        return True
    written = [line for line in head if line.strip()]
    labels = [found.group(1) for found in map(_LABEL_OF_TASK.match, written) if found]
    return len(labels) > 1 and len(labels) * 10 >= len(written) * 9 and len(set(labels)) * 2 <= len(labels)


def find_quote_prefix(head: Sequence[str]) -> str:
    """Return the common prefix of a text that was quoted in a mail or indented: `> `, or spaces."""
    written = [line for line in head if line.strip("> \t")]
    first = next(iter(written), "")
    before = first[: len(first) - len(first.lstrip("> \t"))]
    while not all(line.startswith(before) for line in written):
        before = before[:-1]
    return before


def remove_quote_prefix(pasted: str, line: str) -> str:
    """Remove that prefix from a line. In an empty line, a mail has cut the trailing space of the prefix."""
    return "" if line.rstrip() == pasted.rstrip() else line.removeprefix(pasted)


def split(line: str, file_id: RankId, *, labelled: bool) -> tuple[RankId, bool, str]:
    """Return the rank in the prefix of a line, true if it is sure to be a rank, and the rest of the line."""
    if line.startswith("["):
        return _split_bracket(line, file_id)
    found = _LABEL.match(line) if labelled else None
    if found and found.group(1) not in {"Process", "Error", "Reason"}:
        label, rest = found.group(1), line[found.end() :]
        if label.isascii() and label.isdigit() and len(label) < 8:
            return RankId(rank=int(label)), False, rest
        return RankId(node=label), False, rest
    return file_id, True, line


def _split_bracket(line: str, file_id: RankId) -> tuple[RankId, bool, str]:
    if found := _OF_RANK.match(line):  # of torch: a global rank. If the file has a local rank, it is part of the line
        if file_id.local_rank is not None:
            return file_id, True, line
        rank = RankId(rank=int(found.group(1)))
    elif found := _HOST_RANK.match(line):
        number, is_local = int(found.group(2)), bool(found.group(3))  # a colon after it: torchrun --tee
        rank = RankId(node=found.group(1), rank=None if is_local else number, local_rank=number if is_local else None)
    elif found := _MPIRUN.match(line):
        rank = RankId(rank=int(found.group(1)))
    elif found := _TORCHRUN.match(line):
        rank = RankId(node=file_id.node, local_rank=int(found.group(2)))
    elif found := _KUBECTL.match(line):
        rank = RankId(node=found.group(1))
    else:
        return file_id, True, line
    return rank, True, line[found.end() :]
