"""Reports in which the ranks compare themselves: desync reports, barriers, and the creation of groups. Pure."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.formats.log_times import Moment
from hangwatch.limits import MOST_RANKS
from hangwatch.logs.rank_log import Work
from hangwatch.logs.work_lines import DEFAULT_GROUP, WorkLine
from hangwatch.model import RankId, list_by_key

FEWEST_SEEN = 3
_GAVE_NO_ID = "did not give the others the id of their communicator of NCCL"  # absent_ranks.toml


class RankWork(NamedTuple):
    """The sequence numbers in a log and the rank that wrote them; None if unknown. `source` is the name of the log."""

    id: RankId | None
    source: str
    work: Work


class WorkFinding(NamedTuple):
    """A sentence about the numbers in logs. `behind` are the ranks to check first, `why` is the reason.

    `since` is the time of the timeout. `source` is the log of a rank that is behind. `all_joined` is true if none is.
    `is_absent` is true if the lines of one rank are missing, and it is `ranks`.
    """

    text: str
    ranks: tuple[RankId, ...]
    behind: tuple[RankId, ...] = ()
    why: str = ""
    since: Moment | None = None
    source: str = "its log"
    all_joined: bool = False
    is_absent: bool = False


def compare_reports(works: Sequence[RankWork], groups: set[str], ranks: Collection[int]) -> Iterator[WorkFinding]:
    """Yield what `ranks`, those of the logs, report of each other. `groups` are the job's process groups."""
    yield from _compare_desync_reports(works, groups)
    yield from _compare_barriers(works, ranks)
    yield from _compare_setups(works)


def _compare_desync_reports(works: Sequence[RankWork], groups: set[str]) -> Iterator[WorkFinding]:
    """Yield the ranks that torch's desync reports call late (TORCH_NCCL_DESYNC_DEBUG=1)."""
    reported = list_by_key((line.kind, line) for _, _, (line, *_) in works if line.kind in ("lagging", "started"))
    lagging = {rank for line in reported.get("lagging", ()) for rank in line.ranks}
    numbers = {line.timed_out for line in reported.get("lagging", ()) if line.timed_out is not None}
    joined = {rank.rank for rank, _, (line, *_) in works if rank and rank.rank is not None and line.kind == "operation"}
    joined |= {rank for line in reported.get("started", ()) for rank in line.ranks}
    if not lagging:
        return
    what = f"collective #{min(numbers):,}" if numbers else "any collective"
    ids = _find_ids(lagging, works)
    text = f"by torch's desync report, {words.name_ranks(ids)} did not join {what}"
    if groups - {DEFAULT_GROUP} or not is_of_job(works) or len(lagging) >= len(joined - lagging):
        yield WorkFinding(f"{text}; no rank to check first: these may be numbers within a group", ids)
        return
    yield WorkFinding(text, ids, ids, f"by torch's desync report it did not join {what}")


def _compare_barriers(works: Sequence[RankWork], ranks: Collection[int]) -> Iterator[WorkFinding]:
    """Yield the ranks that did not reach PyTorch's monitored barrier, and the tasks of JAX that failed others.

    These did not reach a barrier, or sent no heartbeats. The log may list only some of them. Two ranks of which it says
    different things may wait for each other.
    """
    absent = list_by_key(
        ((line.operation, rank if is_within_group(rank, line) else None), number)
        for rank, _, (line, *_) in works
        if line.kind == "absent" and (line.operation != _GAVE_NO_ID or line.writer in (None, *ranks))
        for number in ({*ranks} - {*line.ranks} if line.completed else line.ranks)
    )
    texts = list_by_key({(line.operation, line.name) for _, _, (line, *_) in works if line.kind == "absent"})
    waiting = {rank.rank for rank, _, (line, *_) in works if rank and line.writer is not None}
    headings = [line for _, _, (line, *_) in works if line.kind == "barrier"]
    tasks = {line.ranks[0] for _, _, (line, *_) in works if line.kind == "task"}
    absent |= {(line.operation, None): list(tasks) for line in headings if tasks and line.operation}
    for (why, member), numbers in absent.items():
        if member is not None:
            text = f"number {words.fold(numbers)} in a process group of {words.name_ranks([member])} {why}"
            yield WorkFinding(text, (member,))
        elif ids := _find_ids({*numbers} - waiting, works):
            text = f"{words.name_ranks(ids)} {why}"
            is_clear = len(ids) < FEWEST_SEEN and (len(ids) == 1 or len(texts.get(why, ())) < 2)
            yield WorkFinding(text, ids, ids if is_clear else (), f"it {why}")
    if not tasks or not headings or not all(line.ranks for line in headings):
        return
    reached, size = headings[-1].ranks
    ids = _find_ids(tasks, works)
    text = f"{reached:,} of {size:,} tasks reached a barrier of JAX; {words.name_ranks(ids)} did not"
    is_clear = len(tasks) == size - reached < reached
    yield WorkFinding(text, ids, ids if is_clear else (), f"it did not reach a barrier that {reached:,} tasks reached")


def _compare_setups(works: Sequence[RankWork]) -> Iterator[WorkFinding]:
    """Yield the ranks that have not begun to create a communicator or process group, or alone have not finished it."""
    begun: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    ended: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    for _, _, (line, *_) in works:
        if line.kind == "setup" and line.enqueued is not None:
            alike = (ended if line.completed else begun)[line.operation, line.group, line.enqueued]
            alike.update(line.ranks or range(min(line.enqueued, MOST_RANKS)))
    largest = max((size for *_, size in begun), default=0)
    for (what, name, size), starting in begun.items():
        done = ended[what, name, size]
        ranks = starting | done
        if size < largest or len(done) >= min(size, MOST_RANKS):
            continue
        absent, open_ranks = {*range(min(size, MOST_RANKS))} - ranks, ranks - done
        text = f"{words.count(len(ranks))} of {size:,} began to create {what}, {len(done):,} finished"
        late = absent if 0 < len(absent) * 3 <= len(ranks) else open_ranks if len(open_ranks) * 3 <= len(done) else ()
        ids = _find_ids(late, works)
        text += f"; {words.name_ranks(ids)} did not" if ids else ": check the network between the nodes"
        yield WorkFinding(text, ids, ids, f"it did not create {what} that {len(ranks):,} ranks began")


def is_of_job(works: Sequence[RankWork]) -> bool:
    """True if every rank's own lines contain its number in the job. Then the numbers are not those within a group."""
    return not any(is_within_group(rank, line) for rank, _, (line, *_) in works)


def is_within_group(rank: RankId | None, line: WorkLine) -> bool:
    """True if the line gives another number than its rank to the process that wrote it."""
    return line.writer is not None and rank is not None and rank.rank not in (None, line.writer)


def _find_ids(ranks: Iterable[int], works: Sequence[RankWork]) -> tuple[RankId, ...]:
    known = {rank.rank: rank for rank, _, _ in works if rank is not None}
    return tuple(known.get(rank, RankId(rank=rank)) for rank in sorted(ranks))
