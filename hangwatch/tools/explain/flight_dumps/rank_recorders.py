"""The rank of each flight recorder dump, and the newest dumps of each rank. Pure.

A dump does not contain the time at which it was written, and the time of its file may be that of a copy. So only the
times in the dumps are compared.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.collectives.process_groups import MOST_DIFFERENT_CLOCKS_SECONDS, PROVING
from hangwatch.model import Evidence, RankId
from hangwatch.model.flight_records import RankRecords
from hangwatch.tools.explain import file_names
from hangwatch.tools.explain.flight_dumps.recorder_dump import FlightDump

_APART_SECONDS = 3600.0
_SHOWN = 4
_NAME_CHARACTERS = 40


class DumpFile(NamedTuple):
    """A flight recorder dump, with the name of its file."""

    name: str
    dump: FlightDump


class JoinedDumps(NamedTuple):
    """The dumps of one job, keyed by rank."""

    by_rank: Mapping[int, tuple[RankRecords, ...]]
    world_size: int | None
    evidence: tuple[Evidence, ...]
    notes: tuple[str, ...]


def join(files: Iterable[DumpFile]) -> JoinedDumps:
    """Join the dumps of a job by rank. The notes list the dumps that do not count."""
    notes: list[str] = []
    numbered = _find_ranks(list(files), notes)
    newest = {rank: _find_newest(of_rank) for rank, of_rank in sorted(numbered.items())}
    notes += _note_several_dumps(
        {rank: numbered[rank] for rank, of_rank in newest.items() if len(of_rank) < len(numbered[rank])}
    )
    # Leave out the dumps of ranks that enqueued nothing in the hour before the newest operation of all, or of a job of
    # another size. These may be of an earlier run. A dump without an operation is kept.
    times = {
        rank: max((file.dump.newest_unix_seconds for file in files), default=0.0) for rank, files in newest.items()
    }
    sizes = {rank: {file.dump.world_size for file in files} - {None} for rank, files in newest.items()}
    last = max(times, key=times.__getitem__, default=0)
    old = {
        rank
        for rank, seconds in times.items()
        if 0.0 < seconds < times[last] - _APART_SECONDS or (sizes[rank] and sizes[last] - sizes[rank])
    }
    old.update(_find_earlier_attempts({rank: newest[rank] for rank in sorted(newest, key=lambda rank: -times[rank])}))
    if old:
        notes.append(
            f"flight recorder of {words.name_ranks([RankId(rank=rank) for rank in sorted(old)])} ignored: it is of an "
            f"earlier attempt, over {words.duration(_APART_SECONDS)} older than another, or of a job of another size"
        )
    newest = {rank: files for rank, files in newest.items() if rank not in old}
    of_job = set[int | None]().union(*(sizes[rank] for rank in newest))
    return JoinedDumps(
        by_rank={
            rank: tuple(library for file in files for library in file.dump.recorders) for rank, files in newest.items()
        },
        world_size=of_job.pop() if len(of_job) == 1 else None,
        evidence=tuple(_describe_last_enqueued(newest)),
        notes=tuple(notes),
    )


def _find_earlier_attempts(newest_first: Mapping[int, Sequence[DumpFile]]) -> Iterator[int]:
    """Yield the ranks with dumps of earlier attempts, after which the job was started again.

    A collective completes when all members have begun it. So a rank begins no collective that another rank of its
    attempt completed long before, and none with a lower number. A broadcast can complete before others begin it.
    """
    begun: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, files in newest_first.items():
        records = [
            record
            for file in files
            for recorder in file.dump.recorders
            for record in recorder.records
            if record.group_name and record.operation.rpartition(":")[2].startswith(PROVING)
        ]
        completed = {record.group_name: record for record in records if not record.is_open}
        if any(
            record.completed_unix_ns > 0
            and number <= record.collective_seq
            and created_ns - record.completed_unix_ns > MOST_DIFFERENT_CLOCKS_SECONDS * 1e9
            for name, record in completed.items()
            for number, created_ns in begun[name].items()
        ):
            yield rank
        else:
            for record in records:
                begun[record.group_name][record.collective_seq] = record.created_unix_ns


def _find_ranks(files: Sequence[DumpFile], notes: list[str]) -> dict[int, list[DumpFile]]:
    """Return the dumps by rank: the number that ends the file's name, and that does not contradict its groups."""
    sizes = {file.dump.world_size for file in files}
    numbers = file_names.dump_ranks((file.name for file in files), sizes.pop() if len(sizes) == 1 else None)
    by_rank: dict[int, list[DumpFile]] = defaultdict(list)
    unknown, contradicted = [], []
    for file in files:
        number, sure = numbers.get(file.name, (None, False))
        possible = file.dump.possible_ranks
        only = possible[0].first if possible and possible[0].first == possible[-1].last else None
        if number is None and only is not None:
            by_rank[only].append(file)
        elif number is None or (possible is None and not sure):
            unknown.append(file)
        elif possible is not None and not any(number in progression.ranks for progression in possible):
            contradicted.append(file)
        else:
            by_rank[number].append(file)
    if unknown:
        notes.append(
            f"{_describe_example(unknown)}{words.count(len(unknown), 'dump')} of a flight recorder: the rank is "
            "unknown; end the file name with `rank` and the number, as torch does"
        )
    if contradicted:
        notes.append(
            f"{_describe_example(contradicted)}{words.count(len(contradicted), 'dump')} of a flight recorder ignored: "
            "the number in the file name is not a rank of its groups"
        )
    return by_rank


def _describe_example(files: Sequence[DumpFile]) -> str:
    return f"{words.printable(files[0].name)}{' and others' if len(files) > 1 else ''}: "


def _find_newest(files: Sequence[DumpFile]) -> tuple[DumpFile, ...]:
    """Return the latest dumps of a rank, one for each library."""
    latest: dict[tuple[str, ...], DumpFile] = {}
    for file in sorted(files, key=lambda file: (file.dump.newest_unix_seconds, file.name)):
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
