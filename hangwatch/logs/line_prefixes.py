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

from hangwatch import tables, words
from hangwatch.formats import decoding, process_title
from hangwatch.limits import LONGEST_LINE
from hangwatch.logs.failures import TEXTS
from hangwatch.logs.rank_log import last_written
from hangwatch.model import RankId

_NOBODY = RankId()
_LONGEST_HEADING = 160
_LINES_AFTER_HEADING = 16
_LINES_AFTER_SENTENCE = 4
_BEGUN = -1
_PATTERNS = tables.Patterns("line_prefixes.toml")
_BRACKETS = ("of_rank", "open_mpi", "host_local", "host_rank", "sagemaker", "mpirun", "torchrun", "kubectl", "sglang")
_OF_AGENT = r"[EIW]\d{4} [\d:.]{15} \d{1,10} torch/distributed/elastic/"
_MARK_WITHIN = 200
_WORDS_BESIDE_PLACE = 3
_WORDS_OF_PLACES = ("exec ", "ssh ", ">>")  # of headings with more words
_TEXT_KEYS = ("log", "message", "msg", "MESSAGE", "textPayload", "text", "line", "content", "@message", "_msg", "event")
_EXCEPTION_KEYS = ("exception", "exc_info", "exc_text", "traceback", "stack_trace")  # structlog, python-json-logger
_LIST_KEYS = ("events", "data", "result", "hits", "logs", "entries")
_NESTED_KEYS = ("jsonPayload", "attributes", "_source")  # Cloud Logging, Datadog, Elasticsearch
_STEP_KEYS = frozenset({"step", "global_step", "iteration", "iter", "epoch"})


def read_texts(line: str) -> Sequence[str]:
    """Return the lines of text in a line of a file: without escape sequences, JSON and HTML entities around it."""
    line = line.rstrip("\r\n")
    if '="' in line:
        line = _PATTERNS["loki_labels"].sub(r"\1", _PATTERNS["loki_pod"].sub(r"\1[pod/\2/-] ", line))
        line = _PATTERNS["logfmt"].sub(r"[rank \1] \2", line)
    is_json = line.startswith(("{", "[{")) or (line.startswith(" ") and _PATTERNS["text_member"].match(line))
    if not (is_json or "\x1b" in line or "[0m" in line or "\r" in line or "&" in line):
        return _split_joined(line) if line.startswith("[") else (line,)
    parts = [part for text in _unwrap_json(_show_as_terminal(line)) for part in _split_joined(text)]
    return [html.unescape(part) if _PATTERNS["entity"].search(part) else part for part in parts]


def _split_joined(line: str) -> Sequence[str]:
    """Return the lines that torchrun --tee has joined: a progress bar of one rank, and the next output of other ranks.

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
    last = last_written(line)
    has_prefix = split(last, _NOBODY)[0] is not _NOBODY
    return last if has_prefix or split(line, _NOBODY)[0] is _NOBODY else line


def _unwrap_json(line: str) -> list[str]:
    """Return the text lines in a JSON object: Docker's json-file, journalctl -o json, Cloud Logging, Python loggers.

    An object may fill several lines: then one of these contains the text. A line may also be a whole
    export: its records are read in the order of their times. Return any other line unchanged.
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
    records = sorted(_list_records(content), key=lambda record: str(record.get("timestamp")))
    alone = "" if member or len(records) > 1 else line
    return [_show_as_terminal(part) for record in records for part in _read_record(record, alone)] or [line]


def _list_records(content: object) -> list[dict[str, Any]]:
    """Return the records of an export: CloudWatch, Elasticsearch, Datadog, and Loki's streams with their labels."""
    if isinstance(content, list):
        return [record for part in content for record in _list_records(part)]
    if not isinstance(content, dict):
        return []
    parts = next((content[key] for key in _LIST_KEYS if isinstance(content.get(key), list | dict)), None)
    if isinstance(labels := content.get("stream"), dict) and isinstance(rows := content.get("values"), list):
        return [{**labels, "timestamp": row[0], "line": row[1]} for row in rows if len(row) > 1]
    return [content] if parts is None or not content.keys().isdisjoint(_TEXT_KEYS) else _list_records(parts)


def _read_record(record: dict[str, Any], line: str) -> Sequence[str]:
    """Return the lines of text in a JSON record of a log. `line` is the text of the record; "" if it is one of many.

    The name of a pod becomes the prefix of kubectl, a rank that of torch. A record with a step is progress of the
    program, so it stays whole.
    """
    for payload in [record[key] for key in _NESTED_KEYS if isinstance(record.get(key), dict)]:
        record |= payload
    text, exception = (
        next(filter(None, map(_read_text, map(record.get, keys))), "") for keys in (_TEXT_KEYS, _EXCEPTION_KEYS)
    )
    text = text if _STEP_KEYS.isdisjoint(record) else ""
    pod = _PATTERNS["pod_member"].search(line or str(record).replace("'", '"'))
    rank = str(record.get("rank", record.get("global_rank", "")))
    before = (pod.expand(r"[pod/\1/-] ") if pod else "") + (f"[rank {rank}] " if rank.isdecimal() else "")
    before += "kernel: " if record.get("_TRANSPORT") == "kernel" else ""  # systemd.journal-fields(7)
    parts = "\n".join(filter(None, (text or line, exception)))
    return [before + part for part in parts.rstrip("\r\n").split("\n")] if parts else ()


def _read_text(value: object) -> str:
    """Return a text of a JSON record. The journal writes a text with control characters as an array of bytes."""
    with contextlib.suppress(ValueError, TypeError):
        value = bytes(value).decode("utf-8", "replace") if isinstance(value, list) else value
    return value if isinstance(value, str) else ""


def find_labels(head: Sequence[str]) -> str:
    """Return the name of the pattern of the lines' labels; "" if they have none.

    Labels are `N: ` (srun --label), `[N] ` (mpiexec -l) or `host: ` (pdsh, clush). In a stack dump, a label precedes a
    line such as "Process 4711:". In a log, at least 90 % of the lines must begin with a number (`N: `, `rank N `), a
    pod (stern) or a prefix with a rank (`[default2/rank2]:`), and each label must occur twice on average. Loggers write
    `rank N` after the time: then only lines with a time count.
    """
    if any(label and label.group(1) not in {"Process", "Error"} for label in map(_PATTERNS["labelled"].match, head)):
        return "label"
    written = [line for line in head if line.strip() and not line.startswith(("srun: ", "slurmstepd"))]
    stamped = [line[stamp.end() :] for line in written if (stamp := _PATTERNS["stamp"].match(line))]
    at_start = [label and label.group(label.lastindex or 0) for label in map(_PATTERNS["label_of_task"].match, written)]
    after_time = [label and label["rank"] for label in map(_PATTERNS["rank_label"].match, stamped)]
    plain = [line for line in written if _split_start(line, _NOBODY, "")[0] is _NOBODY]
    within = [label and label["rank"] for label in map(_PATTERNS["rank_within"].match, plain)]
    for pattern, of_lines in (("label", at_start), ("rank_label", after_time), ("rank_within", within)):
        labels = [label for label in of_lines if label]
        if len(labels) > 1 and len(labels) * 10 >= len(of_lines) * 9 and len(set(labels)) * 2 <= len(labels):
            return pattern
    return ""


class Headings:
    """A reader of headings that name the rank or place of the next dump: `### Rank 2`, `<summary>rank 2</summary>`.

    The rank of a heading applies from the beginning of the dump after it to the next heading. A line with other words
    (`py-spy of rank 3 (hung):`) is a heading if it has one rank and a mark of a heading, and a dump follows at once.
    So is a line with only a host or pod, as dshbak and Ansible print it, or a command for it (`kubectl exec`).
    """

    def __init__(self, begins_dump: Callable[[str], bool]) -> None:
        self._begins_dump = begins_dump
        self._place, self._is_sure = _NOBODY, True
        self._lines_left = 0  # until the dump must begin

    def follow(self, line: str, outside: RankId) -> tuple[RankId, bool]:
        """Return the rank or place that the last heading gives to this line, and false if that was a sentence.

        It is `outside` if no heading applies.
        """
        announced, is_sure = self._read(line) if len(line) < _LONGEST_HEADING else (None, True)
        if announced is not None:
            self._place, self._is_sure = replace(announced, node=announced.node or self._place.node), is_sure
            self._lines_left = _LINES_AFTER_HEADING if is_sure else _LINES_AFTER_SENTENCE
        elif self._lines_left > 0:
            self._lines_left = _BEGUN if self._begins_dump(line) else self._lines_left - 1
            self._place = self._place if self._lines_left else _NOBODY
        if self._lines_left != _BEGUN:
            return outside, True
        return replace(outside, node=self._place.node or outside.node, rank=self._place.rank), self._is_sure

    def _read(self, line: str) -> tuple[RankId | None, bool]:
        """Return the rank or place in a heading, and true if the line has no other words. None for other lines."""
        if "rank" in line.lower():
            heading = _PATTERNS["heading"].match(line)
            is_sentence = heading is None and _PATTERNS["mark_of_heading"].search(line) is not None
            ranks = _PATTERNS["rank_in_heading"].findall(line) if is_sentence else heading.groups() if heading else ()
            if len(ranks) == 1 and (heading or not self._begins_dump(line)):
                return RankId(rank=int(ranks[0])), not is_sentence
        may_be_place = line.count(" ") < _WORDS_BESIDE_PLACE or words.holds_any(line, _WORDS_OF_PLACES)
        place = _PATTERNS["place_heading"].match(line) if may_be_place else None
        return (RankId(node=place.group(place.lastindex or 0)) if place else None), False


def split(line: str, file_id: RankId, labels: str = "") -> tuple[RankId, bool, str]:
    """Return the rank in the prefix of a line, true if it is certainly a rank, and the rest of the line.

    If there is no prefix, the rank is `file_id`. The first mark `[rankN]:` among the first 200 characters is the
    rank of the line; a later number is a peer. A number that is not sure may be that of a node. The host and pid at
    the beginning of NCCL's lines stay in the rest, and so does a mark that is part of a message. `labels` is the
    result of `find_labels`.
    """
    rank, sure, rest = _split_start(line, file_id, "" if labels == "rank_label" else labels)
    if rank is file_id and (stamp := _PATTERNS["stamp"].match(line)):
        rank, sure, rest = _split_start(line[stamp.end() :], file_id, labels if labels == "rank_label" else "")
        rest = line if rank is file_id else rest
    mark = _PATTERNS["mark"].search(rest, 0, _MARK_WITHIN) if "[" in rest else None
    before = rest[: mark.start()].strip() if mark else ""
    if mark is None or '"' in before or "'" in before:
        return rank, sure, rest
    number, is_torchs = int(mark.group(1)), bool(mark.group(2)) and mark.group().startswith("[rank")
    is_labelled = rank.is_numbered and rank is not file_id and sure
    if is_torchs and not (is_labelled and before):  # the number of another prefix is then a local one
        if rank is file_id and rank.local_rank is not None:
            return rank, sure, rest[mark.start() :]
        local_rank = rank.rank if is_labelled and rank.rank not in (None, number) else rank.local_rank
        return replace(rank, rank=number, local_rank=local_rank), True, rest[mark.end(2 if before else 0) :]
    if rank.is_numbered or _PATTERNS["ends_in_prose"].search(before):
        return rank, sure, rest
    return replace(rank, rank=number), True, rest


def _split_start(line: str, file_id: RankId, label_kind: str) -> tuple[RankId, bool, str]:
    """Split a line at a prefix that begins it, see `split`. `label_kind` is the pattern of its label; "" for none."""
    if not file_id.is_numbered and (match := _PATTERNS["nccl"].match(line)):
        return replace(file_id, node=match.group(1), pid=int(match.group(2))), True, line
    match = _PATTERNS[label_kind].match(line) if label_kind else None
    if match:
        label, rest = match.group(match.lastindex or 0), line[match.end() :]
        if label.isascii() and label.isdigit() and len(label) < 8:
            return RankId(rank=int(label)), match["rank"] is not None, rest
        return _split_within(label, rest)
    if line.startswith("(") and (match := _PATTERNS["actor"].match(line)):
        return _split_actor(match, line, file_id)
    if line.startswith("["):
        return _split_bracket(line, file_id)
    if "rank" in line and (match := _PATTERNS["grep"].match(line)):
        return RankId(rank=int(match.group(1))), True, line[match.end() :]
    if match := _PATTERNS["node"].match(line):
        return replace(file_id, node=match.group(match.lastindex or 0)), True, line[match.end() :]
    return file_id, True, line


def _split_within(node: str, rest: str) -> tuple[RankId, bool, str]:
    """Split the rest of a line of a node or pod, in which a launcher may have written a prefix, too."""
    within = RankId(node=node)
    if "[pod/" in rest:  # of one line only the first pod counts, however many it names
        return within, True, rest
    inner, sure, rest = split(rest, within)
    return replace(inner, node=node), sure, rest


def _split_actor(prefix: re.Match[str], line: str, file_id: RankId) -> tuple[RankId, bool, str]:
    """Return the process in a prefix such as `(Worker_TP2 pid=4122)`. A torch prefix after it contains the rank."""
    text, number, pid, address = prefix.groups()
    title, rest = process_title.read(text.replace(" ", "_")), line[prefix.end() :]
    inner = _PATTERNS["of_rank"].match(rest)
    rank = int(inner.group(1)) if inner else int(number) if number else title.rank if title else None
    process = RankId(node=address or file_id.node, rank=rank, pid=int(pid), title=title.text if title else text)
    return process, True, rest[inner.end() :] if inner else rest


def _split_bracket(line: str, file_id: RankId) -> tuple[RankId, bool, str]:
    kind, match = next(((kind, found) for kind in _BRACKETS if (found := _PATTERNS[kind].match(line))), ("", None))
    if match is None or (kind == "of_rank" and file_id.local_rank is not None):  # then it stays in the line
        return file_id, True, line
    if kind == "kubectl":
        return _split_within(match.group(1), line[match.end() :])
    if kind == "sglang":
        title = process_title.read(f"scheduler{match.group(2).replace(' ', '_')}")
        name = title.text if title and title.rank is None else None
        return replace(file_id, rank=title.rank if title else None, title=name), True, line[match.end() :]
    fields = {key: value if key == "node" else int(value) for key, value in match.groupdict().items()}
    node = file_id.node if "local_rank" in fields else None
    rank = replace(file_id if "pid" in fields else RankId(node=node), **fields)
    return rank, kind != "sagemaker", line[match.end() :]
