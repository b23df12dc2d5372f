"""Pure: groups -> verdict: who is the odd one and how sure, or why nobody can be named. The rules: docs/verdicts.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec import structs

from hangwatch import words
from hangwatch.hang import frames as stack_frames
from hangwatch.hang import votes, wording
from hangwatch.model import Confidence, Frame, Group, Grouping, Member, Motion, RankId, Verdict

_ROOTED = re.compile(r"(broadcast|scatter|gather|reduce)(_object|_object_list|_coalesced)?$|[Bb]cast$")
_LIBRARY = re.compile(
    r"(^|/)(torch/distributed/(distributed_c10d|c10d_logger|_functional_collectives\w*)|contextlib)\.py$"
)
_REFUSED = re.compile(r"permission|not permitted|EPERM|EACCES|suspend", re.IGNORECASE)
_NO_PROCESS = re.compile(r"ProcessGone|no such process|ESRCH", re.IGNORECASE)
_NO_EVIDENCE = re.compile(  # what failed is the dumping, whatever the rank does
    r"(NoStack|NotPython|NoInterpreter|NoPyspy|PyspyTooOld|CannotStart|Interrupted|RoundDeadline|TooLarge|BadDump)$"
)
_STEPS = (Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH)


class _Scene(NamedTuple):
    """A grouping, sorted by what its groups can tell; `failed` have a fault that says something of the rank."""

    grouping: Grouping
    stacked: tuple[Group, ...]
    failed: tuple[Group, ...]
    gone: tuple[Group, ...]
    answered: int

    def waiting(self, *kinds: str, without: Iterable[Group] = ()) -> int:
        """How many ranks wait for one of `kinds`."""
        left = {group.key for group in without}
        return wording.size(g for g in self.stacked if _waits_for(g) in kinds and g.key not in left)

    def others(self, named: Iterable[Group]) -> list[Group]:
        """The groups with stacks that are not accused."""
        left = {group.key for group in named}
        return [group for group in self.stacked if group.key not in left]


def judge(grouping: Grouping) -> Verdict:
    """Name the odd ranks of a job with the evidence, or say why nobody can be named.

    The rules run in order and the first that has an answer decides. A rank that merely did not answer is never named.
    """
    scene = _scene(grouping)
    for rule in _RULES:
        verdict = rule(scene)
        if verdict is not None:
            return verdict
    message = wording.cannot_tell(scene.stacked, scene.answered, scene.waiting("ranks"))
    return _nobody("CannotTell", message + wording.where_to_look(grouping), scene)


def _scene(grouping: Grouping) -> _Scene:
    gone = tuple(g for g in grouping.groups if g.gone or (g.fault and _NO_PROCESS.search(_fault_text(g))))
    stacked = tuple(g for g in grouping.groups if g.fault is None and not g.gone)
    failed = tuple(g for g in grouping.groups if g.fault and g not in gone and _tells(g, stacked))
    return _Scene(grouping, stacked, failed, gone, wording.size((*stacked, *failed)))


def _tells(group: Group, stacked: Sequence[Group]) -> bool:
    """Whether a failed dump says something of the rank; a refusal does only where a neighbour could be dumped."""
    if group.fault is None or _NO_EVIDENCE.match(group.fault.reason):
        return False
    return not _REFUSED.search(_fault_text(group)) or _neighbours(stacked, group) > 0


def _moving(scene: _Scene) -> Verdict | None:
    members = wording.members_of(scene.stacked)
    moving = sum(member.motion is Motion.MOVING for member in members)
    if moving * 2 <= len(members):
        return None
    doing = "; ".join(wording.each(scene.stacked))
    message = f"{moving:,} of {words.count(len(members))} moved between the rounds, the job is at work: {doing}."
    return _nobody("Moving", message, scene)


def _gone(scene: _Scene) -> Verdict | None:
    ranks, waiting = wording.members_of(scene.gone), scene.waiting("ranks", "gpu")
    if not ranks or waiting * 2 < wording.size(scene.stacked) or len(ranks) > waiting:
        return None
    verb = "has no process any more" if len(ranks) == 1 else "have no process any more"
    message = f"{wording.who(ranks)} {verb}, while {wording.others_wait(scene.stacked)}."
    explicit = scene.waiting("ranks") * 2 >= wording.size(scene.stacked)
    return _accuse("RankGone", message, scene, scene.gone, Confidence.HIGH if explicit else Confidence.MEDIUM)


def _blocked(scene: _Scene) -> Verdict | None:
    return _in_state(scene, "D", "RankBlocked", "blocked in the kernel (state D)")


def _stopped(scene: _Scene) -> Verdict | None:
    return _in_state(scene, "Tt", "RankStopped", "stopped (state T: a debugger, a tracer or SIGSTOP holds it)")


def _in_state(scene: _Scene, letters: str, kind: str, held: str) -> Verdict | None:
    """Ranks that the kernel shows in one of these states in every round, while most of the others wait."""
    named = tuple(
        part
        for group in (*scene.stacked, *scene.failed)
        if (part := _part(group, lambda m: (m.state or "?") in letters))
    )
    rest = [part for group in scene.stacked if (part := _part(group, lambda m: (m.state or "?") not in letters))]
    waiting = wording.size(group for group in rest if _waits_for(group) in {"ranks", "gpu"})
    ranks = wording.members_of(named)
    if not ranks or len(ranks) > waiting or waiting * 2 < scene.answered - len(ranks):
        return None
    where = next((f", in {member.wchan}" for member in ranks if member.wchan), "")
    stacks = [wording.busy(group) for group in named if group.frames]
    doing = f"; by its stack it {stacks[0]}" if len(ranks) == 1 and stacks else ""
    verb = "is" if len(ranks) == 1 else "are"
    message = f"{wording.who(ranks)} {verb} {held}{where}{doing}; {wording.others_wait(rest)}."
    sure = Confidence.HIGH if kind == "RankStopped" or min(member.rounds for member in ranks) > 1 else Confidence.MEDIUM
    return _accuse(kind, message, scene, named, sure, others=rest)


def _undumpable(scene: _Scene) -> Verdict | None:
    ranks, waiting = wording.members_of(scene.failed), scene.waiting("ranks", "gpu")
    if not ranks or waiting * 2 < wording.size(scene.stacked) or len(ranks) > waiting:
        return None
    neighbours = min(_neighbours(scene.stacked, group) for group in scene.failed)
    also = f", although {words.count(neighbours, 'other rank')} of its node could" if neighbours else ""
    message = f"{wording.who(ranks)} cannot be dumped{also}, while {wording.others_wait(scene.stacked)}."
    strong = neighbours >= 3 and scene.waiting("ranks") * 4 >= 3 * scene.answered
    return _accuse("RankUndumpable", message, scene, scene.failed, Confidence.HIGH if strong else Confidence.MEDIUM)


class _Level(NamedTuple):
    """Who is suspected, what the majority must wait for then, and how sure that is."""

    suspects: Callable[[Group], bool]
    majority: tuple[str, ...]
    sure: Confidence


_LEVELS = (
    _Level(lambda g: _waits_for(g) == "nothing", ("ranks", "gpu", "lock", "thread"), Confidence.HIGH),
    _Level(lambda g: g.activity == "leaving", ("ranks",), Confidence.MEDIUM),
    _Level(lambda g: _waits_for(g) in {"lock", "thread"}, ("ranks", "gpu"), Confidence.MEDIUM),
    _Level(lambda g: _waits_for(g) == "gpu" and wording.holds_gil(g), ("ranks", "gpu"), Confidence.MEDIUM),
    _Level(lambda g: _waits_for(g) == "unknown", ("ranks",), Confidence.LOW),
    _Level(lambda g: _waits_for(g) == "gpu" and g.motion is Motion.MOVING, ("ranks",), Confidence.MEDIUM),
    _Level(lambda g: _waits_for(g) == "gpu", ("ranks",), Confidence.LOW),
)


def _outside(scene: _Scene) -> Verdict | None:
    """Ranks that are not in a wait while at least half of the job's are, the plainest suspects first.

    A rank that was in a wait in an earlier round has come out of it since: it does come, and is not accused.
    """
    for level in _LEVELS:
        suspects = (group for group in scene.stacked if level.suspects(group))
        named = tuple(part for group in suspects if (part := _part(group, lambda member: not member.waited_before)))
        if not named:
            continue
        ranks, waiting = wording.size(named), scene.waiting(*level.majority, without=named)
        enough = waiting > ranks or (waiting == ranks == 1)
        if level.sure is Confidence.LOW:  # a weak suspicion needs a clear majority: one against one says nothing
            enough = waiting >= 3 * ranks
        if not enough or waiting * 2 < scene.answered:
            return None
        sure = _weighed(level.sure, scene.waiting("ranks", without=named), scene.answered, ranks)
        moving = any(member.motion is Motion.MOVING for member in wording.members_of(named))
        message = wording.outside(named, scene.others(named), moving=moving)
        return _accuse("OutsideCollective", message, scene, named, sure)
    return None


def _weighed(sure: Confidence, explicit: int, answered: int, named: int) -> Confidence:
    """Less sure where few wait explicitly for ranks (GPU waits are weaker) or where many are named."""
    if sure is Confidence.MEDIUM and explicit * 2 < answered - named:
        return Confidence.LOW
    many = named > 1 and named * 4 > answered
    return Confidence.MEDIUM if sure is Confidence.HIGH and (many or explicit * 4 < 3 * (answered - named)) else sure


def _waiting_together(scene: _Scene) -> Verdict | None:
    """Everybody waits: in one place, in roles of one collective, or in different places."""
    groups = scene.stacked
    if not groups or scene.failed or any(_waits_for(group) not in {"ranks", "gpu"} for group in groups):
        return None
    if len(groups) > 1 and not _only_roles(groups):
        return _nobody("Mismatch", wording.mismatch(groups), scene)
    answered = scene.answered
    if len(groups) > 1:
        message = wording.roles(groups, answered)
    else:
        message = wording.together(groups[0], answered, scene.grouping.world_size)
    return _nobody("AllWaiting", message + wording.where_to_look(scene.grouping), scene)


def _all_alike(scene: _Scene) -> Verdict | None:
    if len(scene.stacked) != 1 or scene.failed:
        return None
    message = wording.together(scene.stacked[0], scene.answered, scene.grouping.world_size)
    return _nobody("AllAlike", message + wording.where_to_look(scene.grouping), scene)


_RULES: tuple[Callable[[_Scene], Verdict | None], ...] = (
    _moving,
    _gone,
    _blocked,
    _stopped,
    _undumpable,
    _outside,
    _waiting_together,
    _all_alike,
)


def _waits_for(group: Group) -> str:
    """What a group waits for. Who holds the GIL in a function that no rule knows runs Python and waits for nothing."""
    return "nothing" if group.waits_for == "unknown" and wording.holds_gil(group) else group.waits_for


def _part(group: Group, wanted: Callable[[Member], bool]) -> Group | None:
    """The group with only these members, None without any."""
    members = tuple(member for member in group.members if wanted(member))
    return structs.replace(group, members=members) if members else None


def _only_roles(groups: Sequence[Group]) -> bool:
    """Sender and receivers of one rooted collective, entered through the same helper."""
    if len(groups) != 2 or not all(group.waits for group in groups):
        return False
    first, second = groups
    if first.operation != second.operation or not _ROOTED.match(first.operation or ""):
        return False
    caller = _caller(first.frames)
    return caller is not None and caller == _caller(second.frames)


def _caller(frames: Sequence[Frame]) -> stack_frames.Place | None:
    """The frame that called the collective."""
    for frame in frames:
        if not _LIBRARY.search(frame.file) and not stack_frames.is_native(frame.function, frame.file):
            return frame.function, stack_frames.short_path(frame.file)
    return None


def _neighbours(stacked: Sequence[Group], group: Group) -> int:
    """How many ranks could be dumped on each node of this group, at least."""
    nodes = {member.id.node for member in group.members}
    dumped = Counter(member.id.node for member in wording.members_of(stacked))
    return min(dumped[node] for node in nodes)


def _fault_text(group: Group) -> str:
    return f"{group.fault.reason} {group.fault.detail}" if group.fault else ""


def _accuse(
    kind: str,
    message: str,
    scene: _Scene,
    named: Sequence[Group],
    sure: Confidence,
    *,
    others: Sequence[Group] | None = None,
) -> Verdict:
    """A verdict on all members of `named`. A vote of the machine raises the confidence, a narrow view lowers it."""
    ranks = wording.members_of(named)
    evidence = votes.of(named, ranks, scene.others(named) if others is None else others)
    if any(vote.supports and vote.kind in votes.MACHINE for vote in evidence):
        sure = _STEPS[min(_STEPS.index(sure) + 1, 2)]
    if scene.answered * 2 < (scene.grouping.world_size or 0):
        sure = _STEPS[max(_STEPS.index(sure) - 1, 0)]
    return Verdict(
        kind=kind,
        message=_sentence(message),
        named=tuple(sorted((member.id for member in ranks), key=RankId.sort_key)),
        confidence=sure,
        evidence=(*evidence, *votes.absence(scene.grouping)),
    )


def _nobody(kind: str, message: str, scene: _Scene) -> Verdict:
    return Verdict(kind=kind, message=_sentence(message), evidence=votes.context(scene.grouping))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
