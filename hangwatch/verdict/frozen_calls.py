"""Ranks that are named by sequence numbers and blocked in one system call: they are frozen at any GPU power. Pure.

At full power a GPU may run a kernel that only waits. A rank that does not return from one call on an object enqueues
nothing, and no rank that waits for it completes anything: a rank that tries its collective again does not progress.
"""

from collections.abc import Collection

from msgspec.structs import replace

from hangwatch.model import Grouping, Member, Motion, Signature
from hangwatch.verdict.scene import OPENS_FIFO, lock_holder, process_of
from hangwatch.verdict.sequence_rules import decide_by_records

_ASLEEP_RATIO = 0.1  # of a core; a rank that tries a collective again sleeps in it


def with_frozen_ranks(grouping: Grouping) -> Grouping:
    """Return the groups with the motion that sequence numbers and calls show, where GPUs or lines showed progress.

    The groups are unchanged unless every rank is known, each named rank is held, and another rank may only wait.
    """
    if not any(map(_may_only_wait, grouping.members)):
        return grouping
    answer = decide_by_records(grouping)
    named = [member for member in grouping.members if member.id.rank in answer.named]
    others = frozenset(map(process_of, grouping.members))
    if not named or answer.graph.is_partial or not all(_is_held(each, others) for each in named):
        return grouping
    return grouping.change_members(lambda _, member: _freeze(member, answer.named, answer.graph.waiting))


def _is_held(member: Member, processes: Collection[tuple[str | None, int | None]]) -> bool:
    """True if the main thread never returned from one call: open() of a FIFO, or a wait for a lock or stopped helpers.

    A file may be read from a slow mount, and the process behind a pipe may work: these calls prove nothing. A wait for
    a lock proves nothing if the holder of the lock works.
    """
    call, holder, use = member.kernel.call, lock_holder(member), member.usage
    if use.switches_per_second != 0.0 or (use.cpu_ratio or 0.0) > _ASLEEP_RATIO:
        return False
    if call is not None and call.is_held:
        return True
    opens_fifo = member.waits.object == "file" and member.kernel.wchan in OPENS_FIFO
    return opens_fifo or (holder is not None and holder[1] is not None and holder not in processes)


def _may_only_wait(member: Member) -> bool:
    """True if only the power of its GPU shows progress of a rank, or only the lines of a main thread that sleeps."""
    sleeps = member.usage.main_cpu_ratio is not None and member.usage.main_cpu_ratio < _ASLEEP_RATIO
    return member.signature is Signature.GPU_WORKS or (member.signature is Signature.COMPUTES and sleeps)


def _freeze(member: Member, named: Collection[int], waiting: Collection[int]) -> Member:
    if member.id.rank in named:
        return replace(member, motion=Motion.FROZEN, signature=Signature.BLOCKED)
    if member.id.rank in waiting and _may_only_wait(member):
        does = Signature.BEHIND_GPU if member.signature is Signature.GPU_WORKS else Signature.POLLS
        return replace(member, motion=Motion.FROZEN, signature=does)
    return member
