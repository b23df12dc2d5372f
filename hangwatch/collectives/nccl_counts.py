"""The numbers of operations that each rank has launched, by NCCL's RAS, and the wait-for graph by these counts. Pure.

NCCL counts on the host the operations that each rank has launched. A launched operation may be complete, so a higher
count alone does not show a wait. The rank with the lowest count of a communicator has not joined if its count is the
same in all answers of NCCL. A count that rises shows nothing. A communicator with a rank that did not respond shows
nothing either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec.structs import replace

from hangwatch import words
from hangwatch.collectives import wait_graph
from hangwatch.collectives.wait_graph import Stance, WaitGraph
from hangwatch.formats.nccl_ras_status import COLLECTIVES, Communicator, RasRank, RasStatus
from hangwatch.model import (
    EnqueuedOperation,
    Evidence,
    GroupRecords,
    LaunchCount,
    Member,
    NcclRas,
    ProcessId,
    RankId,
    RecorderState,
)

_MOST_LAUNCHED = 8  # counts of one rank
_OTHER_NODES_SHOWN = 4
_SHOWN = 4
_MOST_IDS = 64

Names = Mapping[tuple[str, int], ProcessId]
"""The process of each rank on a node, keyed by its address and its pid in its own PID namespace."""


def counts_by_rank(
    answers: Sequence[tuple[float, RasStatus]], names: Names, ranks: Sequence[ProcessId], world_size: int | None
) -> dict[ProcessId, NcclRas]:
    """Return the numbers of operations that each rank of one node has launched. Ranks in no communicator are left out.

    `answers` are the answers of NCCL, each with its time in seconds. The newest comes last.
    """
    unchanged = _find_unchanged([status for _, status in answers])
    counts: dict[ProcessId, list[LaunchCount]] = defaultdict(list)
    even: dict[ProcessId, int] = defaultdict(int)
    communicators: dict[ProcessId, int] = defaultdict(int)
    for communicator in answers[-1][1].communicators:
        is_unchanged = communicator.name in unchanged
        by_process = _find_ranks_by_process(communicator, names, ranks, world_size)
        for process in by_process:
            communicators[process] += 1
            even[process] += is_unchanged and _is_even(communicator)
        for process, launched in _find_uneven_counts(communicator, by_process, names) if is_unchanged else ():
            counts[process].append(launched)
    return {
        process: NcclRas(
            version=answers[-1][1].version,
            answers=len(answers),
            seconds=answers[-1][0] - answers[0][0],
            communicators=communicators[process],
            even=even[process],
            launched=tuple(sorted(counts[process], key=lambda launched: launched.count is not None)[:_MOST_LAUNCHED]),
        )
        for process in communicators
    }


def _find_unchanged(statuses: Sequence[RasStatus]) -> set[str]:
    """Return the names of the running communicators that are the same in every answer."""
    first, *others = ({one.name: one for one in status.communicators} for status in statuses)
    return {name for name, one in first.items() if one.is_running and all(other.get(name) == one for other in others)}


def _find_ranks_by_process(
    communicator: Communicator, names: Names, ranks: Iterable[ProcessId], world_size: int | None
) -> dict[ProcessId, list[RasRank]]:
    """Return the ranks of a communicator for each process of this node.

    A rank that NCCL does not list has launched the counts in `rest`. If a communicator is as large as the job, it
    contains every rank of the job.
    """
    by_process: dict[ProcessId, list[RasRank]] = defaultdict(list)
    for rank in (*communicator.ranks, *communicator.unreached):
        if (process := names.get((rank.host, rank.pid))) is not None:
            by_process[process].append(rank)
    rest, size = communicator.rest, communicator.size
    if rest and size == world_size and len(communicator.ranks) < size:
        operations = [name for name, _ in rest]
        counts = tuple((name, count) for name, count in rest if operations.count(name) == 1)
        for process in ranks:
            if process not in by_process:
                by_process[process] = [RasRank(rank=size, counts=counts)]
    return by_process


def _is_even(communicator: Communicator) -> bool:
    is_whole = communicator.is_listed and not communicator.unreached
    return is_whole and len({rank.counts for rank in communicator.ranks}) == 1


def _find_uneven_counts(
    communicator: Communicator, by_process: Mapping[ProcessId, Sequence[RasRank]], names: Names
) -> Iterator[tuple[ProcessId, LaunchCount]]:
    """Yield each process with its count of an operation that the ranks have launched a different number of times.

    The count is None for a process that NCCL does not reach.
    """
    unreached = communicator.unreached
    lost = {process for process, ranks in by_process.items() if any(rank in unreached for rank in ranks)}
    for process in lost:
        yield process, _make_launch_count(communicator, "", None, [0], _describe_other_nodes(unreached, names))
    for operation in COLLECTIVES:
        by_rank = {rank: count for rank in communicator.ranks for name, count in rank.counts if name == operation}
        every = [*by_rank.values(), *(count for name, count in communicator.rest if name == operation)]
        if len(set(every)) < 2:
            continue
        late = [rank for rank, count in by_rank.items() if count == min(every)]
        on_other_nodes = _describe_other_nodes((*unreached, *late), names)
        for process, ranks in by_process.items():
            counts = [count for rank in ranks for name, count in rank.counts if name == operation]
            if counts and process not in lost:
                yield process, _make_launch_count(communicator, operation, min(counts), every, on_other_nodes)


def _make_launch_count(
    communicator: Communicator,
    operation: str,
    count: int | None,
    every: Sequence[int],
    on_other_nodes: tuple[str, ...],
) -> LaunchCount:
    return LaunchCount(
        communicator=communicator.name.partition("/")[0],
        size=communicator.size,
        operation=operation,
        count=count,
        lowest=min(every),
        highest=max(every),
        is_whole=not communicator.unreached and (communicator.is_listed or bool(communicator.rest)),
        elsewhere=on_other_nodes,
    )


def _describe_other_nodes(ranks: Iterable[RasRank], names: Names) -> tuple[str, ...]:
    """Return descriptions of the ranks that are processes of other nodes, at most four."""
    texts = (
        f"its rank {rank.rank} (process {rank.pid} at {rank.host})"
        for rank in ranks
        if rank.host and (rank.host, rank.pid) not in names
    )
    return tuple(islice(texts, _OTHER_NODES_SHOWN))


# --- the wait-for graph by counts -------------------------------------------------------------------------------------


def build(
    members: Sequence[Member],
    stance: Callable[[Member], Stance],
    world_size: int | None,
    may_wait: Callable[[Member], bool],
) -> WaitGraph:
    """Return the wait-for graph by NCCL's counts.

    Only ranks for which `may_wait` is true wait for ranks with a lower count. `joined` is empty, because equal counts
    do not show that a rank has joined.
    """
    recorded = [_convert_to_records(member, is_open=may_wait(member)) for member in members]
    return wait_graph.build(recorded, stance, world_size)._replace(joined=frozenset())


def is_lost(member: Member) -> bool:
    """True if NCCL cannot reach the rank in one of its communicators."""
    return any(launched.count is None for launched in _get_launch_counts(member))


def is_ahead(member: Member) -> bool:
    """True if the rank has launched more operations than another rank of a communicator. It may wait for that rank."""
    return any(
        launched.count is not None and launched.count > launched.lowest for launched in _get_launch_counts(member)
    )


def is_even(member: Member) -> bool:
    """True if in each communicator of the rank, all ranks have launched the same number of operations."""
    return (
        member.recorder.nccl_ras is not None
        and 0 < member.recorder.nccl_ras.communicators == member.recorder.nccl_ras.even
    )


def _get_launch_counts(member: Member) -> tuple[LaunchCount, ...]:
    return member.recorder.nccl_ras.launched if member.recorder.nccl_ras is not None else ()


def _convert_to_records(member: Member, *, is_open: bool) -> Member:
    """Return the member with its NCCL counts in the form of flight recorder records.

    With `is_open`, operations that other ranks have not launched are open. A communicator with a rank that did not
    respond is left out, because the lowest count is then unknown.
    """
    seconds = member.recorder.nccl_ras.seconds if member.recorder.nccl_ras else 0.0
    groups = tuple(
        GroupRecords(
            library="nccl",
            name=f"{launched.communicator} {launched.operation}",
            description=f"communicator {launched.communicator}",
            number=launched.count,
            operations=(_make_open_operation(launched, seconds),)
            if is_open and launched.count > launched.lowest
            else (),
        )
        for launched in _get_launch_counts(member)
        if launched.count is not None and launched.is_whole
    )
    return replace(
        member,
        recorder=replace(
            member.recorder,
            libraries=(RecorderState(library="nccl", groups=groups),) if member.recorder.nccl_ras else (),
        ),
    )


def _make_open_operation(launched: LaunchCount, seconds: float) -> EnqueuedOperation:
    """Return the first operation that another rank has not launched, as an open operation."""
    return EnqueuedOperation(
        number=launched.lowest + 1,
        operation=launched.operation,
        order=0,
        created_unix_seconds=0.0,
        open_seconds=seconds,
        stays_open=True,
    )


# --- evidence -------------------------------------------------------------------------------------------------------


def evidence(members: Iterable[Member]) -> tuple[Evidence, ...]:
    """Return one line of evidence for each communicator with different counts, or one line if all counts are equal."""
    answers = [(member, member.recorder.nccl_ras) for member in members if member.recorder.nccl_ras is not None]
    uneven: dict[tuple[str, str], list[tuple[RankId, LaunchCount]]] = defaultdict(list)
    for member, ras in answers:
        for launched in ras.launched:
            uneven[launched.communicator, launched.operation].append((member.id, launched))
    if uneven:
        shown = sorted(uneven.items(), key=lambda item: (item[0][1] != "", item[0]))[:_SHOWN]
        return tuple(
            _evidence(answers[0][1], [rank for rank, _ in counts], _describe_counts(counts)) for _, counts in shown
        )
    if answers and all(is_even(member) for member, _ in answers):
        text = "all ranks of each communicator have launched the same number of operations"
        return (_evidence(answers[0][1], [member.id for member, _ in answers], text),)
    return ()


def _evidence(ras: NcclRas, ids: Sequence[RankId], text: str) -> Evidence:
    seconds = words.duration(round(ras.seconds) or ras.seconds)
    message = f"NCCL {ras.version} (RAS), unchanged in {ras.answers} answers over {seconds}: {text}"
    return Evidence(kind="nccl_ras", message=message, ranks=tuple(ids[:_MOST_IDS]))


def _describe_counts(counts: Sequence[tuple[RankId, LaunchCount]]) -> str:
    """Return a text on the counts of ranks in one communicator, the lowest count first.

    Ranks of other nodes are added if they are behind or not reached.
    """
    first = counts[0][1]
    by_count: dict[int | None, list[RankId]] = defaultdict(list)
    for rank, launched in counts:
        by_count[launched.count].append(rank)
    shown = sorted(by_count.items(), key=lambda item: (item[0] is not None, item[0] or 0))[:_SHOWN]
    parts = [_describe_count(count, ids, first.operation) for count, ids in shown]
    if first.count is not None and min(count for count in by_count if count is not None) > first.lowest:
        parts.append(f"others {first.lowest:,}" + (f": {words.join_words(first.elsewhere)}" if first.elsewhere else ""))
    elif first.elsewhere:
        parts.append(f"also behind or not reached: {words.join_words(first.elsewhere)}")
    return f"communicator {first.communicator} with {words.count(first.size)}: {'; '.join(parts)}"


def _describe_count(count: int | None, ids: Sequence[RankId], operation: str) -> str:
    are_numbered = all(rank.rank is not None for rank in ids)
    ranks = words.name_ranks([RankId(rank=rank.rank) for rank in ids] if are_numbered else ids)
    if count is None:
        return f"{ranks} {'does' if len(ids) == 1 else 'do'} not respond"
    operations = "collectives" if operation == "collective" else operation
    return f"{ranks} {'has' if len(ids) == 1 else 'have'} launched {count:,} {operations}"
