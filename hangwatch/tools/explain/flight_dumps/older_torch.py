"""Operations in the dumps of torch 2.2 to 2.4, in the form of later versions. Pure."""

import itertools
import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from hangwatch.collectives.process_groups import DEFAULT_GROUP
from hangwatch.model.flight_records import FlightRecord


def modernize_row(row: Mapping[object, object], number: int) -> Mapping[object, object]:
    """Return an operation of torch 2.2, which wrote only a list of operations, or 2.3 in the form of later versions.

    Raises ValueError if it is of another group than that of all ranks: groups with the same number may have different
    ranks.
    """
    if row.get("pg_id") != 0 or re.match(r"\w+:(?:send|recv)", str(row.get("profiling_name"))):
        raise ValueError("is of torch 2.2 or 2.3, and lists operations of other groups than that of all ranks")
    sequence, created = row.get("seq_id"), row.get("time_created_us")
    return {
        "record_id": number,
        **row,
        "process_group": DEFAULT_GROUP,
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "retired": row.get("retired", row.get("state") == "completed"),
        "time_created_ns": created * 1000 if isinstance(created, int) else row.get("time_created_ns"),
    }


def count_batches(records: Sequence[FlightRecord]) -> list[FlightRecord]:
    """Return the records with all batches of sends and receives: torch 2.4 counted them as collectives.

    The ranks of a pipeline have different numbers of batches, so the collectives of such a group are left out.
    """
    batches = {
        (part.group_id, part.collective_seq)
        for part, closing in itertools.pairwise(records)
        if part.is_p2p and not closing.is_p2p and closing.operation == "nccl:coalesced"
        if (part.group_id, part.collective_seq) == (closing.group_id, closing.collective_seq)
    }
    mixed = {group_id for group_id, _ in batches}
    counted = (
        replace(record, is_p2p=True, p2p_seq=record.collective_seq)
        if (record.group_id, record.collective_seq) in batches
        else record
        for record in records
    )
    return [record for record in counted if record.is_p2p or record.group_id not in mixed]
