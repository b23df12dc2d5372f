"""Search for ranks that enqueued nothing after the operation in which all ranks are stuck, by dumps of one timeout.

Pure. torch records an operation, then launches it, then counts it in its process group (pg_status). If a rank stopped
right after an operation, it either waits for its GPU, as a healthy rank that reads a result does, or is inside the
launch. Only inside the launch its count is lower than its newest record.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.model import CheckFirst, Evidence, RankId, Supplement
from hangwatch.model.flight_records import FlightRecord, RankRecords

_FEWEST_OTHERS = 2
_SETTLE = "its stack with the frames below Python: `hangwatch dump --native --pid N`, or `py-spy dump --native`"


class _Stuck(NamedTuple):
    """The oldest open collective of a rank, and its last enqueued operation.

    `is_uncounted` is true if torch has not counted the collective.
    """

    record: FlightRecord
    last: FlightRecord
    is_uncounted: bool


def supplement(recorded: Mapping[int, Sequence[RankRecords]]) -> Supplement:
    """Return evidence on the ranks that stopped after an operation. Ranks inside its launch are checked first."""
    by_operation: dict[tuple[str, int, str], dict[int, _Stuck]] = {}
    for rank, recorders in recorded.items():
        for stuck in map(_read_stuck, recorders):
            if stuck is not None:
                operation = stuck.record.group_name, stuck.record.collective_seq, stuck.record.operation
                by_operation.setdefault(operation, {})[rank] = stuck
    evidence, check_first = [], []
    for ranks in by_operation.values():
        # If a rank is missing here, it has not joined or is in another operation, which explains the hang.
        if len(ranks) == len(recorded):
            for fact, hints in _describe(ranks):
                evidence.append(fact)
                check_first += hints
    text = " ".join(words.sentence(f"{suspect.why}.") for suspect in check_first[:1])
    return Supplement(evidence=tuple(evidence), sentence=text, check_first=tuple(check_first))


def _read_stuck(recorder: RankRecords) -> _Stuck | None:
    opened = [record for record in recorder.records if record.counts_as_open]
    if not opened or not recorder.records or recorder.library != "nccl" or opened[0].is_p2p:
        return None
    first, last = opened[0], max(recorder.records, key=lambda record: record.id)
    of_group = [record for record in recorder.records if record.group_id == first.group_id]
    counts = [status.last_enqueued for status in recorder.groups if status.group_id == first.group_id]
    is_mixed = any(record.is_p2p or record.is_coalesced_part for record in of_group)
    return _Stuck(
        record=first, last=last, is_uncounted=not is_mixed and any(count < first.collective_seq for count in counts)
    )


def _describe(ranks: Mapping[int, _Stuck]) -> Iterator[tuple[Evidence, list[CheckFirst]]]:
    """Yield evidence on the ranks that enqueued nothing after the operation, if more other ranks did.

    Each piece of evidence comes with the ranks to check first.
    """
    stopped = {rank: stuck for rank, stuck in ranks.items() if stuck.last is stuck.record}
    others = [rank for rank, stuck in ranks.items() if stuck.last is not stuck.record]
    if not stopped or len(others) < max(_FEWEST_OTHERS, len(stopped) + 1):
        return
    for is_uncounted in (True, False):
        ids = tuple(RankId(rank=rank) for rank, stuck in sorted(stopped.items()) if stuck.is_uncounted is is_uncounted)
        if not ids:
            continue
        record = stopped[ids[0].rank or 0].record
        what = f"{words.printable(record.operation.rpartition(':')[2])} {record.collective_seq:,}"
        after = f"{words.name_ranks(ids)} enqueued nothing after {what}, {words.count(len(others), 'other rank')} did"
        in_launch = "is inside its launch, which torch has not counted yet"
        where = in_launch if is_uncounted else "waits for its GPU, or is inside the launch"
        text = f"{after}: the CPU stopped right after this operation: {'it' if len(ids) == 1 else 'each'} {where}"
        hints = [CheckFirst(rank=rank.rank, why=text, settle=_SETTLE) for rank in ids] if is_uncounted else []
        yield Evidence(kind="sequence", message=text, ranks=ids), hints
