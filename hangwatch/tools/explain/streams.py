"""Streams of the lines of a source: one for each prefix. Pure."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from hangwatch.logs import line_prefixes
from hangwatch.model import RankId
from hangwatch.tools.explain import file_names, line_stream
from hangwatch.tools.explain.stacks.parsed_processes import Interned

_MOST_STREAMS = 1 << 17  # of one source, because any program may write prefixes
_CONTINUED = ("stack trace:", "failed collective:", "(most recent call last):", "(most recent call first):")
"""Ends of a line after which lines without a mark follow."""
_CONTINUES = re.compile(r"  |#\d+ |[A-Za-z_][\w.]{0,200}(?:Error|Exception|Interrupt|Exit)\b")


class Source(NamedTuple):
    """One stream of lines, and the rank in its prefix or file name. `sure` is true if that is certainly a rank."""

    name: str
    id: RankId
    sure: bool
    reader: line_stream.Reader


class Streams:
    """The streams of one source: a reader for each prefix of its lines."""

    def __init__(
        self, name: str, named: file_names.RankInName, interned: Interned, add_note: Callable[[str], None]
    ) -> None:
        self._name = name
        self._named = named
        self._unmarked = named.id
        self._interned = interned
        self._add_note = add_note
        self._sources: dict[tuple[RankId, bool], Source] = {}
        self._headings = line_prefixes.Headings(line_stream.begins_dump)
        self._heading: tuple[RankId, bool] | None = None
        self._by_prefix: dict[str, line_stream.Reader] = {}  # by `[node:rank]`, a cache: most lines repeat a prefix

    def read(self, head: Sequence[str], tail: Iterable[str]) -> list[Source]:
        """Read the lines with their line ends and return the streams. Raises HugeStackError if a dump is too large."""
        self._labels = line_prefixes.find_labels([part for line in head for part in line_prefixes.read_texts(line)])
        find_reader = self._by_prefix.get
        for number, line in enumerate(chain(head, tail), 1):
            end = line.find("]") + 1
            reader = find_reader(line[:end])
            if reader is not None and reader.repeat_frame(line[end:]):
                self._heading = None
                continue
            for part in line_prefixes.read_texts(line):
                self._feed(part, number)
        are_sure = any(sure and rank.is_numbered for rank, sure in self._sources)  # then a label is that of a launcher
        for source in self._sources.values():
            source.reader.log.has_task_labels = self._labels == "label" and not are_sure
            source.reader.end()
        return list(self._sources.values())

    def _feed(self, line: str, number: int) -> None:
        prefix = line[: line.find("]") + 1] if line.startswith("[") else ""
        reader = self._by_prefix.get(prefix)
        if reader is not None and not line.startswith((":", " [rank"), len(prefix)):
            reader.feed(line[len(prefix) :], number)
            self._heading = None
            return
        if line.startswith("==> ") and line.endswith(" <=="):  # tail(1) of several files
            below = file_names.read_name(line.removesuffix(" <=="))
            self._unmarked = below if below.is_numbered else self._named.id
        rank, sure, rest = line_prefixes.split(line, self._unmarked, self._labels)
        if rank is not self._unmarked:
            self._heading = (rank, sure) if rest.rstrip().endswith(_CONTINUED) else None
        elif self._heading and _CONTINUES.match(line):
            rank, sure = self._heading
        else:
            self._heading = None
        if rank is self._unmarked:
            rank, sure = self._headings.follow(line, rank)
        if (rank, sure) not in self._sources and len(self._sources) >= _MOST_STREAMS:
            self._add_note(
                f"{self._name}: more than {_MOST_STREAMS:,} prefixes; a further prefix is read as part of its line"
            )
            rank, sure, rest = self._unmarked, True, line
        if (rank, sure) not in self._sources:
            reader = line_stream.Reader(self._interned, is_log=self._named.is_log)
            self._sources[rank, sure] = Source(self._name, rank, sure, reader)
        reader = self._sources[rank, sure].reader
        if prefix and rank.is_numbered and len(rest) == len(line) - len(prefix):
            self._by_prefix[prefix] = reader
        reader.feed(rest, number, line[: len(line) - len(rest)])
