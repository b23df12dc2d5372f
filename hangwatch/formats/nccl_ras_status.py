"""Parser of NCCL's response to the RAS command STATUS: JSON (NCCL 2.28.7 and later) or text (2.24 and later).

See src/ras/client_support.cc of NCCL. The response is not trusted: all sizes are bounded, and an impossible
communicator makes the whole response invalid. Only versions, hashes and numeric addresses are kept as text.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import msgspec

from hangwatch.formats import decoding
from hangwatch.model import MOST_RANKS, Value

MOST_BYTES = 8 << 20
MOST_COMMUNICATORS = 4096
_MOST_COUNT = 1 << 53
_VERSION = re.compile(r"[\w.+-]{1,32}", re.ASCII)
_HASH = re.compile(r"0x[0-9a-f]{1,16}")

COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "collective")
"""The operations that all ranks launch in the same order. NCCL before 2.26 counts them together, as "collective"."""


class BadAnswerError(Exception):
    """A response that is not a status of NCCL's RAS. The message gives the reason."""


class RasRank(Value, frozen=True):
    """A rank of a communicator: its number in the communicator, its process, and its launches of each operation.

    `host` is the address that the process itself reports; "" if unknown. `pid` is the pid in the process's own
    namespace; -1 if unknown. The job can forge both.
    """

    rank: int
    host: str = ""
    pid: int = -1
    counts: tuple[tuple[str, int], ...] = ()


class Communicator(Value, frozen=True):
    """A communicator of `size` ranks: the ranks that responded, and the ranks that NCCL does not reach.

    The text form lists only a few of the ranks that differ; `rest` has the counts of all other ranks. `is_listed`:
    every rank is in `ranks` or `unreached`. `is_running`: no rank is starting or ending.
    """

    name: str
    size: int
    ranks: tuple[RasRank, ...] = ()
    unreached: tuple[RasRank, ...] = ()
    rest: tuple[tuple[str, int], ...] = ()
    is_listed: bool = False
    is_running: bool = True


class RasStatus(Value, frozen=True):
    """A response to STATUS: the version of NCCL, and its communicators by name."""

    version: str
    communicators: tuple[Communicator, ...]


def parse(raw: bytes) -> RasStatus:
    """Parse a response to STATUS, in either form. Raises BadAnswerError."""
    if len(raw) > MOST_BYTES:
        raise BadAnswerError(f"more than {MOST_BYTES >> 20} MiB")
    text = raw.decode("utf-8", "replace")
    return _parse_json(text) if text.lstrip()[:1] == "{" else _parse_text(text)


# --- JSON ------------------------------------------------------------------------------------------------------------

_Number = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=_MOST_COUNT)]


class _State(msgspec.Struct):
    init_state: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False
    unresponsive: bool = False
    considered_dead: bool = False


class _Rank(msgspec.Struct):
    rank: _Number
    host: str = ""
    pid: int = -1
    status: _State = msgspec.field(default_factory=_State)
    collective_counts: dict[str, _Count] = {}


class _Communicator(msgspec.Struct):
    hash: str
    size: _Number
    ranks: list[_Rank]
    secondary_hash: str = ""
    missing_ranks: list[_Rank] = []


class _Answer(msgspec.Struct):
    nccl_version: str
    communicators: list[_Communicator]


def _parse_json(text: str) -> RasStatus:
    try:
        answer = decoding.decode_json("\n".join(_with_commas(text.splitlines())), _Answer)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadAnswerError(f"not the JSON of a status: {error}") from None
    return _status(answer.nccl_version, map(_communicator, answer.communicators))


def _with_commas(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a response in JSON, with commas that NCCL 2.28.9 leaves out.

    They are missing between two members of the object about a missing rank.
    """
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        bare = line.rstrip()
        is_left_out = bare[-1:] not in ("", ",", ":", "{", "[") and following.lstrip()[:1] == '"'
        yield f"{bare}," if is_left_out else bare


def _communicator(raw: _Communicator) -> Communicator:
    ranks = [*raw.ranks, *raw.missing_ranks]
    numbers = {rank.rank for rank in ranks}
    if not _HASH.fullmatch(raw.hash) or len(numbers) < len(ranks) or (numbers and max(numbers) >= raw.size):
        raise BadAnswerError("an impossible communicator")
    states = [rank.status for rank in raw.ranks]
    unreached = [
        rank for rank in raw.missing_ranks if rank.status.unresponsive or rank.status.considered_dead
    ]  # the other missing ranks responded, but do not have this communicator (not yet, or no longer)
    return Communicator(
        name=_name(raw.hash, raw.secondary_hash),
        size=raw.size,
        ranks=tuple(_rank(rank) for rank in raw.ranks),
        unreached=tuple(_rank(rank) for rank in unreached),
        is_listed=len(raw.ranks) + len(unreached) == raw.size,
        is_running=not any(_is_starting_or_ending(state) for state in states),
    )


def _is_starting_or_ending(state: _State) -> bool:
    return state.init_state != 0 or state.finalize_called or state.destroy_flag or state.abort_flag


def _name(first: str, second: str) -> str:
    """Return a unique name of a communicator, made from both hashes.

    Several communicators may have the same first hash.
    """
    parts = second.split(":")
    return f"{first}/{second}" if len(parts) == 2 and all(map(_HASH.fullmatch, parts)) else first


def _rank(raw: _Rank) -> RasRank:
    counts = tuple(sorted((name, count) for name, count in raw.collective_counts.items() if name.isidentifier()))
    return RasRank(rank=raw.rank, host=_host(raw.host), pid=raw.pid, counts=counts)


def _host(text: str) -> str:
    """Return `text` as an address; "" if it is not an address.

    An IPv6 address with a scope is refused, because the scope may contain any character.
    """
    try:
        return "" if "%" in text else str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def _status(version: str, communicators: Iterable[Communicator]) -> RasStatus:
    by_name = {communicator.name: communicator for communicator in communicators}
    if not _VERSION.fullmatch(version) or len(by_name) > MOST_COMMUNICATORS:
        raise BadAnswerError("no version of NCCL, or too many communicators")
    return RasStatus(version=version, communicators=tuple(by_name[name] for name in sorted(by_name)))


# --- text ------------------------------------------------------------------------------------------------------------

_VERSION_LINE = re.compile(r"NCCL version ([\w.+-]{1,32}) compiled with", re.ASCII)
_GROUP = re.compile(
    r" *(\d{1,8}) +\d{1,8} +\d{1,8} +[\d-]{1,17} +(\d{1,8}) +\d{1,8} +([A-Z]{1,16}) +\S{1,64}", re.ASCII
)
_HEAD = re.compile(r"#(\d{1,8})-\d{1,8} \(([0-9a-f]{16})\) (INCOMPLETE|MISMATCH|ERROR)", re.ASCII)
_OPERATION = re.compile(r"  Communicator ranks have different (\w{1,32}) operation counts", re.ASCII)
_MANY = re.compile(
    r"  (\d{1,8}) ranks have (?:launched up to operation (\d{1,16})|not launched any operations)", re.ASCII
)
_LONE = re.compile(
    r"  Rank (\d{1,8}) has (?:launched up to operation (\d{1,16})|not launched any operations) -- (.*)", re.ASCII
)
_STATUS = "  Communicator ranks have different status"
_LISTED = re.compile(r"  Rank (\d{1,8}) -- (.*)", re.ASCII)
_PROCESS = re.compile(r"GPU .{1,40} managed by process (\d{1,9}) on node ([0-9a-f.:]{1,45})", re.ASCII)


class _Draft:
    """A communicator during parsing, with the data from the lines read so far."""

    def __init__(self, size: int, *, is_running: bool) -> None:
        self.size = size
        self.is_running = is_running
        self.places: dict[int, tuple[str, int]] = {}
        self.counts: dict[int, dict[str, int]] = {}
        self.unlisted: dict[str, list[int]] = {}
        self.unreached: dict[int, RasRank] = {}

    def add_rank(self, number: int, operation: str, count: int, process_text: str) -> None:
        self.counts.setdefault(number, {})[operation] = count
        if process := _PROCESS.fullmatch(process_text):
            self.places[number] = _host(process[2]), int(process[1])

    def build(self, name: str) -> Communicator:
        """Return the finished communicator. Raises BadAnswerError if it is impossible."""
        if any(number >= self.size for number in (*self.counts, *self.unreached)):
            raise BadAnswerError("an impossible communicator")
        ranks = (
            RasRank(rank=number, host=host, pid=pid, counts=tuple(sorted(counts.items())))
            for number, counts in sorted(self.counts.items())
            for host, pid in [self.places.get(number, ("", -1))]
        )
        return Communicator(
            name=name,
            size=self.size,
            ranks=tuple(ranks),
            unreached=tuple(self.unreached[number] for number in sorted(self.unreached)),
            rest=tuple(sorted((name, count) for name, counts in self.unlisted.items() for count in counts)),
            is_running=self.is_running,
        )


def _parse_text(text: str) -> RasStatus:
    """Parse a response in the text form.

    This form lists only differences. If all ranks of a communicator agree, their counts are unknown.
    """
    version = _VERSION_LINE.search(text[:1024])
    if version is None:
        raise BadAnswerError("not the text of a status")
    lines = text.splitlines()
    groups = {int(row[1]): (int(row[2]), row[3]) for row in map(_GROUP.fullmatch, map(str.rstrip, lines)) if row}
    return _status(version[1], _communicators(lines, groups))


def _communicators(lines: Iterable[str], groups: Mapping[int, tuple[int, str]]) -> Iterator[Communicator]:
    drafts: dict[str, _Draft] = {}
    draft, section, operation, pending = None, "", "", None
    for line in lines:
        if head_line := _HEAD.fullmatch(line):
            size, status = groups.get(int(head_line[1]), (0, ""))
            name = f"0x{head_line[2].lstrip('0') or '0'}"
            draft = drafts.setdefault(name, _Draft(size, is_running=status == "RUNNING"))
            section, operation, pending = head_line[3], "", None
        elif draft is None:
            continue
        elif not line.strip():
            operation, pending = "", None  # the end of one operation; the next one is of the same communicator
        elif section == "INCOMPLETE" and (listed := _LISTED.fullmatch(line)):
            process = _PROCESS.fullmatch(listed[2])
            host, pid = (_host(process[2]), int(process[1])) if process else ("", -1)
            draft.unreached[int(listed[1])] = RasRank(rank=int(listed[1]), host=host, pid=pid)
        elif line == _STATUS:
            draft.is_running = False
        elif section == "MISMATCH" and (operation_line := _OPERATION.fullmatch(line)):
            operation, pending = operation_line[1], None
        elif operation and (many_line := _MANY.fullmatch(line)):
            pending = int(many_line[2] or 0)
            draft.unlisted.setdefault(operation, []).append(pending)
        elif operation and (rank_line := _LONE.fullmatch(line)):
            draft.add_rank(int(rank_line[1]), operation, int(rank_line[2] or 0), rank_line[3])
        elif operation and pending is not None and (listed := _LISTED.fullmatch(line)):
            if draft.unlisted[operation][-1:] == [pending]:
                draft.unlisted[operation].pop()
            draft.add_rank(int(listed[1]), operation, pending, listed[2])
    return (draft.build(name) for name, draft in drafts.items())
