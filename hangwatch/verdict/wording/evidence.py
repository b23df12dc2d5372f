"""Evidence with its numbers: it supports a verdict or gives context. Pure."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice

from msgspec import structs

from hangwatch import words
from hangwatch.limits import MOST_LISTED_RANKS
from hangwatch.model import Evidence, Group, Grouping, Member, Motion, RankId, Signature, Stack, median
from hangwatch.model.value import list_by_key
from hangwatch.stacks import activity_table
from hangwatch.tables import kernel_lines
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.measurements import (
    CPU,
    CPU_GAP,
    FEWEST_TO_STAND_OUT,
    POWER,
    SM_OF_A_KERNEL,
    UTILIZATION,
    UTILIZATION_GAP,
    compare,
    values,
)
from hangwatch.verdict.scene import Scene
from hangwatch.verdict.wording import check_first_reasons, clauses, job_headlines, sequence_numbers
from hangwatch.verdict.wording.group_text import all_of

_CONTEXT_THREADS = 3
MOST_SHOWN = 8
"""The number of ranks, lines and nodes that are shown in one kind of evidence."""
_OF_PROCESSES = frozenset({"process", "task"})
_TENSOR_OF_WORK = 0.01
_DRAM_OF_WORK = 0.02


def gather(finding: Finding, scene: Scene) -> tuple[Evidence, ...]:
    """Return all evidence on a finding, in the order of a report. `scene` contains the facts of the whole job."""
    if finding.kind == "NoRanks":
        return tuple(context(scene.grouping))
    is_named = finding.is_named and finding.kind != "MountSilent"
    numbers = sequence_numbers.evidence(finding.answer.graph)
    open_then = sequence_numbers.evidence(finding.open_then)
    if finding.kind == "RecordsOnly":
        return (*numbers, *open_then)
    evidence: list[Evidence] = []
    if finding.by_numbers:
        evidence += (structs.replace(fact, supports=True if is_named else None) for fact in numbers)
    if is_named or finding.rule is not None:
        compared = on_named(finding.suspects, finding.others)
        evidence += compared if is_named else (structs.replace(fact, supports=None) for fact in compared)
    is_compared = is_named or finding.contradicted is not None
    evidence += absence(scene.grouping) if is_compared else context(finding.scene.grouping)
    if not finding.by_numbers:
        evidence += numbers
        is_told = scene.health is not None or finding.kind == "WrongInterface"
        evidence += () if is_told or finding.answer.graph.have_communicated else enclosed(scene.grouping)
    return (*evidence, *_of_all(finding, scene), *open_then)


def _of_all(finding: Finding, scene: Scene) -> Iterator[Evidence]:
    """Yield the evidence that every kind of finding gets: from the kernel, and counters of the nodes."""
    suspects, members = {member.id for member in finding.members}, scene.grouping.members
    named = suspects if finding.is_named else set()
    yield from in_kernel((finding.members or members)[:MOST_SHOWN], members)
    yield from died(members, named)
    yield from kernel_log(members, named)
    yield from machine(members)
    if scene.launchers:
        yield launchers(scene.launchers)


def on_named(suspects: Sequence[Group], others: Sequence[Group]) -> Iterator[Evidence]:
    """Yield the activities of the suspects and of the other ranks, and compare their measurements."""
    members = [member for group in suspects for member in group.members]
    rest = [member for group in others for member in group.members]
    for group in suspects:
        if group.frames:
            does = clauses.describe_activity(group, several=group.size > 1)
            message = f"{_who(group.members)} {does}: {clauses.describe_top_frames(group)}"
            yield _evidence("activity", group.members, message, supports=True)
    for group in suspects:
        if group.fault is not None:
            message = f"{_who(group.members)} could not be dumped: {group.fault.detail}"
            yield _evidence("fault", group.members, message, supports=group.fault.about == "target")
    for group in suspects:
        for stack in group.workers[:3]:
            message = f"{stack.name} of {_who(group.members[:1])}: {_frames(stack)}"
            yield _evidence("workers", group.members[:1], message, supports=True)
    yield from _waiting([group for group in others if group.waits], len(rest), "other ranks", supports=True)
    behind = [group for group in others if group.waits_for == "gpu"]
    awaited = "their GPUs" if any(map(clauses.has_gpu, behind)) else "their GPUs or for ranks"
    yield from _waiting(behind, len(rest), awaited, supports=False)
    yield from _alone(members)
    yield from _compared(members, rest)


def context(grouping: Grouping) -> Iterator[Evidence]:
    """Yield the groups, other threads, a GPU that differs and missing ranks, for a verdict that names no rank."""
    groups = grouping.groups
    for group in groups[:6]:
        yield _evidence("group", group.members, f"{_who(group.members)}: {_shows(group)}")
    for group in groups[:2]:
        for stack in group.threads[:_CONTEXT_THREADS]:
            clause = "" if stack.activity == "unknown" else f" {activity_table.describe_activity(stack.activity, None)}"
            thread = f"thread {stack.name} of {_who(group.members[:1])}"
            yield _evidence("thread", group.members, f"{thread}{clause}: {_frames(stack)}")
    lone = _find_lone_gpu(grouping.members)
    if lone is not None:
        member, own_ratio, rest = lone
        differs = f"the GPU of {_who([member])} is at {own_ratio:.0%}, the others at {median(rest):.0%}"
        yield _evidence("gpu_utilization", [member], f"{differs} (a hint, not a proof)")
    yield from absence(grouping)


def _find_lone_gpu(members: Sequence[Member]) -> tuple[Member, float, list[float]] | None:
    """Return the only member with a GPU utilization far from the median, its utilization, and those of the others.

    None without such a member, or with fewer than three values.
    """
    measured = [(one, ratio) for one in members if (ratio := one.gpu.utilization_ratio) is not None]
    if len(measured) < FEWEST_TO_STAND_OUT:
        return None
    middle = median(ratio for _, ratio in measured)
    far = [place for place, (_, ratio) in enumerate(measured) if abs(ratio - middle) >= UTILIZATION_GAP]
    if len(far) != 1:
        return None
    return *measured[far[0]], [ratio for place, (_, ratio) in enumerate(measured) if place != far[0]]


def absence(grouping: Grouping) -> Iterator[Evidence]:
    """Yield evidence on the ranks that did not respond, and on the ranks of nodes that were not captured."""
    is_text = grouping.is_from_text and bool(grouping.absent)
    silent = grouping.absent if is_text else grouping.unanswered
    if silent:
        counted = f"{words.count_ranges(silent)} ({words.fold_ranges(silent)})"
        why = "check them first, although healthy ranks sometimes do not respond either"
        message = f"not in the input: {counted}" if is_text else f"{counted} did not respond: {why}"
        ranks = tuple(RankId(rank=rank) for rank in islice(chain.from_iterable(silent), MOST_LISTED_RANKS))
        yield Evidence(kind="unanswered", message=message, ranks=ranks)
    if grouping.absent_not_queried and not is_text:
        absent = f"{words.count_ranges(grouping.absent_not_queried)} ({words.fold_ranges(grouping.absent_not_queried)})"
        yield Evidence(kind="other_nodes", message=f"not captured: {absent} of the job")


def in_kernel(members: Sequence[Member], everybody: Iterable[Member]) -> Iterator[Evidence]:
    """Yield the system calls of some ranks that were read, each with its file, pipe or peer.

    `everybody` are all ranks of the job. A peer among them is shown by its rank.
    """
    by_node: dict[str | None, dict[int, RankId]] = {}
    in_call = [(member, call) for member in members if (call := member.kernel.call) is not None]
    nodes = {member.id.node for member, _ in in_call}
    for member in everybody if in_call else ():
        if member.id.node in nodes and member.id.pid is not None:
            by_node.setdefault(member.id.node, {})[member.id.pid] = member.id
    for member, call in in_call:
        ranks = by_node.get(member.id.node, {})
        does = f"{clauses.describe_caller(member)} is in {clauses.describe_call(call, member, ranks)}"
        worker = clauses.describe_worker_call(member, ranks)
        yield _evidence("system_call", [member], "; ".join(filter(None, (does, worker))))


def died(members: Iterable[Member], named: Collection[RankId]) -> Iterator[Evidence]:
    """Yield the crash artifacts of ended ranks, the earliest first. Artifacts of `named` ranks support the verdict."""
    told = [(member.died, member) for member in members if member.died is not None]
    told.sort(key=lambda entry: entry[0].unix_seconds)
    for one, member in told[:MOST_SHOWN]:
        blames = ", which blames other ranks" if one.of_others else ""
        message = f"{_who([member])} at {words.utc(one.unix_seconds)}: {one.full_text}{blames}"
        yield _evidence("crash", [member], message, supports=member.id in named)


def kernel_log(members: Iterable[Member], named: Collection[RankId]) -> Iterator[Evidence]:
    """Yield the kernel log lines about these ranks. A line about several ranks comes only once.

    Lines about a process come first, then the newest line.
    """
    by_line = list_by_key(((member.id.node, line), member) for member in members for line in member.kernel.lines)
    rows = kernel_lines.load()
    entries = [(rows[line.name], line, ranks) for (_, line), ranks in by_line.items() if line.name in rows]
    entries.sort(key=lambda entry: (entry[0].names not in _OF_PROCESSES, -entry[1].unix_seconds))
    for row, line, ranks in entries[:MOST_SHOWN]:
        source = f"kernel log, {words.utc(line.unix_seconds)}, {_who(ranks)}"
        supports = row.names in _OF_PROCESSES and {member.id for member in ranks} <= set(named)
        message = f"{source}: {kernel_lines.describe(line.name, line.text)}"
        yield _evidence("kernel_log", ranks, message, supports=supports)


def launchers(members: Sequence[Member]) -> Evidence:
    """Return evidence on launchers that have started no rank. `members` are these launchers."""
    return _evidence("launcher", members, "; ".join(map(job_headlines.launcher, members[:_CONTEXT_THREADS])))


def enclosed(grouping: Grouping) -> Iterator[Evidence]:
    """Yield evidence on ranks that wait for others at an address that no other node can reach."""
    members = [member for member in grouping.members if member.waits.enclosed_at is not None]
    if members:
        where = words.join_words(sorted({str(member.waits.enclosed_at) for member in members})[:2])
        reached = "which no other node can reach; the job has ranks on other nodes"
        who = f"{_who(members)} {words.agree(members, 'waits', 'wait')}"
        yield _evidence("wrong_interface", members, f"{who} for others at {where}, {reached}")


def machine(members: Sequence[Member]) -> Iterator[Evidence]:
    """Yield evidence from counters of the nodes: GPUs with kernels that only wait, and ports with new errors."""
    uses = [member.gpu.use for member in members if member.gpu.use is not None]
    only_wait = all(
        use.sm_ratio >= SM_OF_A_KERNEL and use.tensor_ratio < _TENSOR_OF_WORK and use.dram_ratio < _DRAM_OF_WORK
        for use in uses
    )
    if uses and len(uses) == len(members) and only_wait:
        message = (
            f"kernels run on the GPUs of {words.count(len(uses))} and only wait: they run on "
            f"{check_first_reasons.ratios([use.sm_ratio for use in uses])} of the SMs, and use "
            f"{check_first_reasons.ratios([use.tensor_ratio for use in uses])} of the tensor cores and "
            f"{check_first_reasons.ratios([use.dram_ratio for use in uses])} of the memory bandwidth"
        )
        yield _evidence("gpu_use", (), message)
    by_node = {
        member.id.node: member.gpu.ports
        for member in members
        if member.gpu.ports is not None and member.gpu.ports.worse
    }
    for node, ports in list(by_node.items())[:MOST_SHOWN]:
        message = f"errors of InfiniBand or RoCE ports on {node or 'this node'} during the capture"
        members_there = (member for member in members if member.id.node == node)
        yield _evidence("ports", members_there, f"{message}: {', '.join(ports.worse)}")


def _evidence(kind: str, members: Iterable[Member], message: str, *, supports: bool = False) -> Evidence:
    ids = tuple(member.id for member in islice(members, MOST_LISTED_RANKS))
    return Evidence(kind=kind, message=message, ranks=ids, supports=True if supports else None)


def _who(members: Sequence[Member]) -> str:
    return words.name_ranks([member.id for member in members])


def _frames(stack: Stack) -> str:
    return " < ".join(str(frame) for frame in stack.frames[:3])


def _shows(group: Group) -> str:
    if group.gone:
        return "the process has ended"
    if group.fault:
        return group.fault.detail
    return f"{clauses.describe_activity(group, several=group.size > 1)}: {clauses.describe_top_frames(group)}"


def _waiting(groups: Sequence[Group], others: int, what: str, *, supports: bool) -> Iterator[Evidence]:
    members = [member for group in groups for member in group.members]
    if groups:
        share = all_of(others, "other") if len(members) == others else f"{len(members):,} of the {others:,} others"
        wait = "the other rank waits" if others == 1 else f"{share} wait"
        yield _evidence("waiting", members, f"{wait} for {what} in {clauses.operations(groups)}", supports=supports)


_SIGNATURES = {
    Signature.COMPUTES: "computes",
    Signature.TRANSFERS: "transfers",
    Signature.GPU_WORKS: "keeps its GPU busy",
    Signature.BEHIND_GPU: "waits for its GPU",
    Signature.SPINS: "spins",
    Signature.POLLS: "polls",
    Signature.BLOCKED: "is blocked",
    Signature.AWAITS_OUTSIDE: "waits for a peer outside the job",
}
_STATES = {"D": "blocked in the kernel", "T": "stopped", "t": "stopped by a tracer", "Z": "ended, not yet reaped"}


def _alone(members: Sequence[Member]) -> Iterator[Evidence]:
    """Yield the measured behaviour and the process state of each suspect."""
    for member in members[:MOST_SHOWN]:
        if member.signature in _SIGNATURES and member.usage.main_cpu_ratio is not None:
            does = f"{_who([member])} {_SIGNATURES[member.signature]}"
            yield _evidence("signature", [member], f"{does}: {', '.join(_numbers(member))}")
    for member in members[:MOST_SHOWN]:
        if member.kernel.state in _STATES:
            state = f"{_who([member])} is in state {member.kernel.state} ({_STATES[member.kernel.state]})"
            where = f", in {member.kernel.wchan}" if member.kernel.wchan else ""
            message = f"{state} in {words.count(member.rounds, 'round')}{where}"
            yield _evidence("state", [member], message, supports=True)


def _numbers(member: Member) -> list[str]:
    """Return the measurements of one rank as texts, for example "GPU at 3%". The most important one comes first."""
    parts = [f"main thread at {member.usage.main_cpu_ratio or 0.0:.0%} of a core"]
    if member.usage.switches_per_second is not None:
        parts.append(f"{member.usage.switches_per_second:.1f} voluntary context switches per second")
    if member.stack.owns_gil is not None:
        parts.append("holds the GIL" if member.stack.owns_gil else "does not hold the GIL")
    if member.waits.awaited is not None:
        parts.append(f"for {member.waits.awaited.says}")
    if member.waits.stuck_on is not None:
        parts.append(f"in a call on {member.waits.stuck_on}")
    if member.gpu.utilization_ratio is not None:
        parts.append(f"GPU at {member.gpu.utilization_ratio:.0%}")
    if member.gpu.power_watts is not None and member.gpu.busy_power_ratio is not None:
        parts.append(f"{member.gpu.power_watts:.0f} W, {member.gpu.busy_power_ratio:.0%} of the way from idle to busy")
    for link, carried in (("NVLink", member.gpu.nvlink_bytes_per_second), ("PCIe", member.gpu.pcie_bytes_per_second)):
        if carried is not None:
            parts.append(f"{link} {carried / 1e6:.1f} MB/s")
    if (use := member.gpu.use) is not None:
        parts.append(
            f"SM {use.sm_ratio:.1%}, tensor cores {use.tensor_ratio:.1%}, memory bandwidth {use.dram_ratio:.1%}"
        )
    return parts


def _compared(members: Sequence[Member], rest: Sequence[Member]) -> Iterator[Evidence]:
    """Yield the measurements of the suspects next to those of the other ranks."""
    drawn, used, busy = (compare(members, rest, read) for read in (POWER, UTILIZATION, CPU))
    if drawn.is_measured:
        watts, others = f"{median(drawn.suspects):.0f} W", f"{median(drawn.others):.0f} W"
        message = f"GPU power {watts}, the others {others} ({min(drawn.others):.0f} to {max(drawn.others):.0f})"
        yield _evidence("gpu_power", members, message, supports=drawn.draws_less)
    if used.is_measured:
        message = f"GPU utilisation {median(used.suspects):.0%}, the others {median(used.others):.0%}"
        yield _evidence("gpu_utilization", members, message, supports=used.is_apart(UTILIZATION_GAP))
    if busy.is_measured:
        io = values(members, lambda member: member.usage.io_bytes_per_second)
        carried = f"; reads and writes {median(io):.0f} bytes per second" if io else ""
        message = f"uses {median(busy.suspects):.2f} of a core, the others {median(busy.others):.2f}{carried}"
        yield _evidence("cpu", members, message, supports=busy.is_apart(CPU_GAP))
    rounds = max((member.rounds for member in members), default=1)
    if rounds > 1:
        frozen = sum(member.motion is Motion.FROZEN for member in rest)
        moving = any(member.motion is Motion.MOVING for member in members)
        moved, too = ("progressed", "did not") if moving else ("did not progress", "did not, either")
        message = f"{moved} over {words.count(rounds, 'round')}; {frozen:,} of the {len(rest):,} others {too}"
        yield _evidence("motion", members, message)
