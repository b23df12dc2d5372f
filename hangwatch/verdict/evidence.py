"""Pure: evidence with its numbers: what speaks for a verdict beside the stacks, and what is only context."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, islice
from statistics import median

from hangwatch import words
from hangwatch.model import Evidence, GpuUse, Group, Grouping, KernelLine, Member, Motion, RankId, Signature
from hangwatch.tables import kernel_lines
from hangwatch.verdict import clauses, sentences

_POWER_RATIO = 0.9
_UTILIZATION_GAP = 0.5
_CPU_GAP = 0.5
_CONTEXT_THREADS = 3
_MOST_IDS = 64
_MOST_CALLS = 8
_MOST_KERNEL_LINES = 8
_MOST_DIED = 8
_OF_PROCESSES = frozenset({"process", "task"})
_FEWEST_TO_STAND_OUT = 3
_MOST_NODES = 8
# Calculated: one block of a kernel keeps one SM, of 132 on H100 and 148 on B200; NCCL's work reads and writes memory.
_SM_OF_NO_KERNEL = 0.001
_SM_OF_A_KERNEL = 0.005
_TENSOR_OF_WORK = 0.01
_DRAM_OF_WORK = 0.02
MACHINE = frozenset({"gpu_power", "gpu_utilization", "cpu"})
"""Kinds of evidence that do not come from stacks; one that supports raises the confidence."""


def on_accused(named: Sequence[Group], members: Sequence[Member], others: Sequence[Group]) -> tuple[Evidence, ...]:
    """All votes on the accused members: what they do, what the others do, and how their numbers differ."""
    ids = tuple(member.id for member in members)
    rest = [member for group in others for member in group.members]
    waiting = [group for group in others if group.waits]
    votes = [_stack(group) for group in named if group.frames]
    votes += [_fault(group) for group in named if group.fault]
    votes += [vote for group in named for vote in _workers(group)]
    votes += _waiting(waiting, len(rest), "other ranks", supports=True)
    behind = [group for group in others if group.waits_for == "gpu"]
    whom = "their GPUs" if any(map(clauses.has_gpu, behind)) else "their GPUs or for ranks"
    votes += _waiting(behind, len(rest), whom, supports=None)
    votes += _signature(members)
    votes += _state(members)
    votes += _gpu(ids, members, rest)
    votes += _cpu(ids, members, rest)
    votes += _motion(ids, members, rest)
    return tuple(votes)


def machine_says_the_same(members: Sequence[Member], others: Sequence[Group]) -> bool:
    """Whether the machine, too, tells ranks that stand apart by their stacks from all others.

    Their GPUs draw less than any other and are idle, where the others' are not (power alone may be higher with the odd
    one); or their main program uses no CPU where the others spin; or they wait for somebody outside of the job, or in a
    call for a file or pipe that nobody else of it has open.
    """
    rest = [member for group in others for member in group.members]
    if all(member.awaited is not None or member.stuck_on is not None for member in members):
        return True
    own_watts, watts = (_values(some, lambda one: one.power_watts) for some in (members, rest))
    draws_less = bool(own_watts and watts) and max(own_watts) < _POWER_RATIO * min(watts)
    is_idle = _is_lower(members, rest, lambda one: one.utilization_ratio, _UTILIZATION_GAP)
    return (draws_less and is_idle) or _is_lower(members, rest, lambda one: one.cpu_ratio, _CPU_GAP)


def _is_lower(
    members: Sequence[Member], rest: Sequence[Member], read: Callable[[Member], float | None], gap: float
) -> bool:
    own, others = _values(members, read), _values(rest, read)
    return bool(own and others) and max(own) <= min(others) - gap


def _shows(group: Group) -> str:
    if group.gone:
        return "no process any more"
    return group.fault.detail if group.fault else f"{clauses.does(group)}: {clauses.top(group)}"


def context(grouping: Grouping) -> tuple[Evidence, ...]:
    """What a reader must know when nobody is named: where the groups stand, other threads, GPUs that differ."""
    groups = grouping.groups
    votes = [
        Evidence(
            kind="group",
            message=f"{words.who([member.id for member in group.members])}: {_shows(group)}",
            ranks=_some([group]),
        )
        for group in groups[:6]
    ]
    votes += [
        Evidence(
            kind="thread",
            message=f"thread {stack.name} of {words.who([group.members[0].id])} "
            f"is in {stack.activity.replace('_', ' ')}: {' < '.join(str(frame) for frame in stack.frames[:3])}",
            ranks=_some([group]),
        )
        for group in groups[:2]
        for stack in group.threads[:_CONTEXT_THREADS]
    ]
    everybody = grouping.members
    for member in _lone(everybody, lambda one: one.utilization_ratio, _UTILIZATION_GAP):
        votes.append(_gpu_differs(member, everybody))
    return (*votes, *absence(grouping))


def in_kernel(members: Sequence[Member], everybody: Iterable[Member]) -> tuple[Evidence, ...]:
    """The system calls of these ranks, where they were asked for, with what is behind them."""
    by_node: dict[str | None, dict[int, RankId]] = {}
    for member in everybody:
        if member.id.pid is not None:
            by_node.setdefault(member.id.node, {})[member.id.pid] = member.id
    found = []
    for member in members[:_MOST_CALLS]:
        ranks = by_node.get(member.id.node, {})
        if call := clauses.in_call(member, ranks):
            wchan = f"wchan {member.wchan}" if member.wchan else None
            said = (f"{words.who([member.id])} stands in {call}", wchan, clauses.worker_in_call(member, ranks))
            found.append(Evidence(kind="system_call", message="; ".join(filter(None, said)), ranks=(member.id,)))
    return tuple(found)


def died(members: Iterable[Member], accused: Collection[RankId]) -> tuple[Evidence, ...]:
    """What ranks that are gone left, the earliest first."""
    told = [(member.died, member.id) for member in members if member.died is not None]
    told.sort(key=lambda entry: entry[0].unix_seconds)
    return tuple(
        Evidence(
            kind="crash",
            message=f"{words.who([rank])} at {words.utc(one.unix_seconds)}: {one.told}"
            f"{', which complains of others' if one.of_others else ''}",
            ranks=(rank,),
            supports=True if rank in accused else None,
        )
        for one, rank in told[:_MOST_DIED]
    )


def kernel_log(members: Iterable[Member], accused: Collection[RankId]) -> tuple[Evidence, ...]:
    """Lines of the kernel's log about these ranks, those of a process first, each once for all its ranks."""
    found: dict[tuple[str | None, KernelLine], list[RankId]] = {}
    for member in members:
        for line in member.kernel_lines:
            found.setdefault((member.id.node, line), []).append(member.id)
    rows = kernel_lines.load()
    told = [(rows[line.name], line, ranks) for (_, line), ranks in found.items() if line.name in rows]
    told.sort(key=lambda entry: (entry[0].names not in _OF_PROCESSES, -entry[1].unix_seconds))
    return tuple(
        Evidence(
            kind="kernel_log",
            message=f"the kernel's log, {words.utc(line.unix_seconds)}, of {words.who(ranks)}: {line.text}: "
            f"{row.meaning}; {row.remedy}",
            ranks=tuple(ranks)[:_MOST_IDS],
            supports=True if row.names in _OF_PROCESSES and set(ranks) <= set(accused) else None,
        )
        for row, line, ranks in told[:_MOST_KERNEL_LINES]
    )


def odd_gpu(members: Sequence[Member]) -> tuple[Member, str] | None:
    """The one rank whose GPU stands out from all others, and by what; None where none does, or two do.

    It draws less than nine tenths of what any other draws, or is idle where all others are busy, or has no kernel where
    all others have one; of three ranks at least, all of which have such a number.
    """
    found = {}
    if (lowest := _lowest(members, lambda one: one.power_watts)) is not None:
        member, own, others = lowest
        if own < _POWER_RATIO * min(others):
            drawn = f"those of the others {min(others):.0f} to {max(others):.0f} W"
            found[member.id] = member, f"its GPU draws {own:.0f} W, {drawn}"
    if (lowest := _lowest(members, lambda one: one.utilization_ratio)) is not None:
        member, own, others = lowest
        if own <= min(others) - _UTILIZATION_GAP:
            found[member.id] = member, f"its GPU is at {own:.0%}, those of the others at {median(others):.0%}"
    if (lowest := _lowest(members, lambda one: one.gpu_use.sm_ratio if one.gpu_use else None)) is not None:
        member, own, others = lowest
        if own < _SM_OF_NO_KERNEL and min(others) >= _SM_OF_A_KERNEL:
            found[member.id] = member, f"its GPU runs no kernel, those of the others on {_ratios(others)} of their SMs"
    return next(iter(found.values())) if len(found) == 1 else None


def _lowest(
    members: Sequence[Member], read: Callable[[Member], float | None]
) -> tuple[Member, float, list[float]] | None:
    """The member with the lowest value, that value, and those of all others; None of two, or where one is missing."""
    values = _values(members, read)
    if len(values) < max(_FEWEST_TO_STAND_OUT, len(members)):
        return None
    own = min(values)
    place = values.index(own)
    return members[place], own, values[:place] + values[place + 1 :]


def launchers(members: Sequence[Member]) -> Evidence:
    """Nodes on which a launcher of the job has no rank, beside the ranks of others."""
    return Evidence(
        kind="launcher",
        message="; ".join(sentences.launcher(member) for member in members[:_CONTEXT_THREADS]),
        ranks=tuple(member.id for member in members)[:_MOST_IDS],
    )


def enclosed(grouping: Grouping) -> tuple[Evidence, ...]:
    """Ranks that wait for others where no other node can reach them."""
    found = [member for member in grouping.members if member.enclosed_at is not None]
    if not found:
        return ()
    ids = tuple(member.id for member in found)
    places = words.listing(sorted({str(member.enclosed_at) for member in found})[:2])
    message = f"{words.who(ids)} can be met at {places} only, which no other node reaches; the job has ranks on others"
    return (Evidence(kind="wrong_interface", message=message, ranks=ids[:_MOST_IDS]),)


def machine(members: Sequence[Member]) -> tuple[Evidence, ...]:
    """What counters of the nodes tell beside any verdict: GPUs whose kernels only wait, ports that got worse."""
    found = []
    uses = [member.gpu_use for member in members if member.gpu_use is not None]
    if uses and len(uses) == len(members) and all(map(_only_waits, uses)):
        found.append(
            Evidence(
                kind="gpu_use",
                message=f"kernels run on the GPUs of {words.count(len(uses))} and only wait: they are on "
                f"{_ratios([use.sm_ratio for use in uses])} of the SMs, and use "
                f"{_ratios([use.tensor_ratio for use in uses])} of the tensor cores and "
                f"{_ratios([use.dram_ratio for use in uses])} of the memory's bandwidth",
            )
        )
    by_node = {member.id.node: member.ports for member in members if member.ports is not None and member.ports.worse}
    for node, ports in list(by_node.items())[:_MOST_NODES]:
        ids = tuple(member.id for member in members if member.id.node == node)
        found.append(
            Evidence(
                kind="ports",
                message=f"errors of InfiniBand or RoCE ports on {node or 'this node'} during the look: "
                f"{', '.join(ports.worse)}",
                ranks=ids[:_MOST_IDS],
            )
        )
    return tuple(found)


def _only_waits(use: GpuUse) -> bool:
    return use.sm_ratio >= _SM_OF_A_KERNEL and use.tensor_ratio < _TENSOR_OF_WORK and use.dram_ratio < _DRAM_OF_WORK


def _ratios(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1%}", f"{max(values):.1%}"
    return low if low == high else f"{low} to {high}"


def absence(grouping: Grouping) -> tuple[Evidence, ...]:
    """Ranks without an answer: those among the ones that answered, apart from those of nodes that were not asked."""
    votes = []
    if grouping.unanswered:
        silent = f"{words.count_ranges(grouping.unanswered)} ({words.fold_ranges(grouping.unanswered)})"
        first = islice(chain.from_iterable(grouping.unanswered), _MOST_IDS)
        votes.append(
            Evidence(
                kind="unanswered",
                message=f"no answer from {silent}: "
                "not accused, a collection loses healthy ranks too, but look there first",
                ranks=tuple(RankId(rank=rank) for rank in first),
            )
        )
    if grouping.elsewhere:
        votes.append(
            Evidence(
                kind="other_nodes",
                message=f"{words.count_ranges(grouping.elsewhere)} of the job are on other nodes, not in this view "
                f"({words.fold_ranges(grouping.elsewhere)})",
            )
        )
    return tuple(votes)


def _some(groups: Iterable[Group]) -> tuple[RankId, ...]:
    return tuple(member.id for group in groups for member in group.members)[:_MOST_IDS]


def _stack(group: Group) -> Evidence:
    ids = tuple(member.id for member in group.members)
    return Evidence(
        kind="activity",
        message=f"{words.who(ids)} {clauses.does(group, several=len(ids) > 1)}: {clauses.top(group)}",
        ranks=ids[:_MOST_IDS],
        supports=True,
    )


def _waiting(groups: Sequence[Group], others: int, what: str, *, supports: bool | None) -> list[Evidence]:
    if not groups:
        return []
    total = sum(len(group.members) for group in groups)
    share = "the other rank waits" if others == 1 else f"{total:,} of the {others:,} other ranks wait"
    message = f"{share} for {what}: {clauses.operations(groups)}"
    return [Evidence(kind="waiting", message=message, ranks=_some(groups), supports=supports)]


def _fault(group: Group) -> Evidence:
    assert group.fault is not None
    ids = tuple(member.id for member in group.members)
    return Evidence(
        kind="fault",
        message=f"{words.who(ids)} could not be dumped: {group.fault.detail}",
        ranks=ids[:_MOST_IDS],
        supports=True if group.fault.about == "target" else None,
    )


def _workers(group: Group) -> list[Evidence]:
    return [
        Evidence(
            kind="workers",
            message=f"{stack.name} of {words.who([group.members[0].id])}: "
            + " < ".join(str(frame) for frame in stack.frames[:3]),
            ranks=(group.members[0].id,),
            supports=True,
        )
        for stack in group.workers[:3]
    ]


_SIGNATURES = {
    Signature.COMPUTES: "computes",
    Signature.TRANSFERS: "transfers",
    Signature.GPU_WORKS: "keeps its GPU at work",
    Signature.BEHIND_GPU: "stands behind its GPU",
    Signature.SPINS: "spins",
    Signature.POLLS: "polls",
    Signature.BLOCKED: "is blocked",
    Signature.AWAITS_OUTSIDE: "waits for somebody outside of the job",
}


def _signature(members: Sequence[Member]) -> list[Evidence]:
    return [
        Evidence(
            kind="signature",
            message=f"{words.who([member.id])} {_SIGNATURES[member.signature]}: {', '.join(_numbers(member))}",
            ranks=(member.id,),
        )
        for member in members[:8]
        if member.signature in _SIGNATURES and member.main_cpu_ratio is not None
    ]


def _numbers(member: Member) -> list[str]:
    """What was measured of one rank, in the order in which it tells."""
    parts = [f"main thread at {member.main_cpu_ratio or 0.0:.0%} of a core"]
    if member.switches_per_second is not None:
        parts.append(f"{member.switches_per_second:.1f} pauses of its own per second")
    if member.owns_gil is not None:
        parts.append("holds the GIL" if member.owns_gil else "no GIL")
    if member.awaited is not None:
        parts.append(f"for {member.awaited.who}" + (", which is gone" if member.awaited.is_lost else ""))
    if member.stuck_on is not None:
        parts.append(f"in a call on {member.stuck_on}")
    if member.utilization_ratio is not None:
        parts.append(f"GPU at {member.utilization_ratio:.0%}")
    if member.power_watts is not None and member.busy_power_ratio is not None:
        parts.append(f"{member.power_watts:.0f} W, {member.busy_power_ratio:.0%} of the way from idle to busy")
    for link, carried in (("NVLink", member.nvlink_bytes_per_second), ("PCIe", member.pcie_bytes_per_second)):
        if carried is not None:
            parts.append(f"{link} {carried / 1e6:.1f} MB/s")
    if (use := member.gpu_use) is not None:
        parts.append(
            f"SM {use.sm_ratio:.1%}, tensor cores {use.tensor_ratio:.1%}, memory's bandwidth {use.dram_ratio:.1%}"
        )
    return parts


def _state(members: Sequence[Member]) -> list[Evidence]:
    plain = {"D": "blocked in the kernel", "T": "stopped", "t": "stopped by a tracer", "Z": "ended, not yet reaped"}
    return [
        Evidence(
            kind="state",
            message=f"{words.who([member.id])} is in state {member.state} ({plain[member.state]}) in "
            f"{words.count(member.rounds, 'round')}" + (f", in {member.wchan}" if member.wchan else ""),
            ranks=(member.id,),
            supports=True,
        )
        for member in members[:8]
        if member.state in plain
    ]


def _values(members: Iterable[Member], read: Callable[[Member], float | None]) -> list[float]:
    return [value for value in map(read, members) if value is not None]


def _gpu(ids: tuple[RankId, ...], members: Sequence[Member], rest: Sequence[Member]) -> list[Evidence]:
    votes = []
    own, others = (_values(some, lambda one: one.power_watts) for some in (members, rest))
    if own and others:
        lower = max(own) < _POWER_RATIO * min(others)
        votes.append(
            Evidence(
                kind="gpu_power",
                message=f"GPU power {median(own):.0f} W, the others {median(others):.0f} W "
                f"({min(others):.0f} to {max(others):.0f})",
                ranks=ids[:_MOST_IDS],
                supports=True if lower else None,
            )
        )
    own, others = (_values(some, lambda one: one.utilization_ratio) for some in (members, rest))
    if own and others:
        differs = abs(median(own) - median(others)) >= _UTILIZATION_GAP
        votes.append(
            Evidence(
                kind="gpu_utilization",
                message=f"GPU utilisation {median(own):.0%}, the others {median(others):.0%}",
                ranks=ids[:_MOST_IDS],
                supports=True if differs else None,
            )
        )
    return votes


def _cpu(ids: tuple[RankId, ...], members: Sequence[Member], rest: Sequence[Member]) -> list[Evidence]:
    own, others = (_values(some, lambda one: one.cpu_ratio) for some in (members, rest))
    if not own or not others:
        return []
    differs = abs(median(own) - median(others)) >= _CPU_GAP
    io = _values(members, lambda one: one.io_bytes_per_second)
    return [
        Evidence(
            kind="cpu",
            message=f"uses {median(own):.2f} of a core, the others {median(others):.2f}"
            + (f"; reads and writes {median(io):.0f} bytes per second" if io else ""),
            ranks=ids[:_MOST_IDS],
            supports=True if differs else None,
        )
    ]


def _motion(ids: tuple[RankId, ...], members: Sequence[Member], rest: Sequence[Member]) -> list[Evidence]:
    rounds = max((member.rounds for member in members), default=1)
    if rounds < 2:
        return []
    frozen = sum(member.motion is Motion.FROZEN for member in rest)
    moving = any(member.motion is Motion.MOVING for member in members)
    return [
        Evidence(
            kind="motion",
            message=f"{'moved' if moving else 'did not move'} over {words.count(rounds, 'round')}; "
            f"{frozen:,} of the {len(rest):,} others {'did not' if moving else 'did not either'}",
            ranks=ids[:_MOST_IDS],
        )
    ]


def _lone(members: Sequence[Member], read: Callable[[Member], float | None], gap: float) -> list[Member]:
    """The single member whose value is far from everybody else's, if there is exactly one."""
    known = [member for member in members if read(member) is not None]
    if len(known) < 3:
        return []
    middle = median(_values(known, read))
    far = [member for member in known if abs((read(member) or 0.0) - middle) >= gap]
    return far if len(far) == 1 else []


def _gpu_differs(member: Member, everybody: Sequence[Member]) -> Evidence:
    others = [one for one in everybody if one is not member]
    utilization = median(_values(others, lambda one: one.utilization_ratio))
    return Evidence(
        kind="gpu_utilization",
        message=f"the GPU of {words.who([member.id])} is at {member.utilization_ratio or 0.0:.0%}, "
        f"the others at {utilization:.0%}: a hint, no proof",
        ranks=(member.id,),
    )
