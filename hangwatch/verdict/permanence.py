"""Tests for ranks in a state that cannot end by itself, while other ranks wait for them in a collective. Pure.

Two captures that agree need no further wait: a page may be sent at once.
"""

import math
from collections.abc import Iterator

from hangwatch.collectives.process_groups import DEFAULT_GROUP, PROVING, process_key
from hangwatch.model import (
    SIGNAL_STOPPED_STATE,
    Group,
    Grouping,
    Member,
    Motion,
    RankId,
    Signature,
    Verdict,
)
from hangwatch.stacks.frames import plain_name, short_path
from hangwatch.verdict import kinds
from hangwatch.verdict.rules import has_crashed
from hangwatch.verdict.sequence_rules import decide_by_records

_SHORT_TIMEOUT_SECONDS = 300.0  # torch's own are 10 and 30 min
# torch's DataLoader repeats its timed wait until data comes or a worker ends; with a timeout of the user it fails.
_REPEATS = ("_try_get_data", "torch/utils/data/dataloader.py")


def find_waiting(grouping: Grouping) -> Iterator[Member]:
    """Yield the ranks that wait for other ranks, by their stacks or by operations that stay open."""
    for group in grouping.groups:
        yield from (one for one in group.members if group.waits_for == "ranks" or any(one.recorder.open_operations))


def find_permanent(grouping: Grouping, verdict: Verdict) -> frozenset[RankId]:
    """Return the ranks that block the job for good.

    These are named ranks that cannot move, and ranks in a cycle or a mismatch by sequence numbers, if all of them only
    wait. A rank that saves in the background, or uses its GPU after it has posted a receive, may still go on. Different
    operations may end when the last rank has joined.
    """
    # Ranks that leave the job, or meet, may wait for a rank that has ended: only a wait in a collective counts.
    is_collective = any(group.activity == "collective_wait" for group in grouping.groups)
    if not is_collective and not any(any(member.recorder.open_operations) for member in grouping.members):
        return frozenset()
    named = frozenset(verdict.named)
    members = [(group, member) for group in grouping.groups for member in group.members]
    waited_in = {
        (records.name, records.description)
        for _, member in members
        for recorder in member.recorder.libraries
        for records in recorder.groups
        if any(each.stays_open and each.operation.startswith(PROVING) for each in records.operations)
    }
    suspects = (each for each in members if each[1].id in named)
    awaits_all = DEFAULT_GROUP in waited_in
    if permanent := frozenset(each[1].id for each in suspects if _cannot_move(*each, awaits_all=awaits_all)):
        return permanent
    answer = decide_by_records(grouping)
    if not kinds.find(answer.kind).by_order:
        return frozenset()
    ranks = {*answer.graph.cycle}.union(*(ranks for sides in answer.graph.mismatches for _, ranks in sides))
    if answer.graph.mismatches and not ranks >= answer.graph.awaited.keys():
        return frozenset()
    blocked = [(group, member) for group, member in members if process_key(member.id) in ranks]
    return frozenset(member.id for _, member in blocked) if all(_only_waits(*each) for each in blocked) else frozenset()


def _only_waits(group: Group, member: Member) -> bool:
    """True if a rank waits for ranks, was measured to stand still, and has no other thread that works or enqueues.

    A wait of another thread may have a timeout, which its stack does not show. A program with a short timeout for its
    group may catch the error and go on.
    """
    records = (records for recorder in member.recorder.libraries for records in recorder.groups)
    return (
        group.waits_for == "ranks"
        and member.signature.motion is Motion.FROZEN
        and all(
            operation.by_main and (operation.timeout_seconds or math.inf) > _SHORT_TIMEOUT_SECONDS
            for each in records
            for operation in each.operations
        )
        and member.stack.is_alone
    )


def _cannot_move(group: Group, member: Member, *, awaits_all: bool) -> bool:
    """True if a signal has stopped a rank or every process that can end its call, or if it has ended and is awaited.

    If it has ended without a trace, and no flight recorder shows a wait in a group of all ranks that needs each of them
    (not `awaits_all`), it may have left when its work was done, as after its part of a gather. Only an outsider can
    continue stopped processes, or another thread of the rank, which may have stopped its helpers. A tracer, a freezer
    or a timeout may end other waits that look alike.
    """
    if member.signature is Signature.STOPPED:
        is_free = member.waits.tracer is None and member.waits.frozen_cgroup is None
        return is_free and member.kernel.state == SIGNAL_STOPPED_STATE
    call = member.kernel.call
    if member.signature is not Signature.BLOCKED or call is None:
        return member.signature is Signature.GONE and (awaits_all or member.died is not None or has_crashed(member))
    repeats = any((plain_name(frame.function), short_path(frame.file)) == _REPEATS for frame in group.frames)
    return call.is_held and member.stack.is_alone and (repeats or not call.may_time_out)
