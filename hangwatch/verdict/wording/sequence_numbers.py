"""Pure: the sentences on sequence numbers: the headline of a finding, and its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from hangwatch import words
from hangwatch.collectives import nccl_counts
from hangwatch.collectives.wait_graph import PendingOperation
from hangwatch.model import STOPPED_STATES, Evidence, Group, Member, RankId
from hangwatch.stacks import activity
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.scene import Scene, open_operations, process_of, waits_for
from hangwatch.verdict.sequence_rules import Answer
from hangwatch.verdict.wording import check_first_reasons, clauses
from hangwatch.verdict.wording.group_text import sentence

_SHOWN = 4
_DESCRIPTION_SHOWN = 40
_MOST_IDS = 64
_NO_DESCRIPTION = "undefined"  # of a group without a description: torch/distributed/distributed_c10d.py


def evidence(answer: Answer) -> tuple[Evidence, ...]:
    """Return the pending operations, as evidence for any verdict."""
    return tuple(_sequence(one, _pending(one)) for one in answer.graph.pending[:_SHOWN])


def open_at_dump(answer: Answer) -> tuple[Evidence, ...]:
    """Return the operations that were open at one moment; nothing shows for how long."""
    return tuple(_sequence(one, _open_then(one)) for one in answer.graph.pending[:_SHOWN])


def _sequence(pending: PendingOperation, message: str) -> Evidence:
    ids = tuple(RankId(rank=rank) for rank in (*pending.missing, *pending.waiting)[:_MOST_IDS])
    return Evidence(kind="sequence", message=message, ranks=ids)


_ASKS_RANK = {
    "main": "It",
    "thread": "A thread of it",
    "child": "A process that it started, and which it awaits,",
}
OWN_CODE = "what it does there, and whether that ends by itself"
BRANCH = "which call comes next on each side, and with which group: a branch, a step or a group differs"
ITS_NETWORK = (
    "whether that process runs at all, and whether its node is reached at the interface that NCCL uses "
    "(NCCL_SOCKET_IFNAME, link, XIDs)"
)
ONE_MOMENT = "That is one moment, the one at which torch's dumps were written."
ONE_MOMENT_WITHOUT_STACKS = f"{ONE_MOMENT} Where a rank stands only its stack says: `hangwatch dump`, or py-spy."
ASYNCHRONOUS = (
    "A rank may have an operation open and be elsewhere: whether all of them wait, only their stacks can say. "
    f"{ONE_MOMENT}"
)
_ALL_GPUS = "Look at XIDs, NVLink, the fabric and NCCL, or for a kernel before it in the stream of one GPU."


def _ranks(ranks: Sequence[int]) -> str:
    return words.name_ranks([RankId(rank=rank) for rank in ranks])


def group_words(pending: PendingOperation) -> str:
    """Return the name of a group for people: the default group, or its description with its ranks."""
    if pending.is_default:
        return "the default group"
    description = "" if pending.description == _NO_DESCRIPTION else pending.description
    return f"{words.elided(description, _DESCRIPTION_SHOWN) or 'the group'} of {_ranks(pending.members)}"


def _operation(pending: PendingOperation) -> str:
    return f"{words.elided(pending.operation, _DESCRIPTION_SHOWN)} {pending.number:,} of {group_words(pending)}"


def _operations(pending: Sequence[PendingOperation]) -> str:
    shown = list(map(_operation, pending[:_SHOWN]))
    return words.join_words(shown) if shown else "nothing"


def _since(pending: PendingOperation) -> str:
    return f"for {words.duration(round(pending.seconds) or pending.seconds)}"


def _pending(pending: PendingOperation) -> str:
    wait = "waits" if len(pending.waiting) == 1 else "wait"
    parts = [f"{_ranks(pending.waiting)} {wait} in {_operation(pending)} {_since(pending)}", *_others(pending)]
    if pending.timeout_seconds is not None and pending.timeout_seconds > pending.seconds:
        rest = words.duration(round(pending.timeout_seconds - pending.seconds))
        parts.append(f"its time-out of {words.duration(pending.timeout_seconds)} is over in {rest}")
    return "; ".join(parts)


def _open_then(pending: PendingOperation) -> str:
    return "; ".join([f"{_operation(pending)} was open on {_ranks(pending.waiting)}", *_others(pending)])


def _others(pending: PendingOperation) -> Iterator[str]:
    """Yield the ranks that have not joined, and those for which that is not known."""
    if pending.missing:
        yield f"{_ranks(pending.missing)} {'has' if len(pending.missing) == 1 else 'have'} not come"
    if pending.unknown:
        yield f"of {_ranks(pending.unknown)} it is not known"
    if not pending.missing and not pending.unknown:
        yield "all of its ranks have come" if pending.is_whole else "who else is in it is not known"


def not_joined(finding: Finding) -> str:
    """Return which ranks have not joined, in which operation others wait for them, and what they do instead."""
    ranks = set(finding.answer.named or finding.answer.check_first)
    pending = max(
        (one for one in finding.answer.graph.pending if not ranks.isdisjoint(one.missing)),
        key=lambda one: (len(ranks.intersection(one.missing)), len(one.waiting)),
    )
    have, wait = "has" if len(ranks) == 1 else "have", "waits" if len(pending.waiting) == 1 else "wait"
    late = sentence(f"{_ranks(sorted(ranks))} {have} not come to {_operation(pending)}")
    doing = sentence("; ".join(_doing(group) for group in finding.suspects[:_SHOWN]))
    return f"{late}, where {_ranks(pending.waiting)} {wait} {_since(pending)}. {doing}."


def _doing(group: Group) -> str:
    who = words.name_ranks([member.id for member in group.members])
    if group.fault is not None and group.fault.reason != "NoStack":
        return f"{who} could not be dumped"
    if not group.frames:
        return f"{who} gave no stack"
    if all(member.kernel.state in STOPPED_STATES for member in group.members):
        verb = "is" if group.size == 1 else "are"
        return f"{who} {verb} stopped (state T)"
    return f"{who} {clauses.describe_activity(group, several=group.size > 1)}{clauses.describe_line(group)}"


def may_not_join(finding: Finding) -> str:
    """Return the same for ranks that are not named, and why they are not."""
    return f"{not_joined(finding)} {_why_not_named(finding)}"


def _why_not_named(finding: Finding) -> str:
    by_counts, members = finding.answer.by_counts, finding.members
    if by_counts and any(map(nccl_counts.is_ahead, members)):
        return "In another communicator others are behind it, for whom it may wait."
    if by_counts and any(waits_for(group) in {"ranks", "gpu"} for group in finding.suspects):
        return "Its stack shows a wait, too: for whom, NCCL's counts do not tell."
    if len(members) == 1 and (asks := members[0].waits.asks_rank or _asks_by_call(members[0], finding.scene)):
        return f"{_ASKS_RANK[asks]} waits for what another rank of the job may give, by the kernel's word."
    still_open = [operation for member in members for operation in open_operations(member)]
    if any(operation.by_main for operation in still_open):
        return "An operation of its own is open as well, for which others may have to come."
    if still_open:
        return "Another thread of it has an operation open, for which it may wait."
    return "Whether it waits for another rank there is not known."


def _asks_by_call(member: Member, scene: Scene) -> Literal["main"] | None:
    """Return "main" if its call receives from another rank; for a Unix socket only the call shows that."""
    others = scene.processes - {process_of(member)}
    behind = member.kernel.call.behind if member.kernel.receives and member.kernel.call is not None else ()
    return "main" if any((member.id.node, peer.other_pid) in others for peer in behind if peer.other_pid) else None


def cycle(finding: Finding) -> str:
    """Return the headline for ranks that wait for each other."""
    graph, waits = finding.answer.graph, []
    for rank in graph.cycle[:_SHOWN]:
        pending = next(one for one in graph.pending if rank in one.waiting and set(one.missing) & set(graph.cycle))
        awaited = [other for other in pending.missing if other in graph.cycle]
        company = [other for other in pending.waiting if other != rank]
        too = f", as {_ranks(company)} {'does' if len(company) == 1 else 'do'}" if company else ""
        waits.append(f"{_ranks([rank])} for {_ranks(awaited)} in {_operation(pending)}{too}")
    return sentence(f"{_ranks(graph.cycle)} wait for each other: {'; '.join(waits)}.")


def mismatch(finding: Finding) -> str:
    """Return the headline for ranks of one group that do not do the same."""
    graph = finding.answer.graph
    sides = "; ".join(f"{_ranks(ranks)}: {words.printable(text)}" for text, ranks in graph.mismatch[:_SHOWN])
    return f"The ranks of one group do not do the same ({_operations(graph.pending[:1])}). {sentence(sides)}."


def still_open(finding: Finding) -> str:
    """Return the headline for an operation that all have joined and some are still in.

    A collective with a root never ends if ranks name different roots.
    """
    first = finding.answer.graph.pending[0]
    root = "for another root (src or dst) in its call on one of them, then " if _is_rooted(first) else ""
    inside = f"{_ranks(first.waiting)} are still in it ({_since(first)})"
    return (
        f"All its ranks have come to {_operation(first)}, and {inside}: nobody is late for it, and what others wait in "
        f"comes after it. Look {root}at {_ALL_GPUS.removeprefix('Look at ')}"
    )


def _is_rooted(pending: PendingOperation) -> bool:
    return activity.is_marked("rooted", pending.operation)


def not_reached(finding: Finding) -> str:
    """Return the headline for ranks that NCCL does not reach."""
    lost = finding.answer.check_first
    do = "does" if len(lost) == 1 else "do"
    silent = sentence(f"{_ranks(lost)} {do} not answer NCCL itself")
    return f"{silent}, whose threads reach the others of their communicators."


def all_joined(finding: Finding) -> str:
    """Return the headline if all have joined: no rank's CPU is the cause, but one GPU may be."""
    pending, odd = finding.answer.graph.pending, finding.odd_gpu
    joined = (
        "By NCCL's own counts every rank has launched as much in each communicator, and nothing more since it was "
        "asked first: no rank's CPU is behind."
        if finding.answer.by_counts
        else f"Everybody has come to {_operations(pending)}, open {_since(pending[0])}: no rank's CPU is behind."
    )
    if odd is None or odd.member.id.rank is None:
        return f"{joined} {_ALL_GPUS}"
    return f"{joined} Of {_ranks([odd.member.id.rank])} {check_first_reasons.odd_gpu(odd)}."


def records_only(finding: Finding) -> str:
    """Return the headline for dumps of flight recorders without any stack, which point at no rank."""
    shown = [one.message for one in (*evidence(finding.answer), *open_at_dump(finding.open_then))]
    ranks = words.count(len(finding.scene.grouping.members))
    text = "; ".join(shown) or "they show no open collective that can be compared"
    return f"By dumps of the flight recorders of {ranks} nobody can be pointed at: {text}."


def contradiction(finding: Finding) -> str:
    """Return why the ranks that the stacks point at are not named."""
    ids = [member.id for member in finding.members]
    who, have = words.name_ranks(ids), "has" if len(ids) == 1 else "have"
    joined = _operations(finding.answer.graph.pending)
    return f"by stacks {who} would be accused, but by sequence numbers {who} {have} come to {joined}"
