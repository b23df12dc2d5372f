"""Pure: dumps of flight recorders, one for each process -> one for each rank, and since when what they hold is open.

A dump is one moment and does not tell which: that is the time of its file, or that of a copy. One look at a healthy job
is a torn cut. So dumps are compared where an operation had passed its own time-out when they were written, which is
when the watchdog writes them, and not long after, since that ends a job; and of what they hold an operation counts that
had been open for a minute when the first of them was written: by then all ranks have had the time to come, on nodes
whose clocks differ, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.explain import file_names
from hangwatch.explain.flight_dumps.recorder_dump import FlightDump
from hangwatch.model import Evidence, RankId
from hangwatch.model.flight_records import RankRecords

LATE_SECONDS = 60.0
_MOST_CLOCK_SECONDS = 60.0
_AFTER_TIME_OUT_SECONDS = 600.0  # the watchdog writes its dump some seconds after
_APART_SECONDS = 600.0
_ONE_MOMENT_SECONDS = 5.0
_SHOWN = 4
_NAME_CHARACTERS = 40


class DumpFile(NamedTuple):
    """A dump, and the name and time of its file."""

    name: str
    written_unix_seconds: float
    dump: FlightDump

    @property
    def is_timed(self) -> bool:
        """Whether that can be the time at which it was written."""
        written, newest = self.written_unix_seconds, self.dump.newest_unix_seconds
        latest = written if self._times_out is None else self._times_out + _AFTER_TIME_OUT_SECONDS
        return newest - _MOST_CLOCK_SECONDS <= written <= latest

    @property
    def has_timed_out(self) -> bool:
        """Whether an operation had been open for its time-out at the time of the file."""
        return self._times_out is not None and self._times_out <= self.written_unix_seconds

    @property
    def _times_out(self) -> float | None:
        ends = (one.created_unix_ns / 1e9 + one.timeout_ms / 1e3 for one in self.dump.opened if one.timeout_ms > 0)
        return min(ends, default=None)


class Joined(NamedTuple):
    """What the dumps of one job hold. `by_rank` is all of it, `timed` of the ranks whose dumps are of one time-out.

    What was enqueued before `opened_before_unix_seconds` and is open in one of these was so for a minute in all.
    """

    by_rank: Mapping[int, tuple[RankRecords, ...]]
    timed: Mapping[int, tuple[RankRecords, ...]]
    opened_before_unix_seconds: float
    world_size: int | None
    evidence: tuple[Evidence, ...]
    notes: tuple[str, ...]


def join(files: Iterable[DumpFile]) -> Joined:
    """The dumps by rank. What is left out, or what their times do not tell, is a note."""
    notes: list[str] = []
    numbered = _numbered(list(files), notes)
    newest = {rank: _newest(of_rank) for rank, of_rank in sorted(numbered.items())}
    notes += _told_several({rank: numbered[rank] for rank, found in newest.items() if len(found) < len(numbered[rank])})
    timed = _timed(newest, notes)
    written = [one.written_unix_seconds for found in timed.values() for one in found]
    sizes = {one.dump.world_size for found in newest.values() for one in found} - {None}
    return Joined(
        by_rank={rank: _recorders(found) for rank, found in newest.items()},
        timed={rank: _recorders(found) for rank, found in timed.items()},
        opened_before_unix_seconds=min(written, default=0.0) - LATE_SECONDS,
        world_size=sizes.pop() if len(sizes) == 1 else None,
        evidence=tuple(_last_enqueued(newest)),
        notes=(*_told_time(written), *notes),
    )


def _recorders(found: Iterable[DumpFile]) -> tuple[RankRecords, ...]:
    return tuple(recorder for one in found for recorder in one.dump.recorders)


def _numbered(files: Sequence[DumpFile], notes: list[str]) -> dict[int, list[DumpFile]]:
    """The dumps by the number at the end of their names, where the groups in them do not contradict it."""
    told = file_names.dump_ranks(one.name for one in files)
    found: dict[int, list[DumpFile]] = defaultdict(list)
    unknown, contradicted = [], []
    for one in files:
        number, sure = told.get(one.name, (None, False))
        possible = one.dump.possible_ranks
        only = possible[0][0] if possible and possible[0][0] == possible[-1][1] else None
        if number is None and only is not None:
            found[only].append(one)
        elif number is None or (possible is None and not sure):
            unknown.append(one)
        elif possible is not None and not any(first <= number <= last for first, last in possible):
            contradicted.append(one)
        else:
            found[number].append(one)
    if unknown:
        of = f"{words.count(len(unknown), 'dump')} of a flight recorder: nothing tells of which rank"
        notes.append(f"{_example(unknown)}{of}; end its name in rank and number, as torch does")
    if contradicted:
        of = f"{words.count(len(contradicted), 'dump')} of a flight recorder left out"
        notes.append(f"{_example(contradicted)}{of}: a group that it has used has no rank of the number in its name")
    return found


def _example(files: Sequence[DumpFile]) -> str:
    return f"{words.printable(files[0].name)}{' and others' if len(files) > 1 else ''}: "


def _newest(files: Sequence[DumpFile]) -> tuple[DumpFile, ...]:
    """Of each library the dump of a rank that was made last."""
    found: dict[tuple[str, ...], DumpFile] = {}
    for one in sorted(files, key=lambda one: (one.dump.newest_unix_seconds, one.written_unix_seconds, one.name)):
        found[tuple(recorder.library for recorder in one.dump.recorders)] = one
    return tuple(found.values())


def _told_several(of_rank: Mapping[int, Sequence[DumpFile]]) -> Iterator[str]:
    """That ranks have more dumps than one: of another form, or of another run."""
    if of_rank:
        who = words.who([RankId(rank=rank) for rank in of_rank])
        have = "has" if len(of_rank) == 1 else "have"
        counted = ", ".join(words.printable(one.name) for one in _newest(next(iter(of_rank.values()))))
        many = ", ..." if len(of_rank) > 1 else ""
        yield f"{who} {have} several dumps of a flight recorder; what was enqueued last counts: {counted}{many}"


def _timed(newest: Mapping[int, tuple[DumpFile, ...]], notes: list[str]) -> dict[int, tuple[DumpFile, ...]]:
    """The ranks whose dumps are of the time-out: of a time that can be true, and not long before that of the last."""
    possible = {rank: files for rank, files in newest.items() if files and all(one.is_timed for one in files)}
    if untimed := sorted(newest.keys() - possible.keys()):
        who = words.who([RankId(rank=rank) for rank in untimed])
        notes.append(
            f"flight recorder of {who}: the time of its file cannot be that of the dump, and so says nothing of who is"
            " late; copy with `cp -p`, `rsync -a`, `scp -p` or tar"
        )
    last = max((one.written_unix_seconds for files in possible.values() for one in files), default=0.0)
    fresh = {
        rank: files
        for rank, files in possible.items()
        if all(last - one.written_unix_seconds <= _APART_SECONDS for one in files)
    }
    if old := sorted(possible.keys() - fresh.keys()):
        who = words.who([RankId(rank=rank) for rank in old])
        notes.append(
            f"flight recorder of {who}: written more than {words.duration(_APART_SECONDS)} before the last, not counted"
        )
    if fresh and not any(one.has_timed_out for files in fresh.values() for one in files):
        notes.append(
            "flight recorders: by the files that count, no operation had passed its time-out when they were written, so"
            " that nothing says that one of them is late"
        )
        return {}
    return fresh


def _told_time(written: Sequence[float]) -> Iterator[str]:
    if written:
        apart = max(written) - min(written)
        when = "of one moment" if apart < _ONE_MOMENT_SECONDS else f"written within {words.duration(round(apart))}"
        yield (
            f"flight recorders: {words.count(len(written), 'dump')} {when}, the first at {words.utc(min(written))} by"
            " their files, when an operation had timed out; one counts that was enqueued"
            f" {words.duration(LATE_SECONDS)} before that"
        )


def _last_enqueued(newest: Mapping[int, tuple[DumpFile, ...]]) -> Iterator[Evidence]:
    """What each rank enqueued last, and from where: not where it stands. Folded, the fewest ranks first."""
    places: dict[str, list[int]] = defaultdict(list)
    for rank, files in newest.items():
        last = next((one.dump.last for one in files if one.dump.last and one.dump.last.frame), None)
        if last is not None:
            of = f"{last.operation} {last.number:,} of {words.elided(last.group_description, _NAME_CHARACTERS)}"
            places[f"{of}, in {last.frame}"].append(rank)
    for place, ranks in sorted(places.items(), key=lambda item: (len(item[1]), item[1]))[:_SHOWN]:
        ids = tuple(RankId(rank=rank) for rank in ranks)
        yield Evidence(kind="last_enqueued", message=f"{words.who(ids)} enqueued last: {place}", ranks=ids)
