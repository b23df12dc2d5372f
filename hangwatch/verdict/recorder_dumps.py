"""Pure: flight recorders that torch dumped itself, at one moment, to a verdict beside their stacks or without any.

The rules are those of `wait_graph`. A dump may be minutes older or newer than the stacks, so a rank is named by it with
medium confidence at most. A rank without a stack is checked first at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from hangwatch import words
from hangwatch.collectives.rank_records import recorded_once
from hangwatch.model import Confidence, Evidence, Fault, Group, Grouping, Member, ProcessDump, RankDump, RankId, Verdict
from hangwatch.model.flight_records import RankRecords
from hangwatch.verdict.scene import stance_of
from hangwatch.verdict.sequence_rules import answer_of
from hangwatch.verdict.wording import sequence_numbers

Records = Mapping[int, Sequence[RankRecords]]
"""The recorders of ranks, by global rank."""

_NO_STACK = Fault(subject="rank", reason="NoStack", detail="only a dump of its flight recorder is there")
_BY_NUMBER = frozenset({"NotCome", "Circle", "EverybodyCame", "Mismatch", "Contradiction"})
_ONE_MOMENT = "That is one moment, the one at which torch's dumps were written."
_ASYNCHRONOUS = (
    "A rank may have an operation open and be elsewhere: whether all of them wait, only their stacks can say."
)
_STACKS = "Where a rank stands only its stack says: `hangwatch dump`, or py-spy"


def without_stacks(ranks: Iterable[int], stacked: Iterable[RankDump]) -> Iterator[RankDump]:
    """A place for each of these ranks that has no stack. None where stacks bear no rank: they may be the same ones."""
    known = {dump.id.rank for dump in stacked}
    for rank in sorted(set(ranks) - known) if None not in known else ():
        dump = ProcessDump(taken_monotonic_seconds=0.0, fault=_NO_STACK)
        yield RankDump(id=RankId(rank=rank), rounds=(dump,))


def with_records(grouping: Grouping, records: Records, opened_before_unix_seconds: float) -> Grouping:
    """A grouping whose ranks hold what these recorders say, unless they were read in several rounds."""

    def recorded(member: Member) -> Member:
        found = () if member.recorded or member.id.rank is None else records.get(member.id.rank, ())
        return replace(member, recorded=recorded_once(found, opened_before_unix_seconds)) if found else member

    groups = (replace(group, members=tuple(map(recorded, group.members))) for group in grouping.groups)
    return replace(grouping, groups=tuple(groups))


def qualify(verdict: Verdict, grouping: Grouping, records: Records) -> Verdict:
    """The verdict on a grouping `with_records`, with what follows from their being of one moment.

    Where they decide nothing, what was open then in any of `records` is evidence, whatever the time of its file says.
    """
    has_sequence = any(one.kind == "sequence" for one in verdict.evidence)
    if verdict.kind in _BY_NUMBER and has_sequence:
        sure = Confidence.MEDIUM if verdict.confidence is Confidence.HIGH else verdict.confidence
        unseen = verdict.kind == "Circle" and any(group.fault == _NO_STACK for group in grouping.groups)
        said = f"{_ASYNCHRONOUS} {_ONE_MOMENT}" if unseen else _ONE_MOMENT
        return replace(verdict, message=f"{verdict.message} {said}", confidence=sure)
    evidence = verdict.evidence if has_sequence else (*verdict.evidence, *_open_then(grouping.world_size, records))
    if any(group.fault != _NO_STACK for group in grouping.groups):
        return replace(verdict, evidence=evidence)
    told = [one.message for one in evidence if one.kind == "sequence"]
    evidence = tuple(one for one in evidence if one.kind == "sequence")
    said = f"{'; '.join(told)}" if told else "they show no open collective that can be compared"
    message = f"By dumps of the flight recorders of {words.count(len(records))} nobody can be pointed at: {said}. "
    return Verdict(kind="RecordsOnly", message=f"{message}{_ONE_MOMENT} {_STACKS}.", evidence=evidence)


def _open_then(world_size: int | None, records: Records) -> tuple[Evidence, ...]:
    """What was open in these dumps, however long."""
    members = tuple(Member(id=RankId(rank=rank)) for rank in sorted(records))
    alone = Grouping(
        groups=(Group(key="", activity="unknown", fault=_NO_STACK, members=members),), world_size=world_size
    )
    every = with_records(alone, records, float("inf"))
    return sequence_numbers.open_then(answer_of(every.members, stance_of(every), world_size))
