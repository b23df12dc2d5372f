"""Test for a capture that needs a second round. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hangwatch.collectives import rank_records
from hangwatch.model import RankDump
from hangwatch.stacks import activity
from hangwatch.stacks.process_activity import find_standing


def is_needed(ranks: Iterable[RankDump], table: activity.Table) -> bool:
    """True if one round may mislead: a rank does not wait for ranks, or a flight recorder has an old open operation.

    Ranks of a healthy job also compute in every step. Only a second round shows if they move.
    """
    return any(_may_mislead(rank, table) for rank in ranks)


def _may_mislead(rank: RankDump, table: activity.Table) -> bool:
    last = rank.rounds[-1] if rank.rounds else None
    if last is None or rank.gone:
        return False
    if rank_records.has_old_open_operation(last.recorders):
        return True
    has_stack = any(thread.frames for thread in last.threads)
    return has_stack and find_standing(last.threads, table).waits_for != "ranks"
