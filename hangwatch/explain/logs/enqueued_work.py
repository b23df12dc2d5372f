"""Comparison of the sequence numbers in the logs of all ranks, to find ranks that have not joined a collective. Pure.

If ranks of a process group timed out at a number, and another rank of the group has only enqueued lower numbers, that
rank has not joined. NCCL counts point-to-point operations separately, so a group with such operations is not compared.
If there is doubt, the numbers are evidence, and no rank is checked first.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import words
from hangwatch.explain.logs import merged_logs
from hangwatch.explain.logs.rank_log import Log, Moment, Work
from hangwatch.explain.logs.work_lines import DEFAULT_GROUP, is_collective
from hangwatch.model import RankId

_FEWEST_SEEN = 3
_SHOWN = 4
_CLOCK_SECONDS = 1.0  # numbers this much older than another rank's timeout still count as written after it


class RankWork(NamedTuple):
    """The sequence numbers in a log and the rank that wrote them; None if unknown. `source` is the name of the log."""

    id: RankId | None
    source: str
    work: Work


class WorkFinding(NamedTuple):
    """A sentence about the numbers in logs. `behind` are the ranks to check first, `why` is the reason.

    `since` is the time of the timeout. `source` is the log of a rank that is behind.
    """

    text: str
    ranks: tuple[RankId, ...]
    behind: tuple[RankId, ...] = ()
    why: str = ""
    since: Moment | None = None
    source: str = "its log"


class _Standing(NamedTuple):
    """The last sequence numbers of one rank in one process group.

    `timed_out` is the number of the operation that timed out, None if none did. `is_answer` is true if the rank wrote
    its numbers because another rank timed out.
    """

    id: RankId
    timed_out: int | None
    timed_out_at: Moment | None
    enqueued: int
    written_at: Moment | None
    is_answer: bool


def read_works(source: str, rank: RankId, log: Log) -> Iterator[RankWork]:
    """Yield the sequence numbers in a log, with the rank that wrote them.

    A line contains the rank's number within a process group. It is the rank of the job only in the default group.
    """
    is_of_rank = merged_logs.is_of_process(rank)
    if rank.rank is None and log.told_rank is not None:
        rank = replace(rank, rank=log.told_rank)
    for work in log.works.values():
        by_line = work.line.ranks and work.line.kind in ("work", "operation") and work.line.group in ("", DEFAULT_GROUP)
        told = RankId(rank=work.line.ranks[0]) if by_line else None
        yield RankWork(rank if is_of_rank else told, source, work)


def compare(works: Sequence[RankWork], world_size: int | None) -> list[WorkFinding]:
    """Compare the numbers of all ranks. Return what was found; findings with ranks to check first come first."""
    groups: dict[str, dict[RankId, _Standing]] = defaultdict(dict)
    names: dict[str, str] = {}
    for rank, _, work in works:
        if work.line.kind == "work" and rank is not None:
            names[work.line.group] = work.line.name
            ranks = groups[work.line.group]
            ranks[rank] = _update_standing(ranks.get(rank), rank, work)
    waiting = {
        standing.id for ranks in groups.values() for standing in ranks.values() if standing.timed_out is not None
    }
    operations = _find_operations(works)
    findings = [
        finding
        for group, ranks in groups.items()
        if (finding := _compare_group(names[group], ranks, operations, waiting, world_size)) is not None
    ]
    findings += [
        *_compare_desync_reports(works, set(groups)),
        *_compare_running_collectives(works),
        *_compare_barriers(works),
    ]
    sources = {rank: source for rank, source, _ in works}
    findings = [
        finding._replace(source=sources.get(finding.behind[0], finding.source)) if finding.behind else finding
        for finding in findings
    ]
    return sorted(findings, key=lambda finding: not finding.behind)


def _update_standing(before: _Standing | None, rank: RankId, work: Work) -> _Standing:
    line = work.line
    is_timeout = line.timed_out is not None
    return _Standing(
        id=rank,
        timed_out=line.timed_out if is_timeout else before.timed_out if before else None,
        timed_out_at=work.moment if is_timeout else before.timed_out_at if before else None,
        enqueued=line.enqueued if line.enqueued is not None else -1,
        written_at=work.moment,
        is_answer=line.is_answer or (before.is_answer if before else False),
    )


class _Operations(NamedTuple):
    """The names of operations, keyed by rank and number. `has_point_to_point` is true if one is between two ranks."""

    by_number: Mapping[tuple[RankId, int], str]
    has_point_to_point: bool


def _find_operations(works: Sequence[RankWork]) -> _Operations:
    by_number: dict[tuple[RankId, int], str] = {}
    is_mixed = False
    for rank, _, (line, *_) in works:
        if line.kind == "operation":
            is_mixed |= not is_collective(line.operation)
            if line.timed_out is not None and rank is not None:
                by_number[rank, line.timed_out] = line.operation
    return _Operations(by_number, is_mixed)


def _compare_group(
    name: str,
    ranks: Mapping[RankId, _Standing],
    operations: _Operations,
    waiting: set[RankId],
    world_size: int | None,
) -> WorkFinding | None:
    timed = [standing for standing in ranks.values() if standing.timed_out is not None]
    if not timed:
        return None
    (number, _), *_ = Counter(standing.timed_out for standing in timed).most_common(1)
    assert number is not None
    at_number = [standing for standing in timed if standing.timed_out == number]
    operation_names = {operations.by_number.get((standing.id, number), "") for standing in at_number} - {""}
    operation = f"{min(operation_names)} #{number:,}" if len(operation_names) == 1 else f"#{number:,}"
    behind = [standing for standing in ranks.values() if standing.enqueued < number]
    ids = [standing.id for standing in at_number]
    text = f"in {words.printable(name)}, {words.name_ranks(ids)} timed out in {operation}"
    if not behind:
        more = (
            f"; {words.count(len(ranks))} seen, and all have enqueued it: no rank is behind" if len(ranks) > 1 else ""
        )
        return WorkFinding(text + more, tuple(ids))
    late = [standing.id for standing in behind]
    numbers = words.fold(standing.enqueued for standing in behind if standing.enqueued >= 0)
    counts = f"only {numbers}" if numbers else "nothing"
    has = "has" if len(late) == 1 else "have"
    text += f"; {words.name_ranks(late)} {has} enqueued {counts}"
    doubt = _find_doubt(at_number, behind, len(ranks), waiting, world_size)
    if not all(map(is_collective, operation_names or {""})) or operations.has_point_to_point:
        doubt = (
            "point-to-point operations are counted separately"
            if operation_names
            else "the operation is not in the logs"
        )
    if doubt:
        return WorkFinding(f"{text}; the numbers show no rank to check first: {doubt}", (*late, *ids))
    why = f"it has not joined {operation} of {words.printable(name)}"
    why += f": it had enqueued {counts} when {words.count(len(ids))} timed out in it"
    since = min((standing.timed_out_at for standing in at_number if standing.timed_out_at), default=None)
    return WorkFinding(text, (*late, *ids), tuple(late), why, since)


def _find_doubt(
    timed: Sequence[_Standing],
    behind: Sequence[_Standing],
    seen: int,
    waiting: set[RankId],
    world_size: int | None,
) -> str:
    """Return the reason why the ranks that are behind are not checked first; "" if there is no doubt."""
    if any(standing.id in waiting for standing in behind):
        return "a rank that is behind timed out itself, so it waits, too"
    if seen < _FEWEST_SEEN and seen != world_size:
        return f"only {words.count(seen)} seen"
    if len(behind) >= len(timed):
        return "at least as many ranks are behind as timed out"
    if not all(_is_recent(standing, timed) for standing in behind):
        return "the last number of a rank that is behind is older than the timeout"
    return ""


def _is_recent(standing: _Standing, timed: Sequence[_Standing]) -> bool:
    """True if the rank wrote its number as an answer to a timeout of another rank, or not before the first timeout."""
    moment = standing.written_at
    others = [other.timed_out_at for other in timed]
    if standing.is_answer or moment is None:
        return standing.is_answer
    first = min((other.seconds for other in others if other and other.clock == moment.clock), default=None)
    return first is not None and moment.seconds >= first - _CLOCK_SECONDS


# --- reports that compare the ranks themselves -----------------------------------------------------------------------


def _compare_desync_reports(works: Sequence[RankWork], groups: set[str]) -> Iterator[WorkFinding]:
    """Yield the ranks that torch's desync reports call late (TORCH_NCCL_DESYNC_DEBUG=1)."""
    lagging, numbers = set[int](), set[int]()
    joined = {rank.rank for rank, _, (line, *_) in works if rank and rank.rank is not None and line.kind == "operation"}
    for _, _, (line, *_) in works:
        if line.kind == "lagging":
            lagging.update(line.ranks)
            numbers.update([line.timed_out] if line.timed_out is not None else [])
        elif line.kind == "started":
            joined.update(line.ranks)
    if not lagging:
        return
    what = f"collective #{min(numbers):,}" if numbers else "any collective"
    ids = _find_ids(lagging, works)
    text = f"by torch's desync report, {words.name_ranks(ids)} did not join {what}"
    if groups - {DEFAULT_GROUP} or not _is_of_job(works) or len(lagging) >= len(joined - lagging):
        yield WorkFinding(f"{text}; no rank to check first: these may be numbers within a group", ids)
        return
    yield WorkFinding(text, ids, ids, f"by torch's desync report it did not join {what}")


def _compare_running_collectives(works: Sequence[RankWork]) -> Iterator[WorkFinding]:
    """Yield the different collectives that ProcessGroupWrapper logs for two ranks (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    runs: dict[int, tuple[int, str]] = {}
    for _, _, (line, *_) in works:
        if line.kind == "running":
            runs[line.ranks[0]] = -1 if line.timed_out is None else line.timed_out, line.operation
    by_call: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, call in sorted(runs.items()):
        by_call[call].append(rank)
    if len(by_call) < 2:
        return
    ordered = sorted(by_call.items(), key=lambda item: (len(item[1]), item[1]))
    parts = [
        f"{words.name_ranks(_find_ids(ranks, works))} {'runs' if len(ranks) == 1 else 'run'} {operation}"
        + (f" #{number:,}" if number >= 0 else "")
        for (number, operation), ranks in ordered[:_SHOWN]
    ]
    few, most = ordered[0][1], ordered[-1][1]
    ids = _find_ids(few, works)
    is_clear = len(by_call) == 2 and len(few) == 1 < len(most) and _is_of_job(works)
    text = f"ranks call different collectives: {', '.join(parts)}"
    yield WorkFinding(text, ids, ids if is_clear else (), f"it runs another collective: {', '.join(parts)}")


def _compare_barriers(works: Sequence[RankWork]) -> Iterator[WorkFinding]:
    """Yield the tasks that did not reach a barrier of JAX. The log may list only some of them."""
    sizes = [line.ranks for _, _, (line, *_) in works if line.kind == "barrier"]
    tasks = {line.ranks[0] for _, _, (line, *_) in works if line.kind == "task"}
    if not sizes or not tasks:
        return
    reached, size = sizes[-1]
    ids = _find_ids(tasks, works)
    text = f"{reached:,} of {size:,} tasks reached a barrier of JAX; {words.name_ranks(ids)} did not"
    is_clear = len(tasks) == size - reached < reached
    yield WorkFinding(text, ids, ids if is_clear else (), f"it did not reach a barrier that {reached:,} tasks reached")


def _is_of_job(works: Sequence[RankWork]) -> bool:
    """True if every rank's own lines contain its number in the job. Then the numbers are not those within a group."""
    own_lines = [
        (rank.rank, line.ranks[0])
        for rank, _, (line, *_) in works
        if line.kind == "operation" and line.ranks and rank is not None and rank.rank is not None
    ]
    return all(rank == told for rank, told in own_lines)


def _find_ids(ranks: Iterable[int], works: Sequence[RankWork]) -> tuple[RankId, ...]:
    known = {rank.rank: rank for rank, _, _ in works if rank is not None}
    return tuple(known.get(rank, RankId(rank=rank)) for rank in sorted(ranks))
