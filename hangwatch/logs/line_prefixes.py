"""The rank in the prefix of a line (torchrun, mpirun, srun --label, pdsh, kubectl, Ray, vLLM and others). Pure.

This module also extracts lines from the output of terminals, from JSON logs and from HTML.
"""

import contextlib
import html
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from hangwatch import tables
from hangwatch.formats import decoding, process_title
from hangwatch.limits import LONGEST_LINE
from hangwatch.logs.failures import TEXTS
from hangwatch.logs.rank_log import last_written
from hangwatch.model import RankId

_LONGEST_HEADING = 160
_LINES_AFTER_HEADING = 16
_LINES_AFTER_SENTENCE = 4
_PATTERNS = tables.Patterns("line_prefixes.toml")
_OF_AGENT = r"[EIW]\d{4} [\d:.]{15} \d{1,10} torch/distributed/elastic/"
_MARK_WITHIN = 200
_TEXT_KEYS = ("log", "message", "msg", "MESSAGE", "textPayload", "text", "line", "content", "@message", "_msg")
_NESTED_KEYS = ("jsonPayload", "attributes", "_source")  # Cloud Logging, Datadog, Elasticsearch
_STEP_KEYS = frozenset({"step", "global_step", "iteration", "iter", "epoch"})


def read_texts(line: str) -> Sequence[str]:
    """Return the lines of text in a line of a file: without escape sequences, JSON and HTML entities around it."""
    line = line.rstrip("\r\n")
    if '="' in line:
        line = _PATTERNS["loki_labels"].sub(r"\1", line)
    is_json = line.startswith(("{", "[{")) or (line.startswith(" ") and _PATTERNS["text_member"].match(line))
    if not (is_json or "\x1b" in line or "[0m" in line or "\r" in line or "&" in line):
        return _split_joined(line) if line.startswith("[") else (line,)
    parts = [part for text in _unwrap_json(_show_as_terminal(line)) for part in _split_joined(text)]
    return [html.unescape(part) if _PATTERNS["entity"].search(part) else part for part in parts]


def _split_joined(line: str) -> Sequence[str]:
    """Return the lines that torchrun --tee has joined: a progress bar of one rank, and what others write next.

    See findings/torchrun-tee-joins-ranks.sh.
    """
    prefix = _PATTERNS["torchrun"].match(line)
    if prefix is None or prefix.group(1) == "rank":
        return (line,)
    return re.split(rf"(?<=.)(?=\[{re.escape(prefix.group(1))}\d{{1,7}}\]:|{_OF_AGENT})", line)


def _show_as_terminal(line: str) -> str:
    """Return a line without line end and escape sequences. Of a progress bar, the text after it that has a prefix."""
    line = line.rstrip("\r\n")
    line = TEXTS["escapes"].sub("", line[:LONGEST_LINE]) if "\x1b" in line or "[0m" in line else line
    if "\r" not in line:
        return line
    last, nobody = last_written(line), RankId()
    has_prefix = split(last, nobody, labelled=False)[0] is not nobody
    return last if has_prefix or split(line, nobody, labelled=False)[0] is nobody else line


def _unwrap_json(line: str) -> list[str]:
    """Return the text lines in a JSON object: Docker's json-file, journalctl -o json, Cloud Logging, Python loggers.

    An object may fill several lines: then one of these contains the text. A line may also be an array of objects, in
    the order of their times. Return any other line unchanged. If an object has the name of a pod, its text gets the
    prefix of kubectl. A record with a step is progress of the program, so it stays whole.
    """
    member = _PATTERNS["text_member"].match(line)
    if not (member or line.startswith(("{", "[{"))):
        return [line]
    try:
        content = decoding.decode_json(
            f'{{"log":{member.group(1)}}}' if member else line, dict[str, Any] | list[dict[str, Any]]
        )
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return [line]
    if isinstance(content, dict):
        events = content.get("events")  # aws logs get-log-events
        content = events if isinstance(events, list) and all(isinstance(row, dict) for row in events) else [content]
    in_order = sorted(content, key=lambda row: str(row.get("timestamp")))
    texts = list(filter(None, map(_read_record, in_order))) or [line]
    pod = _PATTERNS["pod_member"].search(line) if len(content) == 1 else None
    before = pod.expand(r"[pod/\1/-] ") if pod else ""
    return [before + _show_as_terminal(part) for text in texts for part in text.rstrip("\r\n").split("\n")]


def _read_record(record: dict[str, Any]) -> str:
    """Return the text in a JSON record of a log; "" if there is none."""
    for payload in [record[key] for key in _NESTED_KEYS if isinstance(record.get(key), dict)]:
        record |= payload
    texts = map(_read_text, map(record.get, _TEXT_KEYS))
    text = next(filter(None, texts), "") if _STEP_KEYS.isdisjoint(record) else ""
    label = "kernel: " if record.get("_TRANSPORT") == "kernel" else ""  # systemd.journal-fields(7)
    return "\n".join(f"{label}{part}" for part in text.removesuffix("\n").split("\n")) or text


def _read_text(value: object) -> str:
    """Return a text of a JSON record. The journal writes a text with control characters as an array of bytes."""
    with contextlib.suppress(ValueError, TypeError):
        value = bytes(value).decode("utf-8", "replace") if isinstance(value, list) else value
    return value if isinstance(value, str) else ""


def are_labelled(head: Sequence[str]) -> bool:
    """True if the lines begin with a label: `N: ` (srun --label), `[N] ` (mpiexec -l) or `host: ` (pdsh, clush).

    In a stack dump, a label precedes a line such as "Process 4711:". In a log, at least 90 % of the lines must begin
    with a number (`N: `, `rank N `) or a pod (stern), and each label must occur twice on average.
    """
    if any(found and found.group(1) not in {"Process", "Error"} for found in map(_PATTERNS["labelled"].match, head)):
        return True
    written = [line for line in head if line.strip() and not line.startswith(("srun: ", "slurmstepd"))]
    labels = [found.group(found.lastindex or 0) for found in map(_PATTERNS["label_of_task"].match, written) if found]
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
        heading = _PATTERNS["heading"].match(line) if is_short else None
        is_marked = is_short and not heading and _PATTERNS["mark_of_heading"].search(line)
        ranks = _PATTERNS["rank_in_heading"].findall(line) if is_marked else []
        if heading or (len(ranks) == 1 and not self._begins_dump(line)):
            self._announced, self._rank = int(heading.group(1) if heading else ranks[0]), None
            self._lines_left = _LINES_AFTER_HEADING if heading else _LINES_AFTER_SENTENCE
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
    if rank is file_id and (stamp := _PATTERNS["stamp"].match(line)):
        rank, sure, rest = _split_start(line[stamp.end() :], file_id, labelled=False)
        rest = line if rank is file_id else rest
    if rank.is_numbered and rank is not file_id and (sure or not rest.startswith("[rank")):
        inner = _PATTERNS["of_rank"].match(rest) if rank.rank is None and rest.startswith("[rank") else None
        return (replace(rank, rank=int(inner.group(1))), True, rest[inner.end() :]) if inner else (rank, sure, rest)
    mark = _PATTERNS["mark"].search(rest, 0, _MARK_WITHIN) if "[" in rest else None
    if mark is None or '"' in rest[: mark.start()] or "'" in rest[: mark.start()]:
        return rank, sure, rest
    if mark.group(2) and mark.group().startswith("[rank"):
        if rank.local_rank is not None:
            return rank, sure, rest[mark.start() :]
        return replace(rank, rank=int(mark.group(1))), True, rest[mark.end(2) :]
    if rank.is_numbered or _PATTERNS["ends_in_prose"].search(rest[: mark.start()]):
        return rank, sure, rest
    return replace(rank, rank=int(mark.group(1))), True, rest


def _split_start(line: str, file_id: RankId, *, labelled: bool) -> tuple[RankId, bool, str]:
    """Split a line at a prefix that begins it, see `split`."""
    if not file_id.is_numbered and (match := _PATTERNS["nccl"].match(line)):
        return replace(file_id, node=match.group(1), pid=int(match.group(2))), True, line
    match = _PATTERNS["label"].match(line) if labelled else None
    if match and match["host"] not in {"Process", "Error", "Reason", "srun", "slurmstepd"}:
        label, rest = match.group(match.lastindex or 0), line[match.end() :]
        if label.isascii() and label.isdigit() and len(label) < 8:
            return RankId(rank=int(label)), match["rank"] is not None, rest
        return RankId(node=label), False, rest
    if line.startswith("(") and (match := _PATTERNS["actor"].match(line)):
        return _split_actor(match, line, file_id)
    if line.startswith("["):
        return _split_bracket(line, file_id)
    if "rank" in line and (match := _PATTERNS["grep"].match(line)):
        return RankId(rank=int(match.group(1))), True, line[match.end() :]
    if match := _PATTERNS["node"].match(line):
        return replace(file_id, node=match.group(match.lastindex or 0)), True, line[match.end() :]
    return file_id, True, line


def _split_actor(prefix: re.Match[str], line: str, file_id: RankId) -> tuple[RankId, bool, str]:
    """Return the process in a prefix such as `(Worker_TP2 pid=4122)`.

    If a torch prefix follows, it contains the rank.
    """
    text, number, pid, address = prefix.groups()
    title, rest = process_title.read(text.replace(" ", "_")), line[prefix.end() :]
    inner = _PATTERNS["of_rank"].match(rest)
    rank = int(inner.group(1)) if inner else int(number) if number else title.rank if title else None
    process = RankId(node=address or file_id.node, rank=rank, pid=int(pid), title=title.text if title else text)
    return process, True, rest[inner.end() :] if inner else rest


def _split_bracket(line: str, file_id: RankId) -> tuple[RankId, bool, str]:
    if match := _PATTERNS["of_rank"].match(line):  # torch's global rank
        if file_id.local_rank is not None:  # then it stays in the line
            return file_id, True, line
        rank = RankId(rank=int(match.group(1)))
    elif match := _PATTERNS["open_mpi"].match(line):
        return replace(file_id, node=match.group(1), pid=int(match.group(2))), True, line[match.end() :]
    elif match := _PATTERNS["host_rank"].match(line):
        number, is_local = int(match.group(2)), bool(match.group(3))  # a colon after it: torchrun --tee
        rank = RankId(node=match.group(1), rank=None if is_local else number, local_rank=number if is_local else None)
    elif match := _PATTERNS["sagemaker"].match(line):
        return RankId(node=match.group(2), rank=int(match.group(1))), False, line[match.end() :]
    elif match := _PATTERNS["mpirun"].match(line):
        rank = RankId(rank=int(match.group(1)))
    elif match := _PATTERNS["torchrun"].match(line):
        rank = RankId(node=file_id.node, local_rank=int(match.group(2)))
    elif match := _PATTERNS["kubectl"].match(line):
        inner, sure, rest = split(line[match.end() :], RankId(node=match.group(1)), labelled=False)
        return replace(inner, node=match.group(1)), sure, rest
    elif match := _PATTERNS["sglang"].match(line):
        title = process_title.read(f"scheduler{match.group(2).replace(' ', '_')}")
        name = title.text if title and title.rank is None else None
        rank = replace(file_id, rank=title.rank if title else None, title=name)
        return rank, True, line[match.end() :]
    else:
        return file_id, True, line
    return rank, True, line[match.end() :]
