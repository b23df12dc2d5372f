"""Pure: the sentences on sequence numbers: headlines of findings, and evidence."""

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
    """Return the pending operations as evidence. It may be added to any verdict."""
    return tuple(_sequence(one, _pending(one)) for one in answer.graph.pending[:_SHOWN])


def open_at_dump(answer: Answer) -> tuple[Evidence, ...]:
    """Return the operations that were open at one moment, as evidence. It does not show how long they were open."""
    return tuple(_sequence(one, _open_then(one)) for one in answer.graph.pending[:_SHOWN])


def _sequence(pending: PendingOperation, message: str) -> Evidence:
    ids = tuple(RankId(rank=rank) for rank in (*pending.missing, *pending.waiting)[:_MOST_IDS])
    return Evidence(kind="sequence", message=message, ranks=ids)


_ASKS_RANK = {
    "main": "It",
    "thread": "One of its threads",
    "child": "Its child process",
}
OWN_CODE = "check what it does there, and if that ends by itself"
BRANCH = "find the next call of each side, and its group: a branch, a step or a group differs"
ITS_NETWORK = (
    "check that the process runs, and that its node can be reached at the interface that NCCL uses "
    "(NCCL_SOCKET_IFNAME, link, XIDs)"
)
ONE_MOMENT = "This is the state at the moment when torch wrote its dumps."
ONE_MOMENT_WITHOUT_STACKS = f"{ONE_MOMENT} Only stacks show where the ranks are: `hangwatch dump`, or py-spy."
ASYNCHRONOUS = f"An open operation does not prove that its rank waits in it: only stacks show that. {ONE_MOMENT}"
_ALL_GPUS = "XIDs, NVLink, the fabric and NCCL; an earlier kernel may be stuck in the stream of one GPU."


def _ranks(ranks: Sequence[int]) -> str:
    return words.name_ranks([RankId(rank=rank) for rank in ranks])


def group_words(pending: PendingOperation) -> str:
    """Return the name of a process group for people: the default group, or its description with its ranks."""
    if pending.is_default:
        return "the default group"
    description = "" if pending.description == _NO_DESCRIPTION else pending.description
    return f"{words.elided(description, _DESCRIPTION_SHOWN) or 'the group'} of {_ranks(pending.members)}"


def describe_operation(pending: PendingOperation) -> str:
    """Return an operation with its number and its group: "all_reduce #563 of the default group"."""
    return f"{words.elided(pending.operation, _DESCRIPTION_SHOWN)} #{pending.number} of {group_words(pending)}"


def _operations(pending: Sequence[PendingOperation]) -> str:
    shown = list(map(describe_operation, pending[:_SHOWN]))
    return words.join_words(shown) if shown else "nothing"


def _since(pending: PendingOperation) -> str:
    return f"for {words.duration(round(pending.seconds) or pending.seconds)}"


def _pending(pending: PendingOperation) -> str:
    wait = "waits" if len(pending.waiting) == 1 else "wait"
    parts = [f"{_ranks(pending.waiting)} {wait} in {describe_operation(pending)} {_since(pending)}", *_others(pending)]
    if pending.timeout_seconds is not None and pending.timeout_seconds > pending.seconds:
        rest = words.duration(round(pending.timeout_seconds - pending.seconds))
        parts.append(f"the collective times out in {rest} (timeout {words.duration(pending.timeout_seconds)})")
    return "; ".join(parts)


def _open_then(pending: PendingOperation) -> str:
    return "; ".join([f"{describe_operation(pending)} was open on {_ranks(pending.waiting)}", *_others(pending)])


def _others(pending: PendingOperation) -> Iterator[str]:
    """Yield the ranks that have not joined, and the ranks for which that is unknown."""
    if pending.missing:
        yield f"{_ranks(pending.missing)} {'has' if len(pending.missing) == 1 else 'have'} not joined"
    if pending.unknown:
        have = "has" if len(pending.unknown) == 1 else "have"
        yield f"it is unknown if {_ranks(pending.unknown)} {have} joined"
    if not pending.missing and not pending.unknown:
        yield "all its ranks have joined" if pending.is_whole else "its other members are not known"


def not_joined(finding: Finding) -> str:
    """Return the headline for ranks that have not joined: their activity, the operation, and its waiting ranks."""
    ranks = set(finding.answer.named or finding.answer.check_first)
    pending = max(
        (one for one in finding.answer.graph.pending if not ranks.isdisjoint(one.missing)),
        key=lambda one: (len(ranks.intersection(one.missing)), len(one.waiting)),
    )
    have, wait = "has" if len(ranks) == 1 else "have", "has" if len(pending.waiting) == 1 else "have"
    late = "It" if len(ranks) == len(finding.suspects) == 1 else sentence(_ranks(sorted(ranks)))
    doing = sentence("; ".join(_doing(group) for group in finding.suspects[:_SHOWN]))
    joined = f"{late} {have} not joined {describe_operation(pending)}"
    return f"{doing}. {joined}, where {_ranks(pending.waiting)} {wait} waited {_since(pending)}."


def _doing(group: Group) -> str:
    who = words.name_ranks([member.id for member in group.members])
    if group.fault is not None and group.fault.reason != "NoStack":
        return f"{who} could not be dumped"
    if not group.frames:
        return f"{who} {'has' if group.size == 1 else 'have'} no stack"
    if all(member.kernel.state in STOPPED_STATES for member in group.members):
        verb = "is" if group.size == 1 else "are"
        return f"{who} {verb} stopped (state T)"
    return f"{who} {clauses.describe_activity(group, several=group.size > 1)}{clauses.describe_line(group)}"


def may_not_join(finding: Finding) -> str:
    """Return the headline for ranks that have not joined but are not named, with the reason for that."""
    return f"{not_joined(finding)} {_why_not_named(finding)}"


def _why_not_named(finding: Finding) -> str:
    by_counts, members = finding.answer.by_counts, finding.members
    if by_counts and any(map(nccl_counts.is_ahead, members)):
        return "In another communicator other ranks are behind it: it may wait for them."
    if by_counts and any(waits_for(group) in {"ranks", "gpu"} for group in finding.suspects):
        return "Its stack shows a wait, too; NCCL's counts do not tell for which rank."
    if len(members) == 1 and (asks := members[0].waits.asks_rank or _asks_by_call(members[0], finding.scene)):
        return f"{_ASKS_RANK[asks]} waits in the kernel for something that another rank of the job may provide."
    still_open = [operation for member in members for operation in open_operations(member)]
    if any(operation.by_main for operation in still_open):
        return "It has an open operation itself, which other ranks may have to join."
    if still_open:
        return "Another of its threads has an open operation, for which it may wait."
    return "It is not known if it waits for another rank there."


def _asks_by_call(member: Member, scene: Scene) -> Literal["main"] | None:
    """Return "main" if the system call of a rank receives from another rank, else None.

    For a Unix socket only the system call shows that.
    """
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
        waits.append(f"{_ranks([rank])} for {_ranks(awaited)} in {describe_operation(pending)}{too}")
    return sentence(f"{_ranks(graph.cycle)} wait for each other: {'; '.join(waits)}.")


def mismatch(finding: Finding) -> str:
    """Return the headline for ranks of one process group that enqueued different operations."""
    graph = finding.answer.graph
    sides = "; ".join(f"{_ranks(ranks)}: {words.printable(text)}" for text, ranks in graph.mismatch[:_SHOWN])
    return f"The ranks of one process group do not match ({_operations(graph.pending[:1])}). {sentence(sides)}."


def still_open(finding: Finding) -> str:
    """Return the headline for an operation that all ranks have joined and some ranks are still in.

    A collective with a root never ends if ranks name different roots.
    """
    first = finding.answer.graph.pending[0]
    root = "if one of them calls it with another root (src or dst), then " if _is_rooted(first) else ""
    inside = f"{_ranks(first.waiting)} {'is' if len(first.waiting) == 1 else 'are'} still in it ({_since(first)})"
    return (
        f"All ranks have joined {describe_operation(first)}, and {inside}. No rank is late: the operations in which "
        f"other ranks wait come later. Check {root}{_ALL_GPUS}"
    )


def _is_rooted(pending: PendingOperation) -> bool:
    return activity.is_marked("rooted", pending.operation)


def not_reached(finding: Finding) -> str:
    """Return the headline for ranks that NCCL does not reach."""
    lost = finding.answer.check_first
    return f"NCCL does not reach {_ranks(lost)}, but reaches the other ranks of the same communicators."


def all_joined(finding: Finding) -> str:
    """Return the headline if all ranks have joined: the CPU of no rank is the cause, but a GPU may be."""
    pending, odd = finding.answer.graph.pending, finding.odd_gpu
    joined = (
        "By NCCL's own counts all ranks have launched the same number of operations in each communicator, and no more "
        "since the first answer: no rank's CPU is behind."
        if finding.answer.by_counts
        else f"All ranks have joined {_operations(pending)}, open {_since(pending[0])}{_all_alike(finding)}."
    )
    if odd is None or odd.member.id.rank is None:
        return f"{joined} Check {_ALL_GPUS}"
    return f"{joined} {sentence(_ranks([odd.member.id.rank]))}: {check_first_reasons.odd_gpu(odd)}."


def _all_alike(finding: Finding) -> str:
    """Return a clause if all ranks have enqueued the same number of operations in each pending group; else ""."""
    groups = {(pending.library, pending.name) for pending in finding.answer.graph.pending}
    newest: dict[tuple[str, str], set[int]] = {}
    for member in finding.scene.grouping.members:
        for state in member.recorder.libraries:
            for records in state.groups:
                newest.setdefault((records.library, records.name), set()).add(records.number)
    return ": no rank's CPU is behind" if all(len(newest.get(group, ())) < 2 for group in groups) else ""


def records_only(finding: Finding) -> str:
    """Return the headline for flight recorder dumps without any stack. It names no rank."""
    shown = [one.message for one in (*evidence(finding.answer), *open_at_dump(finding.open_then))]
    ranks = words.count(len(finding.scene.grouping.members))
    text = "; ".join(shown) or "they show no open collective that can be compared"
    return f"No rank can be named by the flight recorder dumps of {ranks}: {text}."


def contradiction(finding: Finding) -> str:
    """Return the headline on ranks to which the stacks point, with the reason why they are not named."""
    ids = [member.id for member in finding.members]
    who, have = words.name_ranks(ids), "has" if len(ids) == 1 else "have"
    joined = _operations(finding.answer.graph.pending)
    it = "it" if len(ids) == 1 else "they"
    return f"the stacks point at {who}, but by sequence numbers {it} {have} joined {joined}"
