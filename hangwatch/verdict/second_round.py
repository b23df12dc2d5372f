"""Test for a capture that needs a second round. Pure."""

from collections.abc import Iterable

from hangwatch import words
from hangwatch.model import RankDump
from hangwatch.stacks import activity
from hangwatch.stacks.process_activity import find_process_activity


def find_reason(ranks: Iterable[RankDump], table: activity.Table) -> str:
    """Return the reason why one round may mislead; "" if it does not.

    A rank does not wait for others, or it has a flight recorder. In a healthy job, too, a rank computes in every step,
    or waits for others. Only a second round shows if it moves, or completes collectives.
    """
    return next(filter(None, (_may_mislead(rank, table) for rank in ranks)), "")


def _may_mislead(rank: RankDump, table: activity.Table) -> str:
    last = rank.rounds[-1] if rank.rounds else None
    if last is None or rank.gone:
        return ""
    if any(recorder.records for recorder in last.recorders):
        return f"the flight recorder of {words.name_ranks([rank.id])} shows then if collectives complete"
    has_stack = any(thread.frames for thread in last.threads)
    is_apart = has_stack and find_process_activity(last.threads, table).waits_for != "ranks"
    return f"{words.name_ranks([rank.id])} does not wait for other ranks" if is_apart else ""
