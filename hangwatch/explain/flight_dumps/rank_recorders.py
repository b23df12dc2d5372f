"""The rank of each flight recorder dump, and the operations in dumps that can be compared. Pure.

A dump does not contain the time at which it was written. Only its file has a time, and that may be the time of a copy.
Dumps of a healthy job show different moments, so they cannot be compared. Therefore dumps count only if an operation
had passed its timeout when they were written: then the watchdog writes them, shortly before the job ends. In these
dumps, an operation counts if it had been open for a minute when the first dump was written. In a minute all ranks had
the time to join, even if the clocks of their nodes differ.
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
_AFTER_TIME_OUT_SECONDS = 600.0  # the watchdog writes its dump some seconds after the timeout
_APART_SECONDS = 600.0
_ONE_MOMENT_SECONDS = 5.0
_SHOWN = 4
_NAME_CHARACTERS = 40


class DumpFile(NamedTuple):
    """A flight recorder dump, with the name and time of its file."""

    name: str
    written_unix_seconds: float
    dump: FlightDump

    @property
    def is_timed(self) -> bool:
        """True if the time of the file can be the time at which torch wrote the dump."""
        written, newest = self.written_unix_seconds, self.dump.newest_unix_seconds
        latest = written if self._times_out is None else self._times_out + _AFTER_TIME_OUT_SECONDS
        return newest - _MOST_CLOCK_SECONDS <= written <= latest

    @property
    def has_timed_out(self) -> bool:
        """True if an open operation had passed its timeout at the time of the file."""
        return self._times_out is not None and self._times_out <= self.written_unix_seconds

    @property
    def _times_out(self) -> float | None:
        timed = (record for record in self.dump.opened if record.timeout_ms > 0)
        return min((record.created_unix_ns / 1e9 + record.timeout_ms / 1e3 for record in timed), default=None)


class JoinedDumps(NamedTuple):
    """The dumps of one job, keyed by rank. `by_rank` contains all ranks, `timed` only ranks with dumps of one timeout.

    An operation enqueued before `opened_before_unix_seconds` had been open for a minute when the first of the `timed`
    dumps was written.
    """

    by_rank: Mapping[int, tuple[RankRecords, ...]]
    timed: Mapping[int, tuple[RankRecords, ...]]
    opened_before_unix_seconds: float
    world_size: int | None
    evidence: tuple[Evidence, ...]
    notes: tuple[str, ...]


def join(files: Iterable[DumpFile]) -> JoinedDumps:
    """Join the dumps of a job by rank. The notes list the dumps that do not count."""
    notes: list[str] = []
    numbered = _find_ranks(list(files), notes)
    newest = {rank: _find_newest(of_rank) for rank, of_rank in sorted(numbered.items())}
    several = {rank: numbered[rank] for rank, of_rank in newest.items() if len(of_rank) < len(numbered[rank])}
    notes += _note_several_dumps(several)
    timed = _find_dumps_of_timeout(newest, notes)
    written = [file.written_unix_seconds for of_rank in timed.values() for file in of_rank]
    sizes = {file.dump.world_size for of_rank in newest.values() for file in of_rank} - {None}
    return JoinedDumps(
        by_rank={rank: _join_recorders(of_rank) for rank, of_rank in newest.items()},
        timed={rank: _join_recorders(of_rank) for rank, of_rank in timed.items()},
        opened_before_unix_seconds=min(written, default=0.0) - LATE_SECONDS,
        world_size=sizes.pop() if len(sizes) == 1 else None,
        evidence=tuple(_describe_last_enqueued(newest)),
        notes=(*_note_times(written), *notes),
    )


def _join_recorders(files: Iterable[DumpFile]) -> tuple[RankRecords, ...]:
    return tuple(recorder for file in files for recorder in file.dump.recorders)


def _find_ranks(files: Sequence[DumpFile], notes: list[str]) -> dict[int, list[DumpFile]]:
    """Return the dumps by rank: the number at the end of the file's name.

    It must not contradict the groups in the dump.
    """
    numbers = file_names.dump_ranks(file.name for file in files)
    by_rank: dict[int, list[DumpFile]] = defaultdict(list)
    unknown, contradicted = [], []
    for file in files:
        number, sure = numbers.get(file.name, (None, False))
        possible = file.dump.possible_ranks
        only = possible[0][0] if possible and possible[0][0] == possible[-1][1] else None
        if number is None and only is not None:
            by_rank[only].append(file)
        elif number is None or (possible is None and not sure):
            unknown.append(file)
        elif possible is not None and not any(first <= number <= last for first, last in possible):
            contradicted.append(file)
        else:
            by_rank[number].append(file)
    if unknown:
        of = f"{words.count(len(unknown), 'dump')} of a flight recorder: the rank is unknown"
        notes.append(f"{_describe_example(unknown)}{of}; end the file name with `rank` and the number, as torch does")
    if contradicted:
        of = f"{words.count(len(contradicted), 'dump')} of a flight recorder ignored"
        notes.append(f"{_describe_example(contradicted)}{of}: the number in the file name is not a rank of its groups")
    return by_rank


def _describe_example(files: Sequence[DumpFile]) -> str:
    return f"{words.printable(files[0].name)}{' and others' if len(files) > 1 else ''}: "


def _find_newest(files: Sequence[DumpFile]) -> tuple[DumpFile, ...]:
    """Return the latest dumps of a rank, one for each library."""
    latest: dict[tuple[str, ...], DumpFile] = {}
    for file in sorted(files, key=lambda file: (file.dump.newest_unix_seconds, file.written_unix_seconds, file.name)):
        latest[tuple(recorder.library for recorder in file.dump.recorders)] = file
    return tuple(latest.values())


def _note_several_dumps(by_rank: Mapping[int, Sequence[DumpFile]]) -> Iterator[str]:
    """Yield a note if ranks have several dumps, because these are of several formats or runs."""
    if by_rank:
        ranks = words.name_ranks([RankId(rank=rank) for rank in by_rank])
        have = "has" if len(by_rank) == 1 else "have"
        counted = ", ".join(words.printable(file.name) for file in _find_newest(next(iter(by_rank.values()))))
        many = ", ..." if len(by_rank) > 1 else ""
        yield f"{ranks} {have} several dumps of a flight recorder; the newest is used: {counted}{many}"


def _find_dumps_of_timeout(
    newest: Mapping[int, tuple[DumpFile, ...]], notes: list[str]
) -> dict[int, tuple[DumpFile, ...]]:
    """Return the ranks with dumps of the timeout. Their files have a plausible time, close to that of the last dump."""
    possible = {rank: files for rank, files in newest.items() if files and all(dump.is_timed for dump in files)}
    if untimed := sorted(newest.keys() - possible.keys()):
        names = words.name_ranks([RankId(rank=rank) for rank in untimed])
        notes.append(
            f"flight recorder of {names}: the time of its file is not the time of the dump, so it does"
            " not show late ranks; copy with `cp -p`, `rsync -a`, `scp -p` or tar"
        )
    last = max((dump.written_unix_seconds for files in possible.values() for dump in files), default=0.0)
    fresh = {
        rank: files
        for rank, files in possible.items()
        if all(last - dump.written_unix_seconds <= _APART_SECONDS for dump in files)
    }
    if old := sorted(possible.keys() - fresh.keys()):
        names = words.name_ranks([RankId(rank=rank) for rank in old])
        notes.append(
            f"flight recorder of {names}: written more than {words.duration(_APART_SECONDS)} before the newest dump, "
            "so it is ignored"
        )
    if fresh and not any(dump.has_timed_out for files in fresh.values() for dump in files):
        notes.append(
            "flight recorders: no operation had timed out when the dumps were written, so they do not show that a "
            "rank is late"
        )
        return {}
    return fresh


def _note_times(written: Sequence[float]) -> Iterator[str]:
    if written:
        apart = max(written) - min(written)
        when = "of one moment" if apart < _ONE_MOMENT_SECONDS else f"written within {words.duration(round(apart))}"
        yield (
            f"flight recorders: {words.count(len(written), 'dump')} {when}, the first at {words.utc(min(written))} by "
            f"the time of its file, after an operation had timed out; an operation counts only if it was enqueued "
            f"{words.duration(LATE_SECONDS)} before that"
        )


def _describe_last_enqueued(newest: Mapping[int, tuple[DumpFile, ...]]) -> Iterator[Evidence]:
    """Yield the last operations of ranks, with the frame that enqueued them. Those of the fewest ranks come first."""
    places: dict[str, list[int]] = defaultdict(list)
    for rank, files in newest.items():
        last = next((one.dump.last for one in files if one.dump.last and one.dump.last.frame), None)
        if last is not None:
            of = f"{last.operation} {last.number:,} of {words.elided(last.group_description, _NAME_CHARACTERS)}"
            places[f"{of}, in {last.frame}"].append(rank)
    for place, ranks in sorted(places.items(), key=lambda item: (len(item[1]), item[1]))[:_SHOWN]:
        ids = tuple(RankId(rank=rank) for rank in ranks)
        yield Evidence(kind="last_enqueued", message=f"{words.name_ranks(ids)} enqueued last: {place}", ranks=ids)
