"""Flight recorders that torch dumped by itself, for ranks with or without a stack. Pure.

Such a dump shows one moment, which may be minutes before or after the stacks. So a rank that is named by a dump has
medium confidence at most. A rank without a stack is never named, only checked first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from hangwatch.collectives.fronts import find_ends
from hangwatch.collectives.rank_records import read_single_round
from hangwatch.model import Confidence, Fault, Group, Grouping, Member, ProcessDump, RankDump, RankId
from hangwatch.model.flight_records import RankRecords
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.scene import keep_groups, stance_of
from hangwatch.verdict.sequence_rules import Answer, decide_by_all_counts
from hangwatch.verdict.wording import guidance, sequence_numbers

Records = Mapping[int, Sequence[RankRecords]]
"""The flight recorders of each rank, keyed by global rank."""

_NO_STACK = Fault(subject="rank", reason="NoStack", detail="it has a dump of its flight recorder but no stack")
_BY_NUMBER = frozenset({"NotJoined", "Cycle", "AllJoined", "Mismatch", "Contradiction"})


def without_stacks(records: Records, stacked: Iterable[RankDump]) -> Iterator[RankDump]:
    """Yield a dump without a stack for each rank in `records` that is not in `stacked`.

    Yield nothing if a dump in `stacked` has no rank number, because it may be the dump of any rank. Without any stacks,
    also yield one for each rank without a flight recorder for which the others wait.
    """
    known = {dump.id.rank for dump in stacked}
    ranks = set(records) | ({end.rank for end in find_ends(records)} if not known else set())
    for rank in sorted(ranks - known) if None not in known else ():
        dump = ProcessDump(taken_monotonic_seconds=0.0, fault=_NO_STACK)
        yield RankDump(id=RankId(rank=rank), rounds=(dump,))


def with_records(grouping: Grouping, records: Records, opened_before_unix_seconds: float) -> Grouping:
    """Return the grouping with the flight recorders in `records` added to its ranks.

    A rank that already has a flight recorder from the capture keeps it. Only operations enqueued before
    `opened_before_unix_seconds` count as open.
    """

    def recorded(member: Member) -> Member:
        rank_records = () if member.recorder.libraries or member.id.rank is None else records.get(member.id.rank, ())
        return (
            replace(
                member,
                recorder=replace(
                    member.recorder, libraries=read_single_round(rank_records, opened_before_unix_seconds)
                ),
            )
            if rank_records
            else member
        )

    groups = (replace(group, members=tuple(map(recorded, group.members))) for group in grouping.groups)
    return replace(grouping, groups=tuple(groups))


def qualify(finding: Finding, records: Records) -> Finding:
    """Return the finding with lower confidence and a caveat, because the flight recorders show only one moment.

    The finding must be about a grouping that `with_records` returned. If the sequence numbers decide nothing, the
    operations that were open in `records` are added as evidence, even if the dump is old.
    """
    groups, is_by_number = finding.scene.grouping.groups, bool(finding.answer.graph.pending)
    is_stacked = any(group.fault != _NO_STACK for group in groups)
    if finding.kind != "Mismatch" and not is_stacked and (by_fronts := _find_ends(finding, records)):
        return by_fronts
    if finding.kind in _BY_NUMBER and is_by_number:
        confidence = Confidence.MEDIUM if finding.confidence is Confidence.HIGH else finding.confidence
        is_unseen = finding.kind == "Cycle" and any(group.fault == _NO_STACK for group in groups)
        caveat = sequence_numbers.ASYNCHRONOUS if is_unseen else sequence_numbers.ONE_MOMENT
        return finding._replace(confidence=confidence, caveat=caveat)
    if not is_by_number:
        finding = finding._replace(open_then=_decide_on_open_operations(finding.scene.grouping.world_size, records))
    if is_stacked:
        return finding
    return Finding(
        kind="RecordsOnly",
        scene=finding.scene,
        says=sequence_numbers.records_only,
        answer=finding.answer,
        open_then=finding.open_then,
        caveat=sequence_numbers.ONE_MOMENT_WITHOUT_STACKS,
    )


def _find_ends(finding: Finding, records: Records) -> Finding | None:
    """Return the finding on the ranks for which all others wait. None if there are none.

    It does not depend on the times of the files. The ranks are checked first, since dumps show one moment.
    """
    ends = find_ends(records)
    if not ends:
        return None
    ranks = {end.rank for end in ends}
    suspects = tuple(keep_groups(finding.scene.grouping.groups, lambda member: member.id.rank in ranks))
    is_gpu = any(end.kind == "gpu" for end in ends)
    return Finding(
        kind="AllJoined" if is_gpu else "NotJoined",
        scene=finding.scene,
        says=sequence_numbers.ends,
        suspects=suspects,
        settle=guidance.ITS_GPU if is_gpu else sequence_numbers.OWN_CODE,
        answer=finding.answer,
        by_numbers=True,
        caveat=sequence_numbers.ONE_MOMENT,
        ends=ends,
    )


def _decide_on_open_operations(world_size: int | None, records: Records) -> Answer:
    """Return the result of all operations that are open in these dumps, even if they were enqueued just before."""
    members = tuple(Member(id=RankId(rank=rank)) for rank in sorted(records))
    group = Group(key="", activity="unknown", fault=_NO_STACK, members=members)
    every = with_records(Grouping(groups=(group,), world_size=world_size), records, float("inf"))
    return decide_by_all_counts(every.members, stance_of(every), world_size)
