"""The kernel log, as dmesg, journalctl -k, /dev/kmsg and syslog print it, as evidence. Pure.

A file is a kernel log if all its lines have that shape. In other files, the job has written such lines. Both are
evidence and name no rank.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from hangwatch import tables, words
from hangwatch.model import CheckFirst, Evidence, RankId, Supplement
from hangwatch.tables import kernel_lines, secret_forms, xids

_PATTERNS = tables.Patterns("kernel_prefixes.toml")
MOST_KEPT = 64
_SHOWN = 8
_TEXT_CHARACTERS = 240
_CONTINUES = ("-- ", " SUBSYSTEM=", " DEVICE=", " " * 12)  # dmesg indents the next lines of a message


class KernelLogLine(NamedTuple):
    """A line of the kernel log. `when` is its time as it is written, "" if there is none.

    `writer` is the name of the log that contains the line, if that is not a kernel log; else "".
    """

    matched: kernel_lines.MatchedLine
    text: str
    when: str
    writer: str = ""


def has_shape(line: str) -> bool:
    """True if a line begins like the output of dmesg, journalctl -k or /dev/kmsg."""
    before = _PATTERNS["prefix"].match(line)
    has_mark = before is not None and any((before["clock"], before["record"], before["syslog"]))
    return has_mark or line.startswith(_CONTINUES) or _PATTERNS["iso_of_dmesg"].match(line) is not None


def find(line: str) -> KernelLogLine | None:
    """Match a log line with the rows of kernel_lines.toml, without its time and host. None if no row matches."""
    if not words.holds_any(line, kernel_lines.literals()):
        return None
    before = _PATTERNS["prefix"].match(line)
    start = before.end() if before else 0
    said = kernel_lines.find(line[start : start + kernel_lines.LONGEST_LINE])
    if said is None or before is None:
        return None
    stamp = f"{int(before['stamp']) / 1e6:.6f}" if before["stamp"] else ""
    when = before["when"] or before["clock"] or stamp
    return KernelLogLine(
        said, words.elided(secret_forms.mask(line[start:]), _TEXT_CHARACTERS), words.printable(when.strip())
    )


def ended(line: str) -> list[tuple[str, str]]:
    """Return the problems that a line reports as cleared, see `kernel_lines.find_ended`."""
    before = _PATTERNS["prefix"].match(line)
    return kernel_lines.find_ended(line[before.end() :] if before else line)


def supplement(
    heard: Sequence[KernelLogLine], ranks: Iterable[RankId], gpus: Mapping[str, RankId] = MappingProxyType({})
) -> Supplement:
    """Return the kernel's lines as evidence. If they are about only one rank, it is to be checked first.

    A line contains the pid of a rank, or the PCI address of its GPU, or both. `gpus` are the ranks by the digits of the
    address.
    """
    evidence = tuple(_evidence(heard, {str(rank.pid): rank for rank in ranks if rank.pid is not None}, gpus))
    source = "Logs report" if any(line.writer for line in heard) else "The kernel log reports"
    headline = f"{source} {words.count(len(heard), 'problem')}: {evidence[0].message}"
    about = {rank: line.message for line in evidence for rank in line.ranks}
    pointed = tuple(
        CheckFirst.copy_from(rank, why=why, settle="read the kernel log of its node around that time")
        for rank, why in about.items()
        if len(about) == 1
    )
    return Supplement(evidence=evidence, headline=headline, check_first=pointed)


def _evidence(
    heard: Sequence[KernelLogLine], by_pid: Mapping[str, RankId], gpus: Mapping[str, RankId]
) -> Iterator[Evidence]:
    rows = kernel_lines.load()
    for line in heard[:_SHOWN]:
        row, subject = rows[line.matched.name], line.matched.subject
        is_kernels = not line.writer
        rank = by_pid.get(subject) if is_kernels and row.names in ("process", "task") else None
        if row.names == "gpu" and is_kernels and xids.severity(line.matched.code, line.text) != "notice":
            process = _PATTERNS["xid_process"].search(line.text)
            rank = gpus.get(subject.partition(".")[0].replace(":", "").lower().lstrip("0"))
            rank = rank or by_pid.get(process[1] if process else "")
        when = f" at {line.when}" if line.when else ""
        about = f" about {words.name_ranks([rank])}" if rank is not None else ""
        log = "kernel log" if is_kernels else f"log of {line.writer} (not a kernel log)"
        message = f"{log}{when}{about}: {kernel_lines.describe(line.matched.name, line.text)}"
        yield Evidence(
            kind="kernel_log" if is_kernels else "log", message=message, ranks=(rank,) if rank is not None else ()
        )
    if len(heard) > _SHOWN:
        yield Evidence(kind="kernel_log", message=f"{words.count(len(heard) - _SHOWN, 'more kernel line')}")
