"""Operations in the dumps of torch 2.4, in the form of later versions. Pure."""

import itertools
from collections.abc import Sequence

from msgspec.structs import replace

from hangwatch.model.flight_records import FlightRecord


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
