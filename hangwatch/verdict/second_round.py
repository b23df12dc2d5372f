"""Pure: decides whether one round of a capture is enough, or a second one is needed."""

from __future__ import annotations

from collections.abc import Iterable

from hangwatch.collectives import rank_records
from hangwatch.model import RankDump
from hangwatch.stacks import activity
from hangwatch.stacks.process_activity import find_standing
from hangwatch.verdict.scene import GPU_IN_KERNEL_RATIO


def is_needed(ranks: Iterable[RankDump], table: activity.Table) -> bool:
    """True if one round of a rank may mislead: only a second one shows if it moves, or waits for its GPU.

    That is so for a rank in unknown code, in a place that may be behind its GPU, or in no wait for ranks while its GPU
    runs a kernel. It is so for a rank that waits for the workers of its loader, as healthy ranks do at each step, and
    if a flight recorder shows that it may be blocked.
    """
    return any(_may_mislead(rank, table) for rank in ranks)


def _may_mislead(rank: RankDump, table: activity.Table) -> bool:
    last = rank.rounds[-1] if rank.rounds else None
    if last is None or rank.gone:
        return False
    if rank_records.stands(last.recorders):
        return True
    if not any(thread.frames for thread in last.threads):
        return False
    standing = find_standing(last.threads, table)
    is_in_kernel = (rank.utilization_ratio or 0.0) >= GPU_IN_KERNEL_RATIO
    if standing.waits_for in {"unknown", "gpu"} or activity.known(standing.doing.activity).work_is_in == "workers":
        return True
    return is_in_kernel and standing.waits_for != "ranks"
