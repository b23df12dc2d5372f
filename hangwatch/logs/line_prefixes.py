"""The rank in the prefix of a line (torchrun, mpirun, srun --label, pdsh, kubectl, Ray, vLLM and others). Pure.

This module also extracts lines from the output of terminals, from JSON logs and from HTML.
"""

import html
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from hangwatch.formats import decoding, process_title
from hangwatch.limits import LONGEST_LINE
from hangwatch.logs.failures import ESCAPES
from hangwatch.logs.rank_log import last_written
from hangwatch.model import RankId

_LONGEST_HEADING = 160
_LINES_AFTER_HEADING = 16
_LINES_AFTER_SENTENCE = 4
_HOST_RANK = re.compile(r"^\[(?![^\]]*\.(?:cc?|cpp|cu|h|py):)([^\[\]\s:/]+):(\d{1,7})\](:?)")  # not [pair.cc:598]
_OPEN_MPI = re.compile(  # host and pid, before a message of Open MPI or UCX itself
    r"^\[([\w.-]{1,64}):(\d{1,10})(?: *:\d{1,4}:\d{1,10})?\] "
    r"(?=\*\*\* |Signal|Failing at|\[ ?\d|(?:PMIX|PRTE|ORTE|OPAL) |\d+ more process|Caught signal )"
)
_TORCHRUN = re.compile(r"^\[([A-Za-z_][\w.-]*?)(\d{1,7})\]:")
_OF_AGENT = r"[EIW]\d{4} [\d:.]{15} \d{1,10} torch/distributed/elastic/"
_OF_RANK = re.compile(r"^\[[Rr](?:ank|ANK)[ =:_-]?(\d{1,7})\](?::|(?= |$)) ?")  # torch's, and of many programs
_MPIRUN = re.compile(r"^\[(?:(?:[^\[\],]*@)?\d+,)?(\d{1,7})\]<std\w+>:")  # and horovodrun
_KUBECTL = re.compile(r"^\[pod/([^/\]\s]+)/[^\]\s]+\] ?")
_LABEL = re.compile(r"^\s*([\w.-]+): ?")
_LABELLED = re.compile(r"^\s*([\w.-]+): ?(?:Process \d+:|Thread (?:0x[0-9A-Fa-f]+|\d+) \()")
_LABEL_OF_TASK = re.compile(r"^ *(\d{1,7}): ")
_ACTOR = re.compile(  # Ray, vLLM
    r"^\(([A-Za-z_][\w.:-]{0,63}(?: [A-Z]{2,5}\d{1,7}){0,4})(?: rank=(\d{1,7}))? pid=(\d{1,10})"
    r"(?:, ip=([\w.:-]{1,64}))?\) ?"
)
_SGLANG = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)((?: [A-Z]{2,5}\d{1,7}){1,5})\] ?", re.ASCII)
_NCCL = re.compile(r"^(?:\[[\d :.TZ-]{8,40}\] )?([\w.-]{1,64}):(\d{1,10}):\d{1,10} \[\d{1,3}\] (?:\S{1,80} ){0,3}NCCL ")
_STAMP = re.compile(
    r"(?: {0,8}\| )?\[?20\d\d[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?"
    r"(?: std(?:out|err) [FP])?(?: [A-Z]{4,8})? (?:\| )?"  # with bars: the console of CloudWatch
    r"|[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d 20\d\d(?=\[)",  # mpirun --timestamp-output
    re.ASCII,
)
_COMPOSE = re.compile(r"^([a-z0-9][\w.-]{0,63}[-_]\d{1,5}) +\| ?", re.ASCII)
_SKYPILOT = re.compile(r"^\(([\w.-]{1,64})(?:, rank=\d{1,7})?, pid=\d{1,10}(?:, ip=[\w.:-]{1,64})?\) ?", re.ASCII)
_SAGEMAKER = re.compile(r"^\[\d+,mpirank:(\d{1,7}),([\w.-]{1,64})\]<std\w+>:", re.ASCII)
_MARK = re.compile(r"\[(?:PG (?:ID )?0[^\[\]]{0,80} )?(?:rank|Rank|RANK)[ =:_-]?(\d{1,7})\](:?) ?")
"""Only in the default process group, `PG 0`, is the rank of a member the global rank."""

_MARK_WITHIN = 200
_ENDS_IN_PROSE = re.compile(r"(?<![\w.])[a-z]{2,}[ ,]*$")
_ENTITY = re.compile("&(?:lt|gt|quot|amp|apos|nbsp|#39|#x27);")
_HEADING = re.compile(
    r"^[\s#=*_>|-]{0,40}(?:<\w{1,10}>\s?){0,3}(?:(?:global|world) )?rank[ _#:=-]{0,2}(\d{1,7})"
    r"[ :,]{0,3}(?:\(?pid[ :=]{0,2}\d{1,10}\)?)?[\s#=*_:|-]{0,40}(?:</\w{1,10}>\s?){0,3}\s*$",
    re.IGNORECASE | re.ASCII,
)
_RANK_IN_HEADING = re.compile(
    r"\brank(?:[ _#:=-]{1,2}|(?=\d))(\d{1,7})\b(?!\s?[-,/&.]\s?\d|\s(?:and|to|or)\b)", re.IGNORECASE | re.ASCII
)
_MARK_OF_HEADING = re.compile(
    r":[\s*_`>]{0,8}$|^\s{0,8}(?:#|==|--|\*\*|<|\$ )|\b(?:stacks?|dump|trace|backtrace|bt|py-?spy|pystack|gdb|pid)\b",
    re.IGNORECASE,
)
_TEXT_KEYS = ("log", "message", "msg", "MESSAGE", "textPayload", "text", "line", "content", "@message", "_msg")
_STEP_KEYS = frozenset({"step", "global_step", "iteration", "iter", "epoch"})


def read_texts(line: str) -> Sequence[str]:
    """Return the lines of text in a line of a file: without escape sequences, JSON and HTML entities around it."""
    line = line.rstrip("\r\n")
    if not ("\x1b" in line or "[0m" in line or "\r" in line or "&" in line or line.startswith("{")):
        return _split_joined(line) if line.startswith("[") else (line,)
    parts = [part for text in _unwrap_json(_show_as_terminal(line)) for part in _split_joined(text)]
    return [html.unescape(part) if _ENTITY.search(part) else part for part in parts]  # copied from a page's source


def _split_joined(line: str) -> Sequence[str]:
    """Return the lines that torchrun --tee has joined: a progress bar of one rank, and what others write next.

    See findings/torchrun-tee-joins-ranks.sh.
    """
    prefix = _TORCHRUN.match(line)
    if prefix is None or prefix.group(1) == "rank":
        return (line,)
    return re.split(rf"(?<=.)(?=\[{re.escape(prefix.group(1))}\d{{1,7}}\]:|{_OF_AGENT})", line)


def _show_as_terminal(line: str) -> str:
    """Return a line without line end and escape sequences. Of a progress bar, the text after it that has a prefix."""
    line = line.rstrip("\r\n")
    line = ESCAPES.sub("", line[:LONGEST_LINE]) if "\x1b" in line or "[0m" in line else line
    if "\r" not in line:
        return line
    last, nobody = last_written(line), RankId()
    has_prefix = split(last, nobody, labelled=False)[0] is not nobody
    return last if has_prefix or split(line, nobody, labelled=False)[0] is nobody else line


def _unwrap_json(line: str) -> list[str]:
    """Return the text lines in a JSON object: Docker's json-file, journalctl -o json, Cloud Logging, Python loggers.

    Return any other line unchanged. A record with a step is progress of the program, so it stays whole.
    """
    if not line.startswith("{"):
        return [line]
    try:
        record = decoding.decode_json(line, dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return [line]
    payload = record.get("jsonPayload")
    record |= payload if isinstance(payload, dict) else {}
    texts = (record[key] for key in _TEXT_KEYS if isinstance(record.get(key), str))
    text = next(filter(None, texts), "") if _STEP_KEYS.isdisjoint(record) else ""
    label = "kernel: " if record.get("_TRANSPORT") == "kernel" else ""  # systemd.journal-fields(7)
    return [label + _show_as_terminal(part) for part in (text or line).rstrip("\r\n").split("\n")]


def are_labelled(head: Sequence[str]) -> bool:
    """True if the lines begin with a label: `N: ` (srun --label) or `host: ` (pdsh, clush).

    In a stack dump, a label precedes a line such as "Process 4711:". In a log, at least 90 % of the lines must begin
    with `N: `, and each number must occur twice on average.
    """
    if any(found and found.group(1) not in {"Process", "Error"} for found in map(_LABELLED.match, head)):
        return True
    written = [line for line in head if line.strip()]
    labels = [found.group(1) for found in map(_LABEL_OF_TASK.match, written) if found]
    return len(labels) > 1 and len(labels) * 10 >= len(written) * 9 and len(set(labels)) * 2 <= len(labels)


class Headings:
    """A reader of headings that name the rank of the next dump: `### Rank 2`, `<summary>rank 2</summary>`.

    The rank of a heading applies from the beginning of the dump after it to the next heading. A line with other words
    (`py-spy of rank 3 (hung):`) is a heading if it has one rank and a mark of a heading, and a dump follows at once.
    """

    def __init__(self, begins_dump: Callable[[str], bool]) -> None:
        self._begins_dump = begins_dump
        self._announced: int | None = None
        self._lines_left = 0
        self._rank: int | None = None

    def follow(self, line: str) -> int | None:
        """Return the rank that the last heading gives to this line; None if no heading applies."""
        is_short = len(line) < _LONGEST_HEADING and "rank" in line.lower()
        found = _HEADING.match(line) if is_short else None
        ranks = _RANK_IN_HEADING.findall(line) if is_short and not found and _MARK_OF_HEADING.search(line) else []
        if found or (len(ranks) == 1 and not self._begins_dump(line)):
            self._announced, self._rank = int(found.group(1) if found else ranks[0]), None
            self._lines_left = _LINES_AFTER_HEADING if found else _LINES_AFTER_SENTENCE
        elif self._announced is not None and self._rank is None:
            self._lines_left -= 1
            if self._begins_dump(line):
                self._rank = self._announced
            elif self._lines_left <= 0:
                self._announced = None
        return self._rank


def split(line: str, file_id: RankId, *, labelled: bool) -> tuple[RankId, bool, str]:
    """Return the rank in the prefix of a line, true if it is certainly a rank, and the rest of the line.

    If there is no prefix, the rank is `file_id`. The first mark `[rankN]:` among the first 200 characters is the
    rank of the line; a later number is a peer. A number that is not sure may be that of a node. The host and pid at
    the beginning of NCCL's lines stay in the rest, and so does a mark that is part of a message. `labelled` is the
    result of `are_labelled`.
    """
    rank, sure, rest = _split_start(line, file_id, labelled=labelled)
    if rank is file_id and (stamp := _STAMP.match(line)):
        rank, sure, rest = _split_start(line[stamp.end() :], file_id, labelled=False)
        rest = line if rank is file_id else rest
    if rank.is_numbered and rank is not file_id and (sure or not rest.startswith("[rank")):
        inner = _OF_RANK.match(rest) if rank.rank is None and rest.startswith("[rank") else None
        return (replace(rank, rank=int(inner.group(1))), True, rest[inner.end() :]) if inner else (rank, sure, rest)
    mark = _MARK.search(rest, 0, _MARK_WITHIN) if "[" in rest else None
    if mark is None or '"' in rest[: mark.start()] or "'" in rest[: mark.start()]:
        return rank, sure, rest
    if mark.group(2) and mark.group().startswith("[rank"):
        if rank.local_rank is not None:
            return rank, sure, rest[mark.start() :]
        return replace(rank, rank=int(mark.group(1))), True, rest[mark.end(2) :]
    if rank.is_numbered or _ENDS_IN_PROSE.search(rest[: mark.start()]):
        return rank, sure, rest
    return replace(rank, rank=int(mark.group(1))), True, rest


def _split_start(line: str, file_id: RankId, *, labelled: bool) -> tuple[RankId, bool, str]:
    """Split a line at a prefix that begins it, see `split`."""
    if line.startswith("("):
        if match := _ACTOR.match(line):
            return _split_actor(match, line, file_id)
        match = _SKYPILOT.match(line)
        return (replace(file_id, node=match.group(1)), True, line[match.end() :]) if match else (file_id, True, line)
    if not file_id.is_numbered and (match := _NCCL.match(line)):
        return replace(file_id, node=match.group(1), pid=int(match.group(2))), True, line
    if line.startswith("["):
        return _split_bracket(line, file_id)
    if match := _COMPOSE.match(line):
        return replace(file_id, node=match.group(1)), True, line[match.end() :]
    match = _LABEL.match(line) if labelled else None
    if match and match.group(1) not in {"Process", "Error", "Reason", "srun", "slurmstepd"}:
        label, rest = match.group(1), line[match.end() :]
        if label.isascii() and label.isdigit() and len(label) < 8:
            return RankId(rank=int(label)), False, rest
        return RankId(node=label), False, rest
    return file_id, True, line


def _split_actor(prefix: re.Match[str], line: str, file_id: RankId) -> tuple[RankId, bool, str]:
    """Return the process in a prefix such as `(Worker_TP2 pid=4122)`.

    If a torch prefix follows, it contains the rank.
    """
    text, number, pid, address = prefix.groups()
    title, rest = process_title.read(text.replace(" ", "_")), line[prefix.end() :]
    inner = _OF_RANK.match(rest)
    rank = int(inner.group(1)) if inner else int(number) if number else title.rank if title else None
    process = RankId(node=address or file_id.node, rank=rank, pid=int(pid), title=title.text if title else text)
    return process, True, rest[inner.end() :] if inner else rest


def _split_bracket(line: str, file_id: RankId) -> tuple[RankId, bool, str]:
    if match := _OF_RANK.match(line):  # torch's global rank: it stays in the line if the file has a local rank
        if file_id.local_rank is not None:
            return file_id, True, line
        rank = RankId(rank=int(match.group(1)))
    elif match := _OPEN_MPI.match(line):
        return replace(file_id, node=match.group(1), pid=int(match.group(2))), True, line[match.end() :]
    elif match := _HOST_RANK.match(line):
        number, is_local = int(match.group(2)), bool(match.group(3))  # a colon after it: torchrun --tee
        rank = RankId(node=match.group(1), rank=None if is_local else number, local_rank=number if is_local else None)
    elif match := _SAGEMAKER.match(line):
        return RankId(node=match.group(2), rank=int(match.group(1))), False, line[match.end() :]
    elif match := _MPIRUN.match(line):
        rank = RankId(rank=int(match.group(1)))
    elif match := _TORCHRUN.match(line):
        rank = RankId(node=file_id.node, local_rank=int(match.group(2)))
    elif match := _KUBECTL.match(line):
        inner, sure, rest = split(line[match.end() :], RankId(node=match.group(1)), labelled=False)
        return replace(inner, node=match.group(1)), sure, rest
    elif match := _SGLANG.match(line):
        title = process_title.read(f"scheduler{match.group(2).replace(' ', '_')}")
        name = title.text if title and title.rank is None else None
        rank = replace(file_id, rank=title.rank if title else None, title=name)
        return rank, True, line[match.end() :]
    else:
        return file_id, True, line
    return rank, True, line[match.end() :]
