"""Pure: groups -> verdict: who is the odd one and how sure, or why nobody can be named. The rules: docs/verdicts.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hangwatch.hang import frames as stack_frames
from hangwatch.hang import sentences, votes
from hangwatch.model import Confidence, Evidence, Frame, Group, Grouping, Member, Motion, RankId, Verdict

_ROOTED = frozenset({
    "broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "gather", "gather_object", "reduce",
    "broadcast_coalesced", "Bcast", "bcast",
})  # fmt: skip
_LIBRARY = re.compile(
    r"(^|/)torch/distributed/(distributed_c10d|c10d_logger|_functional_collectives\w*)\.py$|(^|/)contextlib\.py$"
)
_REFUSED = re.compile(r"permission|not permitted|EPERM|EACCES|suspend", re.IGNORECASE)
_NO_PROCESS = re.compile(r"no such process|ESRCH|os error 3\b|NoSuchProcess|ProcessGone|does not exist", re.IGNORECASE)
_NO_EVIDENCE = re.compile(
    r"NoStack|python version|no python|not a python|interpreter|command not found|not installed|round deadline"
    r"|RoundDeadline|NotDumped|Skipped|Truncated",
    re.IGNORECASE,
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
        return sum(len(g.members) for g in self.stacked if _waits_for(g) in kinds and g.key not in left)


def judge(grouping: Grouping) -> Verdict:
    """Name the odd ranks of a job with the evidence, or say why nobody can be named.

    The rules run in order and the first that has an answer decides. A rank that merely did not answer is never named.
    """
    scene = _scene(grouping)
    if not scene.answered:
        return _nobody("CannotTell", "No rank gave a stack: nothing can be said about this job.", scene)
    for rule in _RULES:
        verdict = rule(scene)
        if verdict is not None:
            return verdict
    return _nobody("CannotTell", _cannot_tell(scene), scene)


def _scene(grouping: Grouping) -> _Scene:
    gone = tuple(g for g in grouping.groups if g.gone or (g.fault and _NO_PROCESS.search(_fault_text(g))))
    failed = tuple(g for g in grouping.groups if g.fault and g not in gone and not _NO_EVIDENCE.search(_fault_text(g)))
    stacked = tuple(g for g in grouping.groups if g.fault is None and not g.gone)
    return _Scene(grouping, stacked, failed, gone, _size((*stacked, *failed)))


def _moving(scene: _Scene) -> Verdict | None:
    members = [member for group in scene.stacked for member in group.members]
    moving = sum(member.motion is Motion.MOVING for member in members)
    if moving * 2 <= len(members):
        return None
    message = f"{moving} of {sentences.count(len(members))} moved between the rounds: the job makes progress."
    return _nobody("Moving", message, scene)


def _gone(scene: _Scene) -> Verdict | None:
    waiting = scene.waiting("ranks", "gpu")
    ranks = _members(scene.gone)
    if not ranks or waiting * 2 < _size(scene.stacked) or not waiting or len(ranks) > waiting:
        return None
    verb = "has no process any more" if len(ranks) == 1 else "have no process any more"
    message = f"{_who(ranks)} {verb}, while {_others_wait(scene)}."
    return _accuse("RankGone", message, scene, scene.gone, ranks, _by_waiters(scene))


def _blocked(scene: _Scene) -> Verdict | None:
    return _in_state(scene, "D", "RankBlocked", "blocked in the kernel (state D)")


def _stopped(scene: _Scene) -> Verdict | None:
    return _in_state(scene, "Tt", "RankStopped", "stopped (state T: a debugger, a tracer or SIGSTOP holds it)")


def _in_state(scene: _Scene, letters: str, kind: str, words: str) -> Verdict | None:
    """Ranks that the kernel shows in one of these states in every round, while most of the others wait."""
    groups = (*scene.stacked, *scene.failed)
    ranks = [member for group in groups for member in group.members if member.state and member.state in letters]
    accused = {id(member) for member in ranks}
    waiting = sum(
        id(member) not in accused for g in scene.stacked if _waits_for(g) in {"ranks", "gpu"} for member in g.members
    )
    if not ranks or len(ranks) * 2 > scene.answered or waiting * 2 < scene.answered - len(ranks) or not waiting:
        return None
    named = tuple(group for group in groups if any(id(member) in accused for member in group.members))
    where = next((f", in {member.wchan}" for member in ranks if member.wchan), "")
    doing = next((f" {sentences.does(g)}" for g in named if g.frames and not g.waits), "")
    verb = "is" if len(ranks) == 1 else "are"
    what = f"; its stack says it{doing}" if doing and len(ranks) == 1 else ""
    message = f"{_who(ranks)} {verb} {words}{where}{what}, while {_others_wait(scene, named)}."
    sure = Confidence.HIGH if kind == "RankStopped" or min(member.rounds for member in ranks) > 1 else Confidence.MEDIUM
    return _accuse(kind, message, scene, named, ranks, sure)


def _undumpable(scene: _Scene) -> Verdict | None:
    named = tuple(
        group for group in scene.failed if not _REFUSED.search(_fault_text(group)) or _has_neighbour(scene, group)
    )
    ranks = _members(named)
    waiting = scene.waiting("ranks", "gpu")
    if not ranks or waiting * 2 < _size(scene.stacked) or len(ranks) > waiting:
        return None
    neighbours = min(_neighbours(scene, rank.id) for rank in ranks)
    also = f", although {sentences.count(neighbours, 'other rank')} of its node could" if neighbours else ""
    message = f"{_who(ranks)} cannot be dumped{also}, while {_others_wait(scene)}."
    strong = neighbours >= 3 and scene.waiting("ranks") * 4 >= 3 * scene.answered
    return _accuse("RankUndumpable", message, scene, named, ranks, Confidence.HIGH if strong else Confidence.MEDIUM)


def _outside(scene: _Scene) -> Verdict | None:
    """Ranks that are not in a wait while at least half of the job's are, the plainest kind first."""
    inside = {g.phase for g in scene.stacked if g.waits}
    levels: tuple[tuple[Callable[[Group], bool], tuple[str, ...], Confidence], ...] = (
        (lambda g: _waits_for(g) == "nothing", ("ranks", "gpu", "lock", "thread"), Confidence.HIGH),
        (lambda g: _waits_for(g) in {"lock", "thread"}, ("ranks", "gpu"), Confidence.MEDIUM),
        (lambda g: _waits_for(g) == "unknown", ("ranks",), Confidence.LOW),
        (lambda g: _waits_for(g) == "gpu" and g.motion is Motion.MOVING, ("ranks",), Confidence.MEDIUM),
        (lambda g: _waits_for(g) == "gpu" and bool(g.phase) and g.phase not in inside, ("ranks",), Confidence.LOW),
        (lambda g: g.activity == "gpu_sync", ("ranks",), Confidence.LOW),
    )
    for suspicious, kinds, sure in levels:
        named = tuple(group for group in scene.stacked if suspicious(group))
        if not named:
            continue
        waiting = scene.waiting(*kinds, without=named)
        if waiting * 2 < scene.answered or not waiting:
            return None
        return _accuse_outside(scene, named, sure)
    return None


def _accuse_outside(scene: _Scene, named: tuple[Group, ...], sure: Confidence) -> Verdict:
    ranks = _members(named)
    explicit = scene.waiting("ranks", without=named)
    if sure is Confidence.HIGH and (
        explicit * 4 < 3 * (scene.answered - len(ranks)) or (len(ranks) > 1 and len(ranks) * 4 > scene.answered)
    ):
        sure = Confidence.MEDIUM
    moving = any(member.motion is Motion.MOVING for member in ranks)
    clauses = sentences.listing(
        [f"{_who(list(group.members))} {_busy(group)}" for group in named[:3]]
        + ([f"{sentences.count(_size(named[3:]))} more elsewhere"] if len(named) > 3 else [])
    )
    if moving:
        message = f"The job waits for {_who(ranks)}: {_still(named)}; {_others_wait(scene, named)}."
    else:
        message = f"{clauses}, while {_others_wait(scene, named)}."
    return _accuse("OutsideCollective", message, scene, named, ranks, sure)


def _still(named: Sequence[Group]) -> str:
    one = len(_members(named)) == 1
    return f"{'it' if one else 'they'} {sentences.listing([_busy(group, several=not one) for group in named[:3]])} and still {'moves' if one else 'move'}"


def _busy(group: Group, *, several: bool | None = None) -> str:
    plural = len(group.members) > 1 if several is None else several
    if _runs_python(group):
        where = str(group.frames[0]) if group.frames else "its code"
        return f"{'are' if plural else 'is'} running Python code in {where}, holding the GIL"
    return sentences.does(group, several=plural)


def _waiting_together(scene: _Scene) -> Verdict | None:
    """Everybody waits: in one place, in roles of one collective, or in different places."""
    groups = scene.stacked
    if not groups or scene.failed or any(_waits_for(group) not in {"ranks", "gpu"} for group in groups):
        return None
    if len(groups) > 1 and not _only_roles(groups):
        return _nobody("Mismatch", _mismatch(groups), scene)
    if _size(groups) == 1:
        message = f"Only {_who(_members(groups))} was dumped; it {sentences.does(groups[0])}. One rank alone tells nothing of the others."
    elif len(groups) > 1:
        root = min(groups, key=lambda group: len(group.members))
        message = (
            f"All {sentences.count(scene.answered)} that answered wait in {sentences.operations(groups)}; "
            f"{_who(list(root.members))} differs only by its role in it."
        )
    else:
        message = f"All {sentences.count(scene.answered)} that answered {_together(groups[0])}: no odd rank among them."
    return _nobody("AllWaiting", f"{message}{_look(scene)}", scene)


def _together(group: Group) -> str:
    return f"stand at the same place: each {sentences.does(group)}"


def _all_alike(scene: _Scene) -> Verdict | None:
    if len(scene.stacked) != 1 or scene.failed or scene.answered < 2:
        return None
    group = scene.stacked[0]
    message = f"All {sentences.count(scene.answered)} that answered {_together(group)}: no odd rank among them."
    return _nobody("AllAlike", f"{message}{_look(scene)}", scene)


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
    """What a group waits for. A thread that owns the GIL runs Python: it does not stand behind a GPU."""
    return "nothing" if _runs_python(group) else group.waits_for


def _runs_python(group: Group) -> bool:
    owners = sum(member.owns_gil is True for member in group.members)
    return group.waits_for in {"unknown", "gpu"} and owners > 0 and owners * 2 >= len(group.members)


def _only_roles(groups: Sequence[Group]) -> bool:
    """Sender and receivers of one rooted collective, entered through the same helper."""
    if len(groups) != 2 or not all(group.waits for group in groups):
        return False
    first, second = groups
    if first.operation != second.operation or first.operation not in _ROOTED:
        return False
    caller = _caller(first.frames)
    return caller is not None and caller == _caller(second.frames)


def _caller(frames: Sequence[Frame]) -> stack_frames.Place | None:
    for frame in frames:
        if not _LIBRARY.search(frame.file) and not stack_frames.is_native(frame.function, frame.file):
            return frame.function, stack_frames.short_path(frame.file)
    return None


def _mismatch(groups: Sequence[Group]) -> str:
    parts = [f"{_who(list(group.members))} {_busy(group)}" for group in groups[:4]]
    if len(groups) > 4:
        parts.append(f"{sentences.count(_size(groups[4:]))} in {len(groups) - 4} other places")
    return (
        f"The ranks wait in {len(groups)} different places: {'; '.join(parts)}. "
        "Stacks alone cannot tell who is ahead and who is behind: sequence numbers (flight recorder, NCCL RAS) can."
    )


def _cannot_tell(scene: _Scene) -> str:
    parts = [f"{_who(list(group.members))} {_busy(group)}" for group in scene.stacked[:4]]
    waiting = scene.waiting("ranks")
    if not parts:
        return "No rank gave a stack that tells anything." + _look(scene)
    return (
        f"{waiting} of {sentences.count(scene.answered)} that answered wait for other ranks, too few to accuse the rest: "
        f"{'; '.join(parts)}.{_look(scene)}"
    )


def _look(scene: _Scene) -> str:
    silent, elsewhere = votes.split_absent(scene.grouping)
    if silent:
        return f" No answer from {sentences.count(len(silent))} ({sentences.fold(silent)}): look there first."
    if elsewhere:
        return " Look at the other nodes, then at XIDs and NVLink."
    return " Look for XIDs, NVLink and network errors."


def _others_wait(scene: _Scene, named: Iterable[Group] = ()) -> str:
    left = {group.key for group in named}
    others = [group for group in scene.stacked if group.key not in left]
    waiting = [group for group in others if group.waits] or [g for g in others if g.waits_for == "gpu"]
    total, rest = _size(waiting), _size(others)
    if not waiting:
        return f"{sentences.count(rest, 'other rank')} of the same job wait"
    share = f"all {rest}" if total == rest else f"{total} of the {rest}"
    if rest == 1:
        return f"the other rank {sentences.does(waiting[0])}"
    verb = "wait in" if waiting[0].waits else "wait for their GPUs in"
    return f"{share} other ranks {verb} {sentences.operations(waiting)}"


def _by_waiters(scene: _Scene) -> Confidence:
    return Confidence.HIGH if scene.waiting("ranks") * 2 >= _size(scene.stacked) else Confidence.MEDIUM


def _accuse(
    kind: str, message: str, scene: _Scene, named: Sequence[Group], ranks: Sequence[Member], sure: Confidence
) -> Verdict:
    accused = {id(member) for member in ranks}
    others = [group for group in scene.stacked if not all(id(member) in accused for member in group.members)]
    evidence = votes.of(named, ranks, others)
    if any(vote.supports for vote in evidence if vote.kind in votes.MACHINE - {"state"}):
        sure = _STEPS[min(_STEPS.index(sure) + 1, 2)]
    if scene.answered * 2 < (scene.grouping.world_size or 0):
        sure = _STEPS[max(_STEPS.index(sure) - 1, 0)]
    return Verdict(
        kind=kind,
        message=message[:1].upper() + message[1:],
        named=tuple(sorted((member.id for member in ranks), key=RankId.sort_key)),
        confidence=sure,
        evidence=(*evidence, *votes.absence(scene.grouping)),
    )


def _nobody(kind: str, message: str, scene: _Scene) -> Verdict:
    evidence: tuple[Evidence, ...] = votes.context(scene.grouping)
    return Verdict(kind=kind, message=message[:1].upper() + message[1:], evidence=evidence)


def _fault_text(group: Group) -> str:
    return f"{group.fault.reason} {group.fault.detail}" if group.fault else ""


def _has_neighbour(scene: _Scene, group: Group) -> bool:
    return all(_neighbours(scene, member.id) for member in group.members)


def _neighbours(scene: _Scene, rank: RankId) -> int:
    """Ranks of the same node that could be dumped: a refusal for one among them is not a matter of rights."""
    return sum(member.id.node == rank.node for group in scene.stacked for member in group.members)


def _members(groups: Iterable[Group]) -> list[Member]:
    return [member for group in groups for member in group.members]


def _size(groups: Iterable[Group]) -> int:
    return sum(len(group.members) for group in groups)


def _who(members: Sequence[Member]) -> str:
    return sentences.who([member.id for member in members])
