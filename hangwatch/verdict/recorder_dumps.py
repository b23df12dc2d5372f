"""Flight recorders that torch dumped by itself, for ranks with or without a stack. Pure.

Such a dump shows one moment, which may be minutes before or after the stacks. So a rank that is named by a dump has
medium confidence at most. A rank without a stack is never named, only checked first. Dumps of a healthy job show
different moments. So they count only if they may be of one moment, and if all waits in them lead to the same ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from hangwatch.collectives import wait_graph
from hangwatch.collectives.rank_records import read_single_round
from hangwatch.collectives.wait_graph import WaitGraph
from hangwatch.model import Confidence, Fault, Group, Grouping, Member, ProcessDump, RankDump, RankId
from hangwatch.model.flight_records import RankRecords
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.scene import keep_groups

Records = Mapping[int, Sequence[RankRecords]]
"""The flight recorders of each rank, keyed by global rank."""

_NO_STACK = Fault(subject="rank", reason="NoStack", detail="it has a dump of its flight recorder but no stack")
# As GPUs are behind; a dump that was written earlier than the others looks like such a GPU
_TIMES_WAITING = 3


def without_stacks(records: Records, stacked: Iterable[RankDump], world_size: int | None) -> Iterator[RankDump]:
    """Yield a dump without a stack for each rank in `records` that is not in `stacked`.

    Yield nothing if a dump in `stacked` has no rank number, because it may be the dump of any rank. Without any stacks,
    also yield one for each rank without a flight recorder for which the others wait.
    """
    known = {dump.id.rank for dump in stacked}
    ranks = set(records) | (set(_build_graph(records, world_size).unrecorded) if not known else set())
    for rank in sorted(ranks - known) if None not in known else ():
        yield RankDump(id=RankId(rank=rank), rounds=(ProcessDump(taken_monotonic_seconds=0.0, fault=_NO_STACK),))


def _build_graph(records: Records, world_size: int | None) -> WaitGraph:
    """Return the wait-for graph of all operations that are open in these dumps."""
    members = tuple(Member(id=RankId(rank=rank)) for rank in sorted(records))
    group = Group(key="", activity="unknown", fault=_NO_STACK, members=members)
    every = _add_records(Grouping(groups=(group,), world_size=world_size), records, counts_open=True)
    return wait_graph.build(every.members, lambda _member, _thread: "unclear", world_size)


def with_records(grouping: Grouping, records: Records) -> Grouping:
    """Return the grouping with the flight recorders in `records` added to its ranks.

    A rank that already has a flight recorder from the capture keeps it. Open operations count if the dumps do.
    """
    graph = _build_graph(records, grouping.world_size)
    return _add_records(grouping, records, counts_open=graph.is_settled or bool(graph.mismatches))


def _add_records(grouping: Grouping, records: Records, *, counts_open: bool) -> Grouping:
    def add(_: Group, member: Member) -> Member:
        rank_records = () if member.recorder.libraries or member.id.rank is None else records.get(member.id.rank, ())
        libraries = read_single_round(rank_records, counts_open=counts_open)
        return replace(member, recorder=replace(member.recorder, libraries=libraries)) if libraries else member

    return grouping.change_members(add)


def qualify(finding: Finding, records: Records) -> Finding:
    """Return the finding with lower confidence and a caveat, because the flight recorders show only one moment.

    The finding must be about a grouping that `with_records` returned. If the sequence numbers decide nothing, the
    operations that were open in `records` are added as evidence. Ranks without a stack are not named, only checked
    first.
    """
    groups, graph = finding.scene.grouping.groups, finding.answer.graph
    is_stacked = any(group.fault != _NO_STACK for group in groups)
    idle = graph.awaited.keys() - graph.busy if graph.unrecorded else ()  # a rank without a dump may wait for them
    ends = {*graph.programs, *graph.unrecorded, *idle, *(end.rank for end in graph.gpus)}
    if not is_stacked and not graph.mismatches and ends:
        if (_TIMES_WAITING if graph.gpus else 1) * len(ends) > len(graph.waiting - ends):
            return _records_only(finding)
        return finding._replace(
            kind="GpuBehind" if graph.gpus else "NotJoined",
            sentence="" if graph.gpus else "ends",
            suspects=tuple(keep_groups(groups, lambda member: member.id.rank in ends)),
            confidence=Confidence.NONE,
            by_numbers=True,
            caveat="healthy_job_too",
        )
    if finding.by_numbers and graph.pending:
        confidence = Confidence.MEDIUM if finding.confidence is Confidence.HIGH else finding.confidence
        is_unseen = finding.kind == "Cycle" and any(group.fault == _NO_STACK for group in groups)
        return finding._replace(confidence=confidence, caveat="asynchronous" if is_unseen else "one_moment")
    if not graph.pending:
        finding = finding._replace(open_then=_build_graph(records, finding.scene.grouping.world_size))
    return finding if is_stacked else _records_only(finding)


def _records_only(finding: Finding) -> Finding:
    return Finding(
        kind="RecordsOnly",
        scene=finding.scene,
        answer=finding.answer,
        open_then=finding.open_then,
        caveat="no_stacks",
    )
