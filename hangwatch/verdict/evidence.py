"""Pure: evidence with its numbers: what speaks for a verdict beside the stacks, and what is only context."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from statistics import median

from msgspec import structs

from hangwatch import words
from hangwatch.collectives import nccl_counts
from hangwatch.model import Evidence, GpuUse, Group, Grouping, KernelLine, Member, Motion, RankId, Signature
from hangwatch.tables import kernel_lines
from hangwatch.verdict import clauses, sentences, sequence_numbers
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.measurements import (
    CPU_GAP,
    SM_OF_A_KERNEL,
    UTILIZATION_GAP,
    cpu,
    find_lone,
    power,
    utilization,
    values,
)
from hangwatch.verdict.scene import Scene

_CONTEXT_THREADS = 3
_MOST_IDS = 64
_MOST_CALLS = 8
_MOST_KERNEL_LINES = 8
_MOST_DIED = 8
_OF_PROCESSES = frozenset({"process", "task"})
_MOST_NODES = 8
_TENSOR_OF_WORK = 0.01
_DRAM_OF_WORK = 0.02


def gather(finding: Finding, scene: Scene) -> tuple[Evidence, ...]:
    """All evidence on a finding in a scene, in the order in which a report shows it."""
    if finding.kind == "NoRanks":
        return context(scene.grouping)
    is_named = finding.is_named and finding.kind != "MountSilent"
    numbers = sequence_numbers.evidence(finding.answer)
    evidence: list[Evidence] = []
    if finding.by_numbers:
        evidence += (structs.replace(one, supports=True if is_named else None) for one in numbers)
    if is_named or finding.rule is not None:
        compared = on_named(finding.suspects, finding.members, finding.others)
        evidence += compared if is_named else (structs.replace(one, supports=None) for one in compared)
    is_compared = is_named or finding.contradicted is not None
    evidence += absence(scene.grouping) if is_compared else context(finding.scene.grouping)
    if not finding.by_numbers:
        evidence += numbers
        is_told = scene.health is not None or finding.kind == "WrongInterface"
        evidence += () if is_told or finding.answer.have_met else enclosed(scene.grouping)
    return (*evidence, *_of_all(finding, scene))


def _of_all(finding: Finding, scene: Scene) -> Iterator[Evidence]:
    """What kernel, NCCL and counters of the nodes tell beside any finding."""
    suspects, members = {member.id for member in finding.members}, scene.grouping.members
    named = suspects if finding.is_named else set()
    yield from in_kernel([member for member in members if member.id in suspects], members)
    yield from nccl_counts.evidence(members)
    yield from died(members, named)
    yield from kernel_log(members, named)
    yield from machine(members)
    if scene.launchers:
        yield launchers(scene.launchers)


def on_named(suspects: Sequence[Group], members: Sequence[Member], others: Sequence[Group]) -> tuple[Evidence, ...]:
    """What the suspects do, what the others do, and how their numbers differ."""
    ids = tuple(member.id for member in members)
    rest = [member for group in others for member in group.members]
    waiting = [group for group in others if group.waits]
    evidence = [_stack(group) for group in suspects if group.frames]
    evidence += [_fault(group) for group in suspects if group.fault]
    evidence += [one for group in suspects for one in _workers(group)]
    evidence += _waiting(waiting, len(rest), "other ranks", supports=True)
    behind = [group for group in others if group.waits_for == "gpu"]
    whom = "their GPUs" if any(map(clauses.has_gpu, behind)) else "their GPUs or for ranks"
    evidence += _waiting(behind, len(rest), whom, supports=None)
    evidence += _signature(members)
    evidence += _state(members)
    evidence += _gpu(ids, members, rest)
    evidence += _cpu(ids, members, rest)
    evidence += _motion(ids, members, rest)
    return tuple(evidence)


def _shows(group: Group) -> str:
    if group.gone:
        return "no process any more"
    return group.fault.detail if group.fault else f"{clauses.does(group)}: {clauses.top(group)}"


def context(grouping: Grouping) -> tuple[Evidence, ...]:
    """What a reader must know when nobody is named: where the groups stand, other threads, GPUs that differ."""
    groups = grouping.groups
    evidence = [
        Evidence(
            kind="group",
            message=f"{words.who([member.id for member in group.members])}: {_shows(group)}",
            ranks=_some([group]),
        )
        for group in groups[:6]
    ]
    evidence += [
        Evidence(
            kind="thread",
            message=f"thread {stack.name} of {words.who([group.members[0].id])} "
            f"is in {stack.activity.replace('_', ' ')}: {' < '.join(str(frame) for frame in stack.frames[:3])}",
            ranks=_some([group]),
        )
        for group in groups[:2]
        for stack in group.threads[:_CONTEXT_THREADS]
    ]
    lone = find_lone(grouping.members, lambda one: one.utilization_ratio, UTILIZATION_GAP)
    if lone is not None:
        member, own, others = lone
        differs = f"the GPU of {words.who([member.id])} is at {own:.0%}, the others at {median(others):.0%}"
        evidence.append(Evidence("gpu_utilization", f"{differs}: a hint, no proof", (member.id,)))
    return (*evidence, *absence(grouping))


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


def died(members: Iterable[Member], named: Collection[RankId]) -> tuple[Evidence, ...]:
    """What ranks that are gone left, the earliest first."""
    told = [(member.died, member.id) for member in members if member.died is not None]
    told.sort(key=lambda entry: entry[0].unix_seconds)
    return tuple(
        Evidence(
            kind="crash",
            message=f"{words.who([rank])} at {words.utc(one.unix_seconds)}: {one.told}"
            f"{', which complains of others' if one.of_others else ''}",
            ranks=(rank,),
            supports=True if rank in named else None,
        )
        for one, rank in told[:_MOST_DIED]
    )


def kernel_log(members: Iterable[Member], named: Collection[RankId]) -> tuple[Evidence, ...]:
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
            supports=True if row.names in _OF_PROCESSES and set(ranks) <= set(named) else None,
        )
        for row, line, ranks in told[:_MOST_KERNEL_LINES]
    )


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
                f"{sentences.ratios([use.sm_ratio for use in uses])} of the SMs, and use "
                f"{sentences.ratios([use.tensor_ratio for use in uses])} of the tensor cores and "
                f"{sentences.ratios([use.dram_ratio for use in uses])} of the memory's bandwidth",
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
    return use.sm_ratio >= SM_OF_A_KERNEL and use.tensor_ratio < _TENSOR_OF_WORK and use.dram_ratio < _DRAM_OF_WORK


def absence(grouping: Grouping) -> tuple[Evidence, ...]:
    """Ranks without an answer: those among the ones that answered, apart from those of nodes that were not asked."""
    evidence = []
    if grouping.unanswered:
        silent = f"{words.count_ranges(grouping.unanswered)} ({words.fold_ranges(grouping.unanswered)})"
        first = islice(chain.from_iterable(grouping.unanswered), _MOST_IDS)
        evidence.append(
            Evidence(
                kind="unanswered",
                message=f"no answer from {silent}: "
                "not accused, a collection loses healthy ranks too, but look there first",
                ranks=tuple(RankId(rank=rank) for rank in first),
            )
        )
    if grouping.elsewhere:
        evidence.append(
            Evidence(
                kind="other_nodes",
                message=f"{words.count_ranges(grouping.elsewhere)} of the job are on other nodes, not in this view "
                f"({words.fold_ranges(grouping.elsewhere)})",
            )
        )
    return tuple(evidence)


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


def _gpu(ids: tuple[RankId, ...], members: Sequence[Member], rest: Sequence[Member]) -> list[Evidence]:
    evidence = []
    drawn, used = power(members, rest), utilization(members, rest)
    if drawn.is_measured:
        evidence.append(
            Evidence(
                kind="gpu_power",
                message=f"GPU power {median(drawn.own):.0f} W, the others {median(drawn.others):.0f} W "
                f"({min(drawn.others):.0f} to {max(drawn.others):.0f})",
                ranks=ids[:_MOST_IDS],
                supports=True if drawn.draws_less else None,
            )
        )
    if used.is_measured:
        evidence.append(
            Evidence(
                kind="gpu_utilization",
                message=f"GPU utilisation {median(used.own):.0%}, the others {median(used.others):.0%}",
                ranks=ids[:_MOST_IDS],
                supports=True if used.is_apart(UTILIZATION_GAP) else None,
            )
        )
    return evidence


def _cpu(ids: tuple[RankId, ...], members: Sequence[Member], rest: Sequence[Member]) -> list[Evidence]:
    used = cpu(members, rest)
    if not used.is_measured:
        return []
    io = values(members, lambda one: one.io_bytes_per_second)
    return [
        Evidence(
            kind="cpu",
            message=f"uses {median(used.own):.2f} of a core, the others {median(used.others):.2f}"
            + (f"; reads and writes {median(io):.0f} bytes per second" if io else ""),
            ranks=ids[:_MOST_IDS],
            supports=True if used.is_apart(CPU_GAP) else None,
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
