"""Pure: what sequence numbers (`waitfor`) say of a scene, in a verdict and as evidence beside another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Literal

from msgspec import structs

from hangwatch import words
from hangwatch.collectives import nccl_counts
from hangwatch.collectives.wait_graph import Answer, Meeting, Stance, judge
from hangwatch.model import (
    STOPPED_STATES,
    Confidence,
    Evidence,
    FirstLook,
    Group,
    Grouping,
    Member,
    RankId,
    Signature,
    Verdict,
)
from hangwatch.stacks import activity
from hangwatch.stacks.progress import asks_again
from hangwatch.stacks.user_code import is_in_user_code
from hangwatch.verdict import clauses, guidance
from hangwatch.verdict import evidence as votes
from hangwatch.verdict.rules import Process, Scene, holder, processes_of, waits_for, without

_SHOWN = 4
_DESCRIPTION_SHOWN = 40
_MOST_IDS = 64
_NO_DESCRIPTION = "undefined"  # of a group that was made without one: torch/distributed/distributed_c10d.py


def answer(scene: Scene) -> Answer:
    """Who waits for whom among the ranks of a scene; by NCCL's own counts where no flight recorder tells."""
    members, stance, world_size = scene.grouping.members, stance_of(scene.grouping), scene.grouping.world_size
    found = judge(members, stance, world_size)
    return found if found.meetings else nccl_counts.answer(members, stance, world_size)


def stance_of(grouping: Grouping) -> Callable[[Member], Stance]:
    """What stack and kernel say of each member of a grouping."""
    groups = {member.id.rank: group for group in grouping.groups for member in group.members}
    processes = processes_of(grouping)
    return lambda member: _stance(groups[member.id.rank], member, processes)


def _stance(group: Group, member: Member, processes: Set[Process]) -> Stance:
    """Whether a rank waits for others, by its stack, its system call and its state.

    Who waits for a lock that a rank of the job holds waits for that rank; who receives from nobody that is known, or
    waits for a lock in memory that another rank maps, too, may wait for any; and so may who waits for a lock or a
    thread while another thread of it waits for ranks, and whoever asks again and again in its own code. Who sleeps in
    torch's code waits, though no frame of Python shows it.
    """
    if member.state in STOPPED_STATES or member.frozen_cgroup is not None:
        return "elsewhere"
    if group.fault is not None or group.gone:
        return "unclear"
    if holder(member) in processes:
        return "waits"
    if member.waits_in_torch and waits_for(group) in {"nothing", "unknown"}:
        return "waits"
    if asks_again(member) and is_in_user_code(group) and not _has_a_busy_thread(member):
        return "unclear"
    match waits_for(group):
        case "ranks" | "gpu":
            return "waits"
        case _ if member.asks_rank is not None:
            return "unclear"
        case "lock" if member.shares_lock:
            return "unclear"
        case "lock" | "thread" if any(activity.known(one.activity).waits_for == "ranks" for one in group.threads):
            return "unclear"
        case "nothing":
            return "elsewhere"
        case "lock":
            return "held"
        case "unknown" if is_in_user_code(group) and not member.receives:
            return "elsewhere"
    return "elsewhere" if member.signature is Signature.AWAITS_OUTSIDE else "unclear"


def _has_a_busy_thread(member: Member) -> bool:
    """Whether a thread other than its main thread has an operation open."""
    return any(
        one.stays_open and not one.by_main
        for recorder in member.recorded
        for records in recorder.groups
        for one in records.operations
    )


def have_met(found: Answer) -> bool:
    """Whether the ranks that wait have met before: what they wait in is nowhere the first operation of its group."""
    return bool(found.meetings) and all(one.number > 1 for one in found.meetings)


def timeout_seconds(grouping: Grouping) -> float | None:
    """How long what the ranks wait in waits, as they recorded it: the shortest; None where nothing stays open."""
    found = (
        one.timeout_seconds
        for member in grouping.members
        for recorder in member.recorded
        for records in recorder.groups
        for one in records.operations
        if one.stays_open and one.timeout_seconds is not None
    )
    return min(found, default=None)


# --- verdicts --------------------------------------------------------------------------------------------------------


def verdict(found: Answer, scene: Scene) -> Verdict | None:
    """What the answer makes of the scene; None where it tells nothing, so that the rules on stacks stand."""
    if found.named:
        return _accusing(found, scene)
    match found.kind:
        case "not_come" if found.first_look:
            say = _not_come(found, found.first_look, scene)
            return _looking(found, scene, "NotCome", f"{say} {_why_not_named(found, scene)}", _OWN_CODE)
        case "circle":
            return _looking(found, scene, "Circle", _circle(found), _BRANCH)
        case "still_open":
            return _looking(found, scene, "EverybodyCame", _still_open(found), "")
        case "not_reached":
            return _looking(found, scene, "NotReached", _not_reached(found), _ITS_NETWORK)
        case "mismatch":
            return _looking(found, scene, "Mismatch", _mismatch(found), _BRANCH)
        case "everybody":
            odd = votes.odd_gpu(scene.grouping.members)
            if odd is None or odd[0].id.rank is None:
                return _looking(found, scene, "EverybodyCame", f"{_everybody(found)} {_ALL_GPUS}", "")
            why = f"{_everybody(found)} Of {_ranks([odd[0].id.rank])} {odd[1]}."
            return _looking(found._replace(first_look=(odd[0].id.rank,)), scene, "EverybodyCame", why, guidance.ITS_GPU)
    return None


def contradicts(found: Answer, accused: Verdict) -> Verdict | None:
    """Nobody is accused by a stack who has come to all that the others wait for: both are shown. None: no such case."""
    ranks = [one.rank for one in accused.named]
    if not ranks or not found.came.issuperset(rank for rank in ranks if rank is not None) or None in ranks:
        return None
    who, have = words.who(accused.named), "has" if len(ranks) == 1 else "have"
    why = f"by stacks {who} would be accused, but by sequence numbers {who} {have} come to {_listed(found.meetings)}"
    message = f"Nobody is accused: {why}. By the stacks: {accused.message}"
    first = tuple(FirstLook(**structs.asdict(one), why=why, settle=_OWN_CODE) for one in accused.named)
    return Verdict(
        kind="Contradiction",
        message=message,
        evidence=(*evidence(found), *(structs.replace(vote, supports=None) for vote in accused.evidence)),
        first_look=first,
    )


def evidence(found: Answer) -> tuple[Evidence, ...]:
    """What is waited for, by number, as evidence beside any verdict."""
    return tuple(_sequence(one, _meeting(one)) for one in found.meetings[:_SHOWN])


def open_then(found: Answer) -> tuple[Evidence, ...]:
    """What was open at one moment, by number, of which nothing says for how long."""
    return tuple(_sequence(one, _open_then(one)) for one in found.meetings[:_SHOWN])


def _sequence(one: Meeting, message: str) -> Evidence:
    ids = tuple(RankId(rank=rank) for rank in (*one.missing, *one.waiting)[:_MOST_IDS])
    return Evidence(kind="sequence", message=message, ranks=ids)


def _accusing(found: Answer, scene: Scene) -> Verdict:
    groups = _parts(scene.grouping.groups, found.named)
    members = [member for group in groups for member in group.members]
    sure = Confidence.MEDIUM if found.partly or _is_outside(members) else Confidence.HIGH
    return Verdict(
        kind="NotCome",
        message=f"{_not_come(found, found.named, scene)}{clauses.may_come(members)}",
        named=_ids(members),
        confidence=sure,
        evidence=(
            *(structs.replace(one, supports=True) for one in evidence(found)),
            *votes.on_accused(groups, members, without(groups, scene.stacked)),
            *votes.absence(scene.grouping),
        ),
    )


def _is_outside(members: Iterable[Member]) -> bool:
    return any(member.signature is Signature.AWAITS_OUTSIDE for member in members)


def _looking(found: Answer, scene: Scene, kind: str, message: str, settle: str) -> Verdict:
    members = [m for group in _parts(scene.grouping.groups, found.first_look) for m in group.members]
    look = f" Look first at {words.who(_ids(members))}. What would settle it: {settle}." if members else ""
    return Verdict(
        kind=kind,
        message=f"{message}{look} Nobody is accused.",
        evidence=(*evidence(found), *votes.context(scene.grouping)),
        first_look=tuple(FirstLook(**structs.asdict(one), why=message, settle=settle) for one in _ids(members)),
    )


def _parts(groups: Iterable[Group], ranks: Sequence[int]) -> list[Group]:
    """The groups with these ranks alone."""
    wanted = set(ranks)
    parts = (
        structs.replace(group, members=tuple(member for member in group.members if member.id.rank in wanted))
        for group in groups
    )
    return [part for part in parts if part.members]


def _ids(members: Iterable[Member]) -> tuple[RankId, ...]:
    return tuple(sorted((member.id for member in members), key=RankId.sort_key))


# --- in words --------------------------------------------------------------------------------------------------------

_ASKS_RANK = {
    "main": "It",
    "thread": "A thread of it",
    "child": "A process that it started, and which it awaits,",
}
_OWN_CODE = "what it does there, and whether that ends by itself"
_BRANCH = "which call comes next on each side, and with which group: a branch, a step or a group differs"
_ITS_NETWORK = (
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
    """Who has not come, and of whom it is not known."""
    if one.missing:
        yield f"{_ranks(one.missing)} {'has' if len(one.missing) == 1 else 'have'} not come"
    if one.unseen:
        yield f"of {_ranks(one.unseen)} it is not known"
    if not one.missing and not one.unseen:
        yield "all of its ranks have come" if one.is_whole else "who else is in it is not known"


def _not_come(found: Answer, ranks: Sequence[int], scene: Scene) -> str:
    """Who has not come to what, who waits there since when, and what it does in its place."""
    meeting = max(
        (one for one in found.meetings if set(ranks) & set(one.missing)),
        key=lambda one: (len(set(ranks) & set(one.missing)), len(one.waiting)),
    )
    have, wait = "has" if len(ranks) == 1 else "have", "waits" if len(meeting.waiting) == 1 else "wait"
    doing = "; ".join(_doing(group) for group in _parts(scene.grouping.groups, ranks)[:_SHOWN])
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


def _why_not_named(found: Answer, scene: Scene) -> str:
    groups = _parts(scene.grouping.groups, found.first_look)
    members = [m for group in groups for m in group.members]
    if found.by_counts and any(map(nccl_counts.is_ahead, members)):
        return "In another communicator others are behind it, for whom it may wait."
    if found.by_counts and any(waits_for(group) in {"ranks", "gpu"} for group in groups):
        return "Its stack shows a wait, too: for whom, NCCL's counts do not tell."
    if len(members) == 1 and (asks := members[0].asks_rank or _asks_by_call(members[0], scene)):
        return f"{_ASKS_RANK[asks]} waits for what another rank of the job may give, by the kernel's word."
    still_open = [
        one
        for m in members
        for recorder in m.recorded
        for group in recorder.groups
        for one in group.operations
        if one.stays_open
    ]
    if any(one.by_main for one in still_open):
        return "An operation of its own is open as well, for which others may have to come."
    if still_open:
        return "Another thread of it has an operation open, for which it may wait."
    return "Whether it waits for another rank there is not known."


def _asks_by_call(member: Member, scene: Scene) -> Literal["main"] | None:
    """Whether the other end of what it receives from is another rank, as of a Unix socket only its call tells."""
    others = processes_of(scene.grouping) - {(member.id.node, member.id.pid)}
    behind = member.kernel_call.behind if member.receives and member.kernel_call is not None else ()
    return "main" if any((member.id.node, one.other_pid) in others for one in behind if one.other_pid) else None


def _circle(found: Answer) -> str:
    ways = []
    for rank in found.circle[:_SHOWN]:
        meeting = next(one for one in found.meetings if rank in one.waiting and set(one.missing) & set(found.circle))
        awaited = [other for other in meeting.missing if other in found.circle]
        company = [other for other in meeting.waiting if other != rank]
        beside = f", as {_ranks(company)} {'does' if len(company) == 1 else 'do'}" if company else ""
        ways.append(f"{_ranks([rank])} for {_ranks(awaited)} in {_of(meeting)}{beside}")
    said = f"{_ranks(found.circle)} wait for each other: {'; '.join(ways)}."
    return said[:1].upper() + said[1:]


def _mismatch(found: Answer) -> str:
    sides = "; ".join(f"{_ranks(ranks)}: {words.printable(what)}" for what, ranks in found.differs[:_SHOWN])
    same = f"The ranks of one group do not do the same ({_listed(found.meetings[:1])})"
    return f"{same}. {sides[:1].upper()}{sides[1:]}."


def _still_open(found: Answer) -> str:
    """To what all have come and some are still in; with a root, ranks that name different ones never end it."""
    first = found.meetings[0]
    is_rooted = activity.is_marked("rooted", first.operation)
    root = "for another root (src or dst) in its call on one of them, then " if is_rooted else ""
    inside = f"{_ranks(first.waiting)} are still in it ({_since(first)})"
    return (
        f"All its ranks have come to {_of(first)}, and {inside}: nobody is late for it, and what others wait in comes "
        f"after it. Look {root}at {_ALL_GPUS.removeprefix('Look at ')}"
    )


def _not_reached(found: Answer) -> str:
    said = f"{_ranks(found.first_look)} {'does' if len(found.first_look) == 1 else 'do'} not answer NCCL itself"
    return f"{said[:1].upper()}{said[1:]}, whose threads reach the others of their communicators."


def _everybody(found: Answer) -> str:
    if found.by_counts:
        return (
            "By NCCL's own counts every rank has launched as much in each communicator, and nothing more since it was "
            "asked first: no rank's CPU is behind."
        )
    return (
        f"Everybody has come to {_listed(found.meetings)}, open {_since(found.meetings[0])}: no rank's CPU is behind."
    )
