"""Tests for ranks in a state that cannot end by itself, while other ranks wait for them in a collective. Pure.

Two captures that agree need no further wait: a page may be sent at once.
"""

from collections.abc import Iterator

from hangwatch.collectives.process_groups import process_key
from hangwatch.model import SIGNAL_STOPPED_STATE, Group, Grouping, Member, Motion, RankId, Signature, Verdict
from hangwatch.stacks import activity_table
from hangwatch.stacks.frames import plain_name, short_path
from hangwatch.verdict import kinds
from hangwatch.verdict.sequence_rules import decide_by_records

# torch's DataLoader repeats its timed wait until data comes or a worker ends; with a timeout of the user it fails.
_REPEATS = ("_try_get_data", "torch/utils/data/dataloader.py")


def find_waiting(grouping: Grouping) -> Iterator[Member]:
    """Yield the ranks that wait for other ranks, by their stacks or by operations that stay open."""
    for group in grouping.groups:
        yield from (one for one in group.members if group.waits_for == "ranks" or any(one.recorder.open_operations))


def find_permanent(grouping: Grouping, verdict: Verdict) -> frozenset[RankId]:
    """Return the ranks that block the job for good.

    These are named ranks that cannot move, and ranks in a cycle or a mismatch by sequence numbers, if all of them only
    wait. A rank that saves in the background, or uses its GPU after it has posted a receive, may still go on.
    """
    # Ranks that leave the job, or meet, may wait for a rank that has ended: only a wait in a collective counts.
    is_collective = any(group.activity == "collective_wait" for group in grouping.groups)
    if not is_collective and not any(any(member.recorder.open_operations) for member in grouping.members):
        return frozenset()
    named = frozenset(verdict.named)
    members = [(group, member) for group in grouping.groups for member in group.members]
    permanent = frozenset(member.id for group, member in members if member.id in named and _cannot_move(group, member))
    if permanent:
        return permanent
    answer = decide_by_records(grouping)
    if not kinds.find(answer.kind).by_order:
        return frozenset()
    ranks = {*answer.graph.cycle}.union(*(ranks for sides in answer.graph.mismatches for _, ranks in sides))
    blocked = [(group, member) for group, member in members if process_key(member.id) in ranks]
    return frozenset(member.id for _, member in blocked) if all(_only_waits(*each) for each in blocked) else frozenset()


def _only_waits(group: Group, member: Member) -> bool:
    """True if a rank waits for ranks, was measured to stand still, and no other thread of it works or enqueues."""
    records = (records for recorder in member.recorder.libraries for records in recorder.groups)
    return (
        group.waits_for == "ranks"
        and member.signature.motion is Motion.FROZEN
        and all(operation.by_main for each in records for operation in each.operations)
        and all(activity_table.find_activity(thread.activity).waits_for == "thread" for thread in group.threads)
    )


def _cannot_move(group: Group, member: Member) -> bool:
    """True if a rank has ended, or if a signal has stopped it or every process that can end its call.

    Only an outsider can continue these processes. A tracer, a freezer or a timeout may end other waits that look alike.
    """
    if member.signature is Signature.STOPPED:
        is_free = member.waits.tracer is None and member.waits.frozen_cgroup is None
        return is_free and member.kernel.state == SIGNAL_STOPPED_STATE
    call = member.kernel.call
    if member.signature is not Signature.BLOCKED or call is None:
        return member.signature is Signature.GONE
    repeats = any((plain_name(frame.function), short_path(frame.file)) == _REPEATS for frame in group.frames)
    return call.is_held and (repeats or not call.may_time_out)
