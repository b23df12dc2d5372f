"""Reader for the answer of NCCL's RAS: `ncclras`, as text and with `-f json`. Pure.

Source: NVIDIA/nccl src/ras/client_support.cc. The text lists only the ranks that differ from most others. A rank has
its number in a communicator, which is that in the job only in the largest one.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.model import RankId

_MOST_RANKS = 1 << 18  # of all communicators together
_STATES = ("INIT", "RUNNING", "FINALIZE", "ABORT")
_SECTION = re.compile(r"^(?:#(\d{1,9})-\d{1,9} \(([0-9a-f]{1,16})\) )?(INCOMPLETE|DEAD|ERROR|MISMATCH|TIMEOUT)$")
_ROW = re.compile(r"^ +0 +1 +\d+ +\S+ +\d+ +(\d{1,9}) ")
_DIFFERENT = re.compile(r"^  Communicator ranks have different (\w{1,40})")
_VALUE = r"(?:launched up to operation (\d{1,18})|(not) launched any operations|status ([A-Z]{1,16}))"
_MANY = re.compile(rf"^  (\d{{1,9}}) ranks have {_VALUE}")
_PLACE = r"(?: -- .*?managed by process (\d{1,10}) on node (\S{1,255}))?"
_RANK = re.compile(rf"^  (?:The missing rank: |Rank )(\d{{1,9}})(?: has {_VALUE})?(?: -- \[.*\])?{_PLACE}$")
_PROCESS = re.compile(r"^  Process (\d{1,10}) on node (\S{1,255}) managing ")
_FIELD = re.compile(r'^\s*"(\w{1,40})": ?"?([^",]{0,255})"?,?$')
_OTHER_LINES = ("  ", "Group ", "(total) ", "Communicators", "Errors", "Warnings", "===", "{", "}")
_NO_COUNTS = frozenset({"cuda_dev", "nvml_dev", "init_state", "async_error", "ranks_count", "missing_ranks_count"})


def begins(line: str) -> bool:
    """True if an answer begins with this line."""
    return line.startswith(("Job summary", '  "nccl_version"'))


class Difference(NamedTuple):
    """A sentence about ranks that differ. `behind` are the ranks to check first, `why` is the reason."""

    text: str
    ranks: tuple[RankId, ...]
    behind: tuple[RankId, ...]
    why: str


class _Communicator:
    """The ranks of a communicator by the number of operations of each kind, and those without an answer."""

    def __init__(self, name: str, size: int = 0) -> None:
        self.name = name
        self.size = size
        self.counts: dict[str, dict[int, list[RankId]]] = defaultdict(lambda: defaultdict(list))
        self.unlisted: dict[str, dict[int, int]] = defaultdict(dict)
        self.silent: list[RankId] = []


class Reader:
    """A reader of lines, which may be part of a log."""

    def __init__(self) -> None:
        self._is_open = False
        self._communicators: dict[str, _Communicator] = {}
        self._is_job_listed = False
        self._section = _Communicator("")
        self._kind = self._operation = ""
        self._value, self._ranks_left = 0, _MOST_RANKS
        self._rank = RankId()

    def feed(self, line: str) -> bool:
        """Read a line. Return false if it is not part of an answer."""
        if not self._is_open:
            self._is_open = begins(line)
            return self._is_open
        if section := _SECTION.match(line):
            group, name, self._kind = section.groups()
            size = 1 if group == "0" and self._is_job_listed else 0
            self._section = self._communicators.setdefault(name or "", _Communicator(name or "", size))
        elif different := _DIFFERENT.match(line):
            self._operation = different.group(1)
        elif many := _MANY.match(line):
            self._value = _read_value(many.groups()[1:])
            self._section.unlisted[self._operation][self._value] = int(many.group(1))
        elif rank := _RANK.match(line):
            number, *value, pid, node = rank.groups()
            self._add(RankId(node=node, rank=int(number), pid=int(pid) if pid else None), value)
        elif process := _PROCESS.match(line):
            self._add(RankId(node=process.group(2), pid=int(process.group(1))), ())
        elif field := _FIELD.match(line):
            self._read_field(*field.groups())
        elif _ROW.match(line):
            self._is_job_listed = True
        else:
            self._is_open = line.startswith(_OTHER_LINES)
        return self._is_open

    def _add(self, rank: RankId, value: Sequence[str | None]) -> None:
        self._ranks_left -= 1
        if self._ranks_left < 0 or self._kind in ("ERROR", "TIMEOUT"):
            return
        if self._kind != "MISMATCH":
            self._section.silent.append(rank)
            return
        if any(value):
            self._value = _read_value(value)
        self._section.counts[self._operation][self._value].append(rank)

    def _read_field(self, key: str, text: str) -> None:
        """Read a field of JSON. The fields of a rank are in this order: rank, host, pid, then its numbers."""
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None
        if key == "hash":
            self._section = self._communicators.setdefault(text, _Communicator(text))
        elif key in ("ranks", "missing_ranks"):
            self._kind = "MISMATCH" if key == "ranks" else "INCOMPLETE"
        elif key == "host":
            self._rank = RankId(node=text, rank=self._rank.rank)
        elif number is None or key in _NO_COUNTS:
            return
        elif key == "size":
            self._section.size = number
        elif key == "rank":
            self._rank = RankId(rank=number)
        elif key == "pid":
            self._rank = RankId(node=self._rank.node, rank=self._rank.rank, pid=number)
            if self._kind != "MISMATCH":
                self._add(self._rank, ())
        elif key[0].isupper():
            self._operation, self._value = key, number
            self._add(self._rank, ())

    def compare(self) -> Iterator[Difference]:
        """Yield the differences within each communicator, or that there are none."""
        largest = max((one.size for one in self._communicators.values()), default=0)
        silent = max(len(one.silent) for one in self._communicators.values() if one.size == largest) if largest else 0
        count = 0
        for one in self._communicators.values():
            is_job = one.size == largest > 0
            are_told = not one.name and len(one.silent) <= silent  # the same processes, without their ranks
            for difference in (_find_silent(one, is_job), _find_behind(one, is_job)):
                if difference is not None and not are_told:
                    count += 1
                    yield difference
        if not count:
            text = "NCCL RAS reports no difference: all ranks have launched the same collectives"
            yield Difference(f"{text}; if they wait, check the network and the GPUs", (), (), "")


def _read_value(value: Sequence[str | None]) -> int:
    launched, _, status = value
    return _STATES.index(status) if status in _STATES else int(launched or 0)


def _find_ids(ranks: Sequence[RankId], is_job: bool) -> tuple[RankId, ...]:
    ids = (rank if is_job or rank.pid is None else RankId(node=rank.node, pid=rank.pid) for rank in ranks)
    return tuple(sorted(set(ids), key=RankId.sort_key))


def _find_silent(communicator: _Communicator, is_job: bool) -> Difference | None:
    ids = _find_ids(communicator.silent, is_job)
    if not ids:
        return None
    text = f"NCCL RAS got no answer of {words.name_ranks(ids)}: the process has ended, or does not run"
    return Difference(text, ids, ids, "its process does not answer NCCL RAS")


def _find_behind(communicator: _Communicator, is_job: bool) -> Difference | None:
    """Return the ranks with lower numbers, unless these have a higher number of another operation."""
    texts: list[str] = []
    behind, ahead = list[RankId](), set[RankId]()
    for operation, by_value in communicator.counts.items():
        unlisted = communicator.unlisted[operation]
        values = sorted({*by_value, *unlisted})
        if len(values) < 2:
            continue
        for value in values:
            ids = _find_ids(by_value[value], is_job)
            names = words.name_ranks(ids) if ids else words.count(unlisted[value])
            what = _STATES[value] if operation == "status" else f"{operation} {value:,}"
            texts.append(f"{names} at {what}")
            if value < values[-1]:
                behind += ids
            else:
                ahead.update(ids)
    if not texts:
        return None
    text = f"NCCL RAS: ranks of communicator {communicator.name} differ: {', '.join(texts)}"
    ids = tuple(sorted({*behind} - ahead, key=RankId.sort_key))
    return Difference(text, ids or tuple(ahead), ids, f"it is behind by NCCL RAS: {', '.join(texts)}")
