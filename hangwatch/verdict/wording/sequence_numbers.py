"""Pure: what sequence numbers tell of ranks, in words: as the headline of a finding, and as evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from hangwatch import words
from hangwatch.collectives import nccl_counts
from hangwatch.collectives.wait_graph import Answer, Meeting
from hangwatch.model import STOPPED_STATES, Evidence, Group, Member, RankId
from hangwatch.stacks import activity
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.scene import Scene, open_operations, process_of, waits_for
from hangwatch.verdict.wording import clauses, sentences

_SHOWN = 4
_DESCRIPTION_SHOWN = 40
_MOST_IDS = 64
_NO_DESCRIPTION = "undefined"  # of a group that was made without one: torch/distributed/distributed_c10d.py


def evidence(found: Answer) -> tuple[Evidence, ...]:
    """What is waited for, by number, as evidence beside any verdict."""
    return tuple(_sequence(one, _meeting(one)) for one in found.meetings[:_SHOWN])


def open_then(found: Answer) -> tuple[Evidence, ...]:
    """What was open at one moment, by number, of which nothing says for how long."""
    return tuple(_sequence(one, _open_then(one)) for one in found.meetings[:_SHOWN])


def _sequence(one: Meeting, message: str) -> Evidence:
    ids = tuple(RankId(rank=rank) for rank in (*one.missing, *one.waiting)[:_MOST_IDS])
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
_ALL_GPUS = "Look at XIDs, NVLink, the fabric and NCCL, or for a kernel before it in the stream of one GPU."


def _ranks(ranks: Sequence[int]) -> str:
    return words.who([RankId(rank=rank) for rank in ranks])


def group_words(one: Meeting) -> str:
    """What people call a group: the default group, or its description with its ranks."""
    if one.is_default:
        return "the default group"
    described = "" if one.description == _NO_DESCRIPTION else one.description
    called = words.elided(words.printable(described), _DESCRIPTION_SHOWN)
    return f"{called or 'the group'} of {_ranks(one.members)}"


def _of(one: Meeting) -> str:
    return f"{words.elided(words.printable(one.operation), _DESCRIPTION_SHOWN)} {one.number:,} of {group_words(one)}"


def _listed(meetings: Sequence[Meeting]) -> str:
    shown = [_of(one) for one in meetings[:_SHOWN]]
    return words.listing(shown) if shown else "nothing"


def _since(one: Meeting) -> str:
    return f"for {words.duration(round(one.seconds) or one.seconds)}"


def _meeting(one: Meeting) -> str:
    waits = "waits" if len(one.waiting) == 1 else "wait"
    parts = [f"{_ranks(one.waiting)} {waits} in {_of(one)} {_since(one)}", *_others(one)]
    left = None if one.timeout_seconds is None else one.timeout_seconds - one.seconds
    if one.timeout_seconds is not None and left is not None and left > 0:
        parts.append(f"its time-out of {words.duration(one.timeout_seconds)} is over in {words.duration(round(left))}")
    return "; ".join(parts)


def _open_then(one: Meeting) -> str:
    return "; ".join([f"{_of(one)} was open on {_ranks(one.waiting)}", *_others(one)])


def _others(one: Meeting) -> Iterator[str]:
    """Which ranks have not come, and of which it is not known."""
    if one.missing:
        yield f"{_ranks(one.missing)} {'has' if len(one.missing) == 1 else 'have'} not come"
    if one.unseen:
        yield f"of {_ranks(one.unseen)} it is not known"
    if not one.missing and not one.unseen:
        yield "all of its ranks have come" if one.is_whole else "who else is in it is not known"


def not_come(finding: Finding) -> str:
    """Which ranks have not come to what, which wait there since when, and what the missing ones do instead."""
    found = finding.answer
    ranks = found.named or found.first_look
    meeting = max(
        (one for one in found.meetings if set(ranks) & set(one.missing)),
        key=lambda one: (len(set(ranks) & set(one.missing)), len(one.waiting)),
    )
    have, wait = "has" if len(ranks) == 1 else "have", "waits" if len(meeting.waiting) == 1 else "wait"
    doing = "; ".join(_doing(group) for group in finding.suspects[:_SHOWN])
    said = (
        f"{_ranks(ranks)} {have} not come to {_of(meeting)}, where {_ranks(meeting.waiting)} {wait} {_since(meeting)}"
    )
    said = said[:1].upper() + said[1:]
    return f"{said}. {doing[:1].upper()}{doing[1:]}."


def _doing(group: Group) -> str:
    who = words.who([member.id for member in group.members])
    if group.fault is not None and group.fault.reason != "NoStack":
        return f"{who} could not be dumped"
    if not group.frames:
        return f"{who} gave no stack"
    if all(member.state in STOPPED_STATES for member in group.members):
        verb = "is" if group.size == 1 else "are"
        return f"{who} {verb} stopped (state T)"
    return f"{who} {clauses.does(group, several=group.size > 1)}{clauses.at(group)}"


def may_not_come(finding: Finding) -> str:
    """The same of ranks that are not named, and why they are not."""
    return f"{not_come(finding)} {_why_not_named(finding)}"


def _why_not_named(finding: Finding) -> str:
    found, groups, members = finding.answer, finding.suspects, finding.members
    if found.by_counts and any(map(nccl_counts.is_ahead, members)):
        return "In another communicator others are behind it, for whom it may wait."
    if found.by_counts and any(waits_for(group) in {"ranks", "gpu"} for group in groups):
        return "Its stack shows a wait, too: for whom, NCCL's counts do not tell."
    if len(members) == 1 and (asks := members[0].asks_rank or _asks_by_call(members[0], finding.scene)):
        return f"{_ASKS_RANK[asks]} waits for what another rank of the job may give, by the kernel's word."
    still_open = [one for member in members for one in open_operations(member)]
    if any(one.by_main for one in still_open):
        return "An operation of its own is open as well, for which others may have to come."
    if still_open:
        return "Another thread of it has an operation open, for which it may wait."
    return "Whether it waits for another rank there is not known."


def _asks_by_call(member: Member, scene: Scene) -> Literal["main"] | None:
    """True ("main") if it receives from another rank: of a Unix socket only its call tells that."""
    others = scene.processes - {process_of(member)}
    behind = member.kernel_call.behind if member.receives and member.kernel_call is not None else ()
    return "main" if any((member.id.node, one.other_pid) in others for one in behind if one.other_pid) else None


def circle(finding: Finding) -> str:
    """The headline for ranks that wait for each other."""
    found, ways = finding.answer, []
    for rank in found.circle[:_SHOWN]:
        meeting = next(one for one in found.meetings if rank in one.waiting and set(one.missing) & set(found.circle))
        awaited = [other for other in meeting.missing if other in found.circle]
        company = [other for other in meeting.waiting if other != rank]
        beside = f", as {_ranks(company)} {'does' if len(company) == 1 else 'do'}" if company else ""
        ways.append(f"{_ranks([rank])} for {_ranks(awaited)} in {_of(meeting)}{beside}")
    said = f"{_ranks(found.circle)} wait for each other: {'; '.join(ways)}."
    return said[:1].upper() + said[1:]


def mismatch(finding: Finding) -> str:
    """The headline for ranks of one group that do not do the same."""
    found = finding.answer
    sides = "; ".join(f"{_ranks(ranks)}: {words.printable(what)}" for what, ranks in found.differs[:_SHOWN])
    same = f"The ranks of one group do not do the same ({_listed(found.meetings[:1])})"
    return f"{same}. {sides[:1].upper()}{sides[1:]}."


def still_open(finding: Finding) -> str:
    """To what all have come and some are still in; with a root, ranks that name different ones never end it."""
    first = finding.answer.meetings[0]
    is_rooted = activity.is_marked("rooted", first.operation)
    root = "for another root (src or dst) in its call on one of them, then " if is_rooted else ""
    inside = f"{_ranks(first.waiting)} are still in it ({_since(first)})"
    return (
        f"All its ranks have come to {_of(first)}, and {inside}: nobody is late for it, and what others wait in comes "
        f"after it. Look {root}at {_ALL_GPUS.removeprefix('Look at ')}"
    )


def not_reached(finding: Finding) -> str:
    """The headline for ranks that do not answer NCCL."""
    found = finding.answer
    said = f"{_ranks(found.first_look)} {'does' if len(found.first_look) == 1 else 'do'} not answer NCCL itself"
    return f"{said[:1].upper()}{said[1:]}, whose threads reach the others of their communicators."


def everybody(finding: Finding) -> str:
    """The headline where all have come: it is no rank's CPU, but maybe one GPU."""
    found, odd = finding.answer, finding.odd_gpu
    came = (
        "By NCCL's own counts every rank has launched as much in each communicator, and nothing more since it was "
        "asked first: no rank's CPU is behind."
        if found.by_counts
        else f"Everybody has come to {_listed(found.meetings)}, open {_since(found.meetings[0])}: "
        "no rank's CPU is behind."
    )
    if odd is None or odd.member.id.rank is None:
        return f"{came} {_ALL_GPUS}"
    return f"{came} Of {_ranks([odd.member.id.rank])} {sentences.odd_gpu(odd)}."


def contradiction(finding: Finding) -> str:
    """Why the ranks that the stacks would name are not named."""
    ids = [member.id for member in finding.members]
    who, have = words.who(ids), "has" if len(ids) == 1 else "have"
    came = _listed(finding.answer.meetings)
    return f"by stacks {who} would be accused, but by sequence numbers {who} {have} come to {came}"
