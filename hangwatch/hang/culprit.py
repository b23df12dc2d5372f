"""Pure: groups -> verdict: who is the odd one and how sure, or why nobody can be named. The rules: docs/verdicts.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from msgspec import structs

from hangwatch.hang import activity, votes, wording
from hangwatch.hang import frames as stack_frames
from hangwatch.model import (
    BLOCKED_STATES,
    STOPPED_STATES,
    Confidence,
    Frame,
    Group,
    Grouping,
    Member,
    Motion,
    RankId,
    Verdict,
)

_ROOTED = re.compile(r"(broadcast|scatter|gather|reduce)(_object|_object_list|_coalesced)?$|[Bb]cast$")
_LIBRARY = re.compile(
    r"(^|/)(torch/distributed/(distributed_c10d|c10d_logger|_functional_collectives\w*)|contextlib)\.py$"
)
_REFUSALS = ("PermissionDenied", "CannotPause")  # of the rank, or of all that this user may touch
_CONFIDENCES = (Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH)


class _Scene(NamedTuple):
    """A grouping, sorted by what its groups can tell; `failed` have a fault that says something of the rank."""

    grouping: Grouping
    stacked: tuple[Group, ...]
    failed: tuple[Group, ...]
    gone: tuple[Group, ...]

    @property
    def answered(self) -> int:
        """How many ranks gave a stack or a telling fault."""
        return _size((*self.stacked, *self.failed))


class Rule(NamedTuple):
    """When ranks are accused: these are suspect, so many of the others wait for these kinds, so sure, in these words.

    `who` and `waiting` say it for docs/verdicts.md. Those that wait for one of `waiting` must be at least half of the
    ranks in `half_of` ("others": that answered and are no suspects; "answered": all that answered), and outnumber the
    suspects: "as many" may be equal, "more" allows one against one, "three times" does not.
    """

    kind: str
    who: str
    suspects: Callable[[_Scene], Sequence[Group]]
    waiting: tuple[str, ...]
    half_of: Literal["others", "answered"]
    outnumber: Literal["as many", "more", "three times"]
    confidence: Confidence
    weigh: Callable[[_Suspicion], Confidence]
    words: Callable[[_Suspicion], str]


class _Suspicion(NamedTuple):
    """What a rule found: the suspects, all others with a stack, and how many of those that answered are no suspects."""

    rule: Rule
    scene: _Scene
    suspects: tuple[Group, ...]
    others: tuple[Group, ...]
    rest: int

    @property
    def members(self) -> list[Member]:
        """All suspected ranks."""
        return [member for group in self.suspects for member in group.members]

    def waiting(self, *kinds: str) -> int:
        """How many of the others wait for one of `kinds`."""
        return _size(group for group in self.others if _waits_for(group) in kinds)


def judge(grouping: Grouping) -> Verdict:
    """Name the odd ranks of a job with the evidence, or say why nobody can be named.

    A job at work accuses nobody; then the rules of `RULES` in their order, then what is left to say where nobody is
    accused. A rank that merely did not answer is never named.
    """
    scene = _scene(grouping)
    verdict = _moving(scene) or _accused(scene) or _waiting_together(scene) or _all_alike(scene)
    if verdict is not None:
        return verdict
    waiting = _size(group for group in scene.stacked if group.waits)
    message = wording.cannot_tell(scene.stacked, scene.answered, waiting)
    return _nobody("CannotTell", message + wording.where_to_look(grouping), scene)


def _scene(grouping: Grouping) -> _Scene:
    gone = tuple(g for g in grouping.groups if g.gone or (g.fault and g.fault.reason == "ProcessGone"))
    stacked = tuple(g for g in grouping.groups if g.fault is None and not g.gone)
    failed = tuple(g for g in grouping.groups if g.fault and g not in gone and _tells(g, stacked))
    return _Scene(grouping, stacked, failed, gone)


def _tells(group: Group, stacked: Sequence[Group]) -> bool:
    """Whether a failed dump says something of the rank; a refusal does only where a neighbour could be dumped."""
    if group.fault is None or group.fault.about != "target":
        return False
    return group.fault.reason not in _REFUSALS or _neighbours(stacked, group) > 0


# --- who is accused ------------------------------------------------------------------------------------------------


def _accused(scene: _Scene) -> Verdict | None:
    """The first rule with suspects that passes the gate. Of the rules on stacks the first with suspects decides."""
    for rule in RULES:
        suspects = tuple(rule.suspects(scene))
        if not suspects:
            continue
        others = _without(suspects, scene.stacked)
        rest = _size(others) + _size(_without(suspects, scene.failed))
        suspicion = _Suspicion(rule, scene, suspects, others, rest)
        if _passes(suspicion):
            return _accuse(suspicion)
        if rule.kind == "OutsideCollective":
            return None
    return None


def _passes(suspicion: _Suspicion) -> bool:
    """The one gate: enough of the others wait for what the rule asks, and they outnumber the suspects."""
    rule, suspects = suspicion.rule, len(suspicion.members)
    waiting = suspicion.waiting(*rule.waiting)
    enough = {
        "as many": waiting >= suspects,
        "more": waiting > suspects or waiting == suspects == 1,
        "three times": waiting >= 3 * suspects,
    }
    ranks = suspicion.rest if rule.half_of == "others" else suspicion.scene.answered
    return enough[rule.outnumber] and waiting * 2 >= ranks


def _accuse(suspicion: _Suspicion) -> Verdict:
    """A verdict on all suspects. A vote of the machine raises the confidence, a narrow view lowers it."""
    grouping = suspicion.scene.grouping
    evidence = votes.on_accused(suspicion.suspects, suspicion.members, suspicion.others)
    sure = _CONFIDENCES.index(suspicion.rule.weigh(suspicion))
    if any(vote.supports and vote.kind in votes.MACHINE for vote in evidence):
        sure = min(sure + 1, len(_CONFIDENCES) - 1)
    if suspicion.scene.answered * 2 < (grouping.world_size or 0):
        sure = max(sure - 1, 0)
    return Verdict(
        kind=suspicion.rule.kind,
        message=_sentence(suspicion.rule.words(suspicion)),
        named=tuple(sorted((member.id for member in suspicion.members), key=RankId.sort_key)),
        confidence=_CONFIDENCES[sure],
        evidence=(*evidence, *votes.absence(grouping)),
    )


def _stacked_where(wanted: Callable[[Group], bool]) -> Callable[[_Scene], Sequence[Group]]:
    """Ranks of such groups. One that stood in a wait for ranks before has come out of it: it does come."""

    def suspects(scene: _Scene) -> Sequence[Group]:
        parts = (_part(group, lambda member: not member.waited_before) for group in scene.stacked if wanted(group))
        return [part for part in parts if part]

    return suspects


def _in_state(letters: frozenset[str]) -> Callable[[_Scene], Sequence[Group]]:
    """Ranks that the kernel shows in one of these states in every round, whether they gave a stack or not."""

    def suspects(scene: _Scene) -> Sequence[Group]:
        groups = (*scene.stacked, *scene.failed)
        return [part for group in groups if (part := _part(group, lambda member: member.state in letters))]

    return suspects


def _weigh_gone(suspicion: _Suspicion) -> Confidence:
    """Less sure where most of the others show GPU waits only."""
    return Confidence.HIGH if suspicion.waiting("ranks") * 2 >= _size(suspicion.others) else Confidence.MEDIUM


def _weigh_blocked(suspicion: _Suspicion) -> Confidence:
    """A disk wait passes: one round is not enough to be sure."""
    return Confidence.HIGH if min(member.rounds for member in suspicion.members) > 1 else Confidence.MEDIUM


def _weigh_stopped(suspicion: _Suspicion) -> Confidence:
    return suspicion.rule.confidence


def _weigh_undumpable(suspicion: _Suspicion) -> Confidence:
    """Sure where three neighbours could be dumped and three quarters of the job wait explicitly."""
    explicit = suspicion.waiting("ranks") * 4 >= 3 * suspicion.scene.answered
    return Confidence.HIGH if explicit and _fewest_neighbours(suspicion) >= 3 else Confidence.MEDIUM


def _weigh_outside(suspicion: _Suspicion) -> Confidence:
    """Less sure where few wait explicitly for ranks (GPU waits are weaker) or where many are named."""
    sure, named, answered = suspicion.rule.confidence, len(suspicion.members), suspicion.scene.answered
    explicit = suspicion.waiting("ranks")
    if sure is Confidence.MEDIUM and explicit * 2 < answered - named:
        return Confidence.LOW
    many = named > 1 and named * 4 > answered
    few = explicit * 4 < 3 * (answered - named)
    return Confidence.MEDIUM if sure is Confidence.HIGH and (many or few) else sure


def _say_undumpable(suspicion: _Suspicion) -> str:
    return wording.undumpable(suspicion.suspects, suspicion.others, _fewest_neighbours(suspicion))


def _outside(who: str, wanted: Callable[[Group], bool], waiting: tuple[str, ...], confidence: Confidence) -> Rule:
    """A rule on ranks that are in no wait while the others are. A weak suspicion needs a clear majority."""
    return Rule(
        kind="OutsideCollective",
        who=who,
        suspects=_stacked_where(wanted),
        waiting=waiting,
        half_of="answered",
        outnumber="three times" if confidence is Confidence.LOW else "more",
        confidence=confidence,
        weigh=_weigh_outside,
        words=lambda suspicion: wording.outside(suspicion.suspects, suspicion.others),
    )


RULES: tuple[Rule, ...] = (
    Rule(
        kind="RankGone",
        who="have no process any more (or a zombie) on a node that answers",
        suspects=lambda scene: scene.gone,
        waiting=("ranks", "gpu"),
        half_of="others",
        outnumber="as many",
        confidence=Confidence.HIGH,
        weigh=_weigh_gone,
        words=lambda suspicion: wording.gone(suspicion.suspects, suspicion.others),
    ),
    Rule(
        kind="RankBlocked",
        who="are in state `D` in every round",
        suspects=_in_state(BLOCKED_STATES),
        waiting=("ranks", "gpu"),
        half_of="others",
        outnumber="as many",
        confidence=Confidence.HIGH,
        weigh=_weigh_blocked,
        words=lambda suspicion: wording.blocked(suspicion.suspects, suspicion.others),
    ),
    Rule(
        kind="RankStopped",
        who="are in state `T` or `t` in every round (SIGSTOP, a debugger, a tracer)",
        suspects=_in_state(STOPPED_STATES),
        waiting=("ranks", "gpu"),
        half_of="others",
        outnumber="as many",
        confidence=Confidence.HIGH,
        weigh=_weigh_stopped,
        words=lambda suspicion: wording.stopped(suspicion.suspects, suspicion.others),
    ),
    Rule(
        kind="RankUndumpable",
        who="cannot be dumped, by a fault that says something of them",
        suspects=lambda scene: scene.failed,
        waiting=("ranks", "gpu"),
        half_of="others",
        outnumber="as many",
        confidence=Confidence.MEDIUM,
        weigh=_weigh_undumpable,
        words=_say_undumpable,
    ),
    _outside(
        "are busy or stuck by themselves, or hold the GIL in a function that no rule knows",
        lambda group: _waits_for(group) == "nothing",
        ("ranks", "gpu", "lock", "thread"),
        Confidence.HIGH,
    ),
    _outside(
        "leave the job, while the others wait in it",
        lambda group: activity.known(group.activity).leaves_the_job,
        ("ranks",),
        Confidence.MEDIUM,
    ),
    _outside(
        "wait for a lock or a thread",
        lambda group: group.waits_for in {"lock", "thread"},
        ("ranks", "gpu"),
        Confidence.MEDIUM,
    ),
    _outside(
        "stand behind the GPU, but hold the GIL (extensions can hold it while they wait, so this is weaker)",
        lambda group: group.waits_for == "gpu" and group.holds_gil,
        ("ranks", "gpu"),
        Confidence.MEDIUM,
    ),
    _outside(
        "are in functions that no rule knows",
        lambda group: _waits_for(group) == "unknown",
        ("ranks",),
        Confidence.LOW,
    ),
    _outside(
        "stand behind the GPU, but move",
        lambda group: group.waits_for == "gpu" and group.motion is Motion.MOVING,
        ("ranks",),
        Confidence.MEDIUM,
    ),
    _outside("stand behind the GPU", lambda group: group.waits_for == "gpu", ("ranks",), Confidence.LOW),
)
"""The rules by which ranks are accused, in their order. Section 4 of docs/verdicts.md is printed from them."""


# --- where nobody is accused ---------------------------------------------------------------------------------------


def _moving(scene: _Scene) -> Verdict | None:
    members = [member for group in scene.stacked for member in group.members]
    moving = sum(member.motion is Motion.MOVING for member in members)
    if moving * 2 <= len(members):
        return None
    return _nobody("Moving", wording.moving(scene.stacked, moving, len(members)), scene)


def _waiting_together(scene: _Scene) -> Verdict | None:
    """Everybody waits: in one place, in roles of one collective, or in different places."""
    groups = scene.stacked
    if not groups or scene.failed or any(group.waits_for not in {"ranks", "gpu"} for group in groups):
        return None
    if len(groups) > 1 and not _only_roles(groups):
        return _nobody("Mismatch", wording.mismatch(groups), scene)
    if len(groups) > 1:
        message = wording.roles(groups, scene.answered)
    else:
        message = wording.together(groups[0], scene.answered, scene.grouping.world_size)
    return _nobody("AllWaiting", message + wording.where_to_look(scene.grouping), scene)


def _all_alike(scene: _Scene) -> Verdict | None:
    if len(scene.stacked) != 1 or scene.failed:
        return None
    message = wording.together(scene.stacked[0], scene.answered, scene.grouping.world_size)
    return _nobody("AllAlike", message + wording.where_to_look(scene.grouping), scene)


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


def _nobody(kind: str, message: str, scene: _Scene) -> Verdict:
    return Verdict(kind=kind, message=_sentence(message), evidence=votes.context(scene.grouping))


# --- facts of several groups ---------------------------------------------------------------------------------------


def _size(groups: Iterable[Group]) -> int:
    return sum(group.size for group in groups)


def _waits_for(group: Group) -> str:
    """What a group waits for; who runs Python that no rule knows waits for nothing."""
    return "nothing" if group.runs_python else group.waits_for


def _part(group: Group, wanted: Callable[[Member], bool]) -> Group | None:
    """The group with only these members, None without any."""
    members = tuple(member for member in group.members if wanted(member))
    return structs.replace(group, members=members) if members else None


def _without(suspects: Sequence[Group], groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups without the suspected members."""
    suspected = {member.id for group in suspects for member in group.members}
    parts = (_part(group, lambda member: member.id not in suspected) for group in groups)
    return tuple(part for part in parts if part)


def _fewest_neighbours(suspicion: _Suspicion) -> int:
    return min(_neighbours(suspicion.scene.stacked, group) for group in suspicion.suspects)


def _neighbours(stacked: Sequence[Group], group: Group) -> int:
    """How many ranks could be dumped on each node of this group, at least."""
    dumped = Counter(member.id.node for other in stacked for member in other.members)
    return min(dumped[node] for node in {member.id.node for member in group.members})


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
