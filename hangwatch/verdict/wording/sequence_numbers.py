"""The sentences on sequence numbers: headlines of findings, and evidence. Pure."""

from collections.abc import Iterator, Sequence
from typing import Literal

from hangwatch import words
from hangwatch.collectives.mismatches import Sides
from hangwatch.collectives.process_groups import find_process, process_key
from hangwatch.collectives.wait_graph import GpuEnd, PendingOperation, WaitGraph
from hangwatch.limits import MOST_LISTED_RANKS
from hangwatch.model import Evidence, Group, Member, list_by_key
from hangwatch.stacks import activity_table
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.scene import Scene, process_of
from hangwatch.verdict.sequence_rules import Answer
from hangwatch.verdict.wording import check_first_reasons, clauses
from hangwatch.verdict.wording.group_text import SHOWN

_DESCRIPTION_SHOWN = 40
# The description of a group without one, by torch/distributed/distributed_c10d.py
NO_DESCRIPTION = "undefined"


def evidence(graph: WaitGraph) -> tuple[Evidence, ...]:
    """Return the pending operations as evidence: their waiting ranks, missing ranks and timeout."""
    shown = graph.pending[:SHOWN]
    ids = (tuple(map(find_process, (*one.missing, *one.waiting)[:MOST_LISTED_RANKS])) for one in shown)
    texts = map(_describe_pending, shown)
    return tuple(Evidence(kind="sequence", message=text, ranks=ranks) for text, ranks in zip(texts, ids, strict=True))


_ASKS_RANK = {"main": "It", "thread": "One of its threads", "child": "The process that it waits for"}
_GPUS = "XIDs, NVLink, the fabric and NCCL; an earlier kernel may be stuck in the stream of one GPU."
_NETWORK = "the network between these ranks: gloo may wait for a connection that is lost."


def _name_ranks(ranks: Sequence[int]) -> str:
    return words.name_ranks(list(map(find_process, ranks)))


def group_words(pending: PendingOperation) -> str:
    """Return the name of a process group: "the default group", or its description and ranks."""
    if pending.is_default:
        return "the default group"
    description = "" if pending.description == NO_DESCRIPTION else pending.description
    return f"{words.elided(description, _DESCRIPTION_SHOWN) or 'the group'} of {_name_ranks(pending.members)}"


def describe_operation(pending: PendingOperation) -> str:
    """Return an operation with its number, if it has one, and its group: "all_reduce #563 of the default group"."""
    number = f" #{pending.number}" if pending.number else ""
    return f"{words.elided(pending.operation, _DESCRIPTION_SHOWN)}{number} of {group_words(pending)}"


def _name_operations(pending: Sequence[PendingOperation]) -> str:
    shown = list(map(describe_operation, pending[:SHOWN]))
    return words.join_words(shown) if shown else "nothing"


def _describe_duration(pending: PendingOperation, before: str = "for ") -> str:
    """Return the time for which an operation has been open; "" if it is unknown, as in a dump."""
    return f"{before}{words.duration(round(pending.seconds) or pending.seconds)}" if pending.seconds else ""


def _describe_pending(pending: PendingOperation) -> str:
    ranks, operation, duration = _name_ranks(pending.waiting), describe_operation(pending), _describe_duration(pending)
    wait = words.agree(pending.waiting, "waits", "wait")
    parts = [
        f"{ranks} {wait} in {operation} {duration}" if duration else f"{operation} was open on {ranks}",
        *_describe_others(pending),
    ]
    if pending.timeout_seconds is not None and pending.timeout_seconds > pending.seconds:
        rest = words.duration(round(pending.timeout_seconds - pending.seconds))
        parts.append(f"the collective times out in {rest} (timeout {words.duration(pending.timeout_seconds)})")
    return "; ".join(parts)


def _describe_others(pending: PendingOperation) -> Iterator[str]:
    """Yield clauses on the ranks that have not joined the operation, and on the ranks that may not have joined."""
    if pending.missing:
        yield f"{_name_ranks(pending.missing)} {words.agree(pending.missing, 'has', 'have')} not joined"
    if pending.unknown:
        yield f"it is unknown if {_name_ranks(pending.unknown)} {words.agree(pending.unknown, 'has', 'have')} joined"
    if not pending.missing and not pending.unknown:
        yield "all its ranks have joined" if pending.is_whole else "its other members are unknown"


def not_joined(finding: Finding) -> str:
    """Return the headline for ranks that have not joined: their activity, the operation, and its waiting ranks.

    If they are not named, it also says why.
    """
    ranks = set(finding.answer.named or finding.answer.check_first)
    pending = max(
        (operation for operation in finding.answer.graph.pending if not ranks.isdisjoint(operation.missing)),
        key=lambda operation: (len(ranks.intersection(operation.missing)), len(operation.waiting)),
    )
    duration, waiting = _describe_duration(pending), pending.waiting
    has_waited = f"{words.agree(waiting, 'has', 'have')} waited {duration}"
    wait = has_waited if duration else words.agree(waiting, "waits", "wait")
    why = "" if finding.is_named else f" {_why_not_named(finding)}"
    late = "It" if len(ranks) == len(finding.suspects) == 1 else words.sentence(_name_ranks(sorted(ranks)))
    doing = words.sentence("; ".join(_describe_activity(group, finding.answer) for group in finding.suspects[:SHOWN]))
    joined = f"{late} {words.agree(ranks, 'has', 'have')} not joined {describe_operation(pending)}"
    return f"{doing}. {joined}, where {_name_ranks(waiting)} {wait}.{why}"


def _describe_activity(group: Group, answer: Answer) -> str:
    who = words.name_ranks([member.id for member in group.members])
    if thread := answer.find_thread(group):
        who = words.printable(f"thread {thread} of {who}")
    if group.fault is not None and group.fault.reason != "NoStack":
        return f"{who} could not be dumped"
    if not group.frames:
        return f"{who} {'has' if group.size == 1 else 'have'} no stack"
    return (
        f"{who} {clauses.describe_activity(group, several=group.size > 1 and not thread)}{clauses.describe_line(group)}"
    )


def _why_not_named(finding: Finding) -> str:
    members = finding.members
    if len(members) == 1 and (asks := members[0].waits.asks_rank or _find_asking_part(members[0], finding.scene)):
        return f"{_ASKS_RANK[asks]} waits in the kernel for something that another rank of the job may provide."
    still_open = [operation for member in members for operation in member.recorder.open_operations]
    if any(operation.by_main for operation in still_open):
        return "It has an open operation itself, which other ranks may have to join."
    if still_open:
        return "Another of its threads has an open operation, for which it may wait."
    return "It is unknown if it waits for another rank in that operation."


def _find_asking_part(member: Member, scene: Scene) -> Literal["main"] | None:
    """Return "main" if the rank's system call receives data from another rank of the job, else None.

    If the data comes through a Unix socket, only the system call shows the sender.
    """
    others = scene.processes - {process_of(member)}
    behind = member.kernel.call.behind if member.kernel.receives and member.kernel.call is not None else ()
    return "main" if any((member.id.node, peer.other_pid) in others for peer in behind if peer.other_pid) else None


def cycle(finding: Finding) -> str:
    """Return the headline for ranks that wait for each other."""
    graph, waits = finding.answer.graph, []
    in_cycle = frozenset(graph.cycle)
    for rank in graph.cycle[:SHOWN]:
        mine = [one for one in graph.pending if rank in one.waiting]
        pending = next((one for one in mine if not in_cycle.isdisjoint(one.missing)), next(iter(mine), None))
        if pending is None:
            continue  # it waits in a send or recv
        awaited = sorted(in_cycle.intersection(pending.missing or pending.members) - {rank})
        company = sorted(set(pending.waiting).difference(awaited, (rank,)))
        too = f", as {_name_ranks(company)} {words.agree(company, 'does', 'do')}" if company else ""
        missing = _name_ranks(awaited) if awaited else "at least one other rank"
        waits.append(f"{_name_ranks([rank])} for {missing} in {describe_operation(pending)}{too}")
    return words.sentence(f"{_name_ranks(graph.cycle)} wait for each other: {'; '.join(waits)}.")


def different_operations(answer: Answer) -> str:
    """Return a sentence about different ranks that wait in different groups; "" if the numbers do not show that.

    A group that was never used before is known only by the ranks that wait in it. Ranks that use two such groups in
    another order look like two groups of different ranks.
    """
    pending = [operation for operation in answer.graph.pending if not operation.is_whole]
    waiting = [rank for operation in pending for rank in operation.waiting]
    groups = {(operation.library, operation.name, operation.description) for operation in pending}
    if answer.kind != "Unknown" or len(groups) < 2 or len(set(waiting)) < len(waiting):
        return ""
    each = [f"{_name_ranks(operation.waiting)} in {describe_operation(operation)}" for operation in pending[:SHOWN]]
    return (
        f" By sequence numbers they wait in different groups: {words.join_words(each)}. If these groups have the same "
        "ranks, the ranks use them in another order: compare the calls on both sides."
    )


def mismatch(finding: Finding) -> str:
    """Return the headline for ranks of one process group, or of several, that enqueued different operations."""
    graph = finding.answer.graph
    return " ".join(_describe_sides(sides, graph.pending) for sides in graph.mismatches[:SHOWN])


def _describe_sides(sides: Sides, pending: Sequence[PendingOperation]) -> str:
    ranks = {rank for _, side in sides for rank in side}
    called = {text.partition(" of ")[0] for text, _ in sides}
    about = [one for one in pending if ranks.issuperset(one.waiting) and ranks.issubset(one.members)]
    about = [one for one in about if one.operation in called] or about or [*pending]
    each = "; ".join(f"{_name_ranks(ranks)}: {words.printable(text)}" for text, ranks in sides[:SHOWN])
    return f"The ranks of one process group do not match ({_name_operations(about[:1])}). {words.sentence(each)}."


def still_open(finding: Finding) -> str:
    """Return the headline for an operation that all ranks have joined but some ranks have not finished.

    If the collective has a root, the text says that ranks with different roots never finish it.
    """
    first = finding.answer.graph.pending[0]
    is_rooted = activity_table.is_marked("rooted", first.operation)
    root = "if one of them calls it with another root (src or dst), then " if is_rooted else ""
    duration = f" ({shown})" if (shown := _describe_duration(first)) else ""
    inside = f"{_name_ranks(first.waiting)} {words.agree(first.waiting, 'is', 'are')} still in it{duration}"
    return (
        f"All ranks have joined {describe_operation(first)}, and {inside}. No rank is late: the operations in which "
        f"other ranks wait come later. Check {root}{_below(first)}"
    )


def ends(finding: Finding) -> str:
    """Return the headline for the ranks at which all waits end: GPUs and programs that are behind."""
    graph = finding.answer.graph
    awaited_in = list_by_key((rank, one) for one in graph.pending for rank in (*one.missing, *one.unknown))
    late: dict[int, tuple[PendingOperation, list[int]]] = {}
    for rank in (*graph.programs, *graph.unrecorded):
        if rank in awaited_in:
            operation = min(awaited_in[rank], key=lambda one: len(one.members))
            late.setdefault(id(operation), (operation, []))[1].append(rank)
    programs = (_describe_program(ranks, operation) for operation, ranks in late.values())
    return " ".join(map(words.sentence, [*map(_describe_gpu, graph.gpus[:SHOWN]), *programs][:SHOWN]))


def _describe_gpu(end: GpuEnd) -> str:
    others = f"{_name_ranks(end.others)} {words.agree(end.others, 'has', 'have')}"
    late = f"; it is {words.count(end.behind, 'operation')} behind" if end.behind else ""
    done = "completed" if end.behind else "started"
    return f"{_name_ranks([end.rank])}'s GPU has not {done} {describe_operation(end.operation)}, which {others}{late}."


def _describe_program(ranks: Sequence[int], pending: PendingOperation) -> str:
    have, operation = f"{_name_ranks(ranks)} {words.agree(ranks, 'has', 'have')}", describe_operation(pending)
    wait = f"{_name_ranks(pending.waiting)} {words.agree(pending.waiting, 'waits', 'wait')}"
    if not set(ranks).isdisjoint(pending.unknown):
        wait_for = f"{wait} for {words.agree(ranks, 'it', 'them')}"
        return f"{have} no operation in a flight recorder dump, and {wait_for} in {operation}."
    behind = words.agree(ranks, "its program is", "their programs are")
    return f"{have} not joined {operation}, where {wait}: {behind} behind."


def all_joined(finding: Finding) -> str:
    """Return the headline for operations that all ranks have joined: no CPU is late, but a GPU may be stuck."""
    pending, odd = finding.answer.graph.pending, finding.odd_gpu
    joined = (
        f"All ranks have joined {_name_operations(pending)}{_describe_duration(pending[0], ', open for ')}"
        f"{_describe_equal_counts(finding)}."
    )
    key = None if odd is None else process_key(odd.member.id)
    if odd is None or key is None:
        return f"{joined} Check {_below(pending[0])}"
    return f"{joined} {words.sentence(_name_ranks([key]))}: {check_first_reasons.odd_gpu(odd)}."


def _below(joined: PendingOperation) -> str:
    """Return the parts below Python that may block an operation which all ranks have joined."""
    return _NETWORK if joined.library == "gloo" else _GPUS


def _describe_equal_counts(finding: Finding) -> str:
    """Return a clause if the ranks of each pending group have enqueued the same number of operations; else ""."""
    groups = {(pending.library, pending.name) for pending in finding.answer.graph.pending}
    newest = list_by_key(
        ((records.library, records.name), records.number)
        for member in finding.scene.grouping.members
        for state in member.recorder.libraries
        for records in state.groups
    )
    return ": no rank's CPU is behind" if all(len(set(newest.get(group, ()))) < 2 for group in groups) else ""


def records_only(finding: Finding) -> str:
    """Return the headline for flight recorder dumps without stacks. It names no rank."""
    shown = [one.message for one in (*evidence(finding.answer.graph), *evidence(finding.open_then))]
    ranks = words.count(len(finding.scene.grouping.members))
    text = "; ".join(shown) or "they show no open collective that can be compared"
    return f"No rank can be named by the flight recorder dumps of {ranks}: {text}."


def contradiction(finding: Finding) -> str:
    """Return the headline for suspects that are not named: sequence numbers show that they have joined."""
    ids = [member.id for member in finding.members]
    it_has = words.agree(ids, "it has", "they have")
    joined = _name_operations(finding.answer.graph.pending)
    return f"the stacks point at {words.name_ranks(ids)}, but by sequence numbers {it_has} joined {joined}"
