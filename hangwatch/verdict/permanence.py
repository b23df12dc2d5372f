"""Tests for ranks in a state that cannot end by itself, while other ranks wait for them in a collective. Pure.

Two captures that agree need no further wait: a page may be sent at once.
"""

from collections.abc import Iterator

from hangwatch.collectives.process_groups import process_key
from hangwatch.model import STOPPED_STATES, Grouping, Member, RankId, Signature, Verdict
from hangwatch.verdict import kinds
from hangwatch.verdict.sequence_rules import decide_by_records

_LOCAL = frozenset({"pipe", "unix"})


def find_waiting(grouping: Grouping) -> Iterator[Member]:
    """Yield the ranks that wait for other ranks, by their stacks or by operations that stay open."""
    for group in grouping.groups:
        yield from (one for one in group.members if group.waits_for == "ranks" or any(one.recorder.open_operations))


def find_permanent(grouping: Grouping, verdict: Verdict) -> frozenset[RankId]:
    """Return the ranks that block the job for good.

    These are named ranks that are gone, stopped without a tracer, or blocked on a stopped child or on a pipe or Unix
    socket of a stopped process, and ranks in a cycle or a mismatch by sequence numbers.
    """
    # Ranks that leave the job, or meet, may wait for a rank that has ended: only a wait in a collective counts.
    is_collective = any(group.activity == "collective_wait" for group in grouping.groups)
    if not is_collective and not any(any(member.recorder.open_operations) for member in grouping.members):
        return frozenset()
    named = frozenset(verdict.named)
    permanent = frozenset(member.id for member in grouping.members if member.id in named and _is_permanent(member))
    if permanent:
        return permanent
    answer = decide_by_records(grouping)
    if not kinds.find(answer.kind).by_order:
        return frozenset()
    ranks = set(answer.graph.cycle) | {
        rank for sides in answer.graph.mismatches for _, ranks in sides for rank in ranks
    }
    return frozenset(member.id for member in grouping.members if process_key(member.id) in ranks)


def _is_permanent(member: Member) -> bool:
    if member.signature is Signature.STOPPED:
        return member.waits.tracer is None and member.waits.frozen_cgroup is None
    if member.signature is Signature.GONE or member.kernel.call is None:
        return member.signature is Signature.GONE
    targets, child_state = member.kernel.call.behind, member.kernel.call.child_state
    # A connection may have been inherited by other processes, which answer.
    is_behind_stopped = len(targets) == 1 and targets[0].kind in _LOCAL and targets[0].other_state in STOPPED_STATES
    return is_behind_stopped or child_state in STOPPED_STATES
