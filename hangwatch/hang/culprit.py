"""Pure: groups -> verdict: who is the odd one and how sure, or why nobody can be named. The rules: docs/verdicts.md."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from hangwatch.hang import activity, guidance, votes, wording
from hangwatch.hang import frames as stack_frames
from hangwatch.hang.rest import is_serving, resting_state
from hangwatch.hang.rules import RULES, Scene, Suspicion, count_ranks, survey, without
from hangwatch.model import Confidence, Frame, Group, Grouping, JobState, Motion, RankId, Signature, Verdict

_CONFIDENCES = (Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH)


def judge(grouping: Grouping, ranks_here: int | None = None) -> Verdict:
    """Name the odd ranks of a job with the evidence, or say why nobody can be named.

    `ranks_here` is how many ranks the job has on the one node that was looked at; None where the whole job was.

    A job at work or at rest accuses nobody; then the rules of `RULES` in their order, then what is left to say where
    nobody is accused. A rank that merely did not answer is never named. Launchers without ranks are no ranks: where
    nothing else is in view they are the verdict, else evidence.
    """
    launchers = [member for member in grouping.members if member.waiting]
    if not launchers:
        return _judged(grouping, ranks_here)
    ranks = _without_launchers(grouping)
    if not ranks.groups:
        message = wording.no_ranks(launchers, grouping.groups)
        return Verdict(kind="NoRanks", message=message, evidence=votes.context(grouping))
    verdict = _judged(ranks, ranks_here)
    return structs.replace(verdict, evidence=(*verdict.evidence, votes.launchers(launchers)))


def _without_launchers(grouping: Grouping) -> Grouping:
    groups = (
        structs.replace(group, members=tuple(member for member in group.members if not member.waiting))
        for group in grouping.groups
    )
    return structs.replace(grouping, groups=tuple(group for group in groups if group.members))


def _judged(grouping: Grouping, ranks_here: int | None) -> Verdict:
    """The verdict on ranks."""
    scene = survey(grouping, ranks_here)
    verdict = (
        _moving(scene)
        or _resting(scene)
        or _accused(scene)
        or _mount_silent(scene)
        or _waiting_together(scene)
        or _all_alike(scene)
    )
    if verdict is not None:
        return verdict
    waiting = count_ranks(group for group in scene.stacked if group.waits)
    message = wording.cannot_tell(scene.stacked, scene.answered, waiting, scene.existing)
    return _nobody("CannotTell", message + guidance.where_to_look(grouping), scene)


# --- who is accused ------------------------------------------------------------------------------------------------


def _accused(scene: Scene) -> Verdict | None:
    """The first rule with suspects that passes the gate. Of the rules on stacks the first with suspects decides.

    But for rules that give way: who leaves together with most others is no news, and another may hold them all.
    """
    for rule in RULES:
        suspects = tuple(rule.suspects(scene))
        if not suspects:
            continue
        others = without(suspects, scene.stacked)
        rest = count_ranks(others) + count_ranks(without(suspects, scene.failed))
        suspicion = Suspicion(rule, scene, suspects, others, rest)
        if _passes(suspicion):
            return _accuse(suspicion) if _covers(suspicion) else None
        if rule.by_stack and not rule.gives_way:
            return None
    return None


def _passes(suspicion: Suspicion) -> bool:
    """The one gate: enough of the others wait for what the rule asks, and they outnumber the suspects."""
    rule, suspects = suspicion.rule, len(suspicion.members)
    waiting = suspicion.waiting(*rule.waiting)
    enough = {
        "as many": waiting >= suspects,
        "more": waiting > suspects or waiting == suspects == 1,
        "three times": waiting >= 3 * suspects,
    }
    whole = {
        "dumped": count_ranks(suspicion.others),
        "others": suspicion.rest,
        "answered": suspicion.scene.answered,
    }
    return enough[rule.outnumber] and waiting * 2 >= whole[rule.half_of]


def _covers(suspicion: Suspicion) -> bool:
    """Whether the suspects and those who wait are half of the ranks that exist where was looked.

    Asked of the rule that was chosen, so that who did not answer never makes another one speak.
    """
    waiting, suspects = suspicion.waiting(*suspicion.rule.waiting), len(suspicion.members)
    if suspicion.rule.outnumber == "more" and waiting == suspects:
        return suspicion.scene.grouping.ranks_known == 2
    return 2 * (waiting + suspects) >= suspicion.scene.existing


def _accuse(suspicion: Suspicion) -> Verdict:
    """A verdict on all suspects. A vote of the machine raises the confidence; one node alone allows medium at most."""
    grouping = suspicion.scene.grouping
    evidence = votes.on_accused(suspicion.suspects, suspicion.members, suspicion.others)
    sure = _CONFIDENCES.index(suspicion.rule.weigh(suspicion))
    if any(vote.supports and vote.kind in votes.MACHINE for vote in evidence):
        sure = min(sure + 1, len(_CONFIDENCES) - 1)
    if any(member.signature is Signature.AWAITS_OUTSIDE for member in suspicion.members):
        sure = min(sure, _CONFIDENCES.index(Confidence.MEDIUM))  # whether that one answers is not seen from here
    if suspicion.scene.is_part:
        sure = min(sure, _CONFIDENCES.index(Confidence.MEDIUM))
    return Verdict(
        kind=suspicion.rule.kind,
        message=_sentence(suspicion.rule.words(suspicion)) + _view(suspicion.scene),
        named=tuple(sorted((member.id for member in suspicion.members), key=RankId.sort_key)),
        confidence=_CONFIDENCES[sure],
        evidence=(*evidence, *votes.absence(grouping)),
    )


# --- where nobody is accused ---------------------------------------------------------------------------------------


def _moving(scene: Scene) -> Verdict | None:
    members = [member for group in scene.stacked for member in group.members]
    moving = sum(member.motion is Motion.MOVING for member in members)
    if moving * 2 <= len(members):
        return None
    return _nobody("Moving", wording.moving(scene.stacked, moving, len(members)), scene)


def _resting(scene: Scene) -> Verdict | None:
    if is_serving(scene.grouping):
        return _nobody("Serving", wording.serving(scene.stacked), scene)
    match resting_state(scene.grouping):
        case JobState.SUSPENDED:
            return _nobody("Suspended", wording.suspended(scene.grouping), scene)
        case JobState.OVER:
            return _nobody("Over", wording.over(scene.stacked), scene)
    return None


def _mount_silent(scene: Scene) -> Verdict | None:
    """A file system under the program gives no answer, so that most ranks have no stack: the kernel's word counts.

    Named is who waits for it, where others do not: that these wait for who is named is likely, but not seen.
    """
    shut = [member for group in scene.shut for member in group.members]
    if not shut or len(shut) * 2 < len(scene.grouping.members):
        return None
    held = [member for member in shut if member.waits_for_mount]
    named = held if len(held) * 2 <= len(shut) else []
    return Verdict(
        kind="MountSilent",
        message=_sentence(wording.mount_silent(shut, held)),
        named=tuple(sorted((member.id for member in named), key=RankId.sort_key)),
        confidence=Confidence.MEDIUM if named else Confidence.NONE,
        evidence=votes.context(scene.grouping),
    )


def _waiting_together(scene: Scene) -> Verdict | None:
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
    return _nobody("AllWaiting", message + guidance.where_to_look(scene.grouping), scene)


def _all_alike(scene: Scene) -> Verdict | None:
    if len(scene.stacked) != 1 or scene.failed:
        return None
    message = wording.together(scene.stacked[0], scene.answered, scene.grouping.world_size)
    return _nobody("AllAlike", message + guidance.where_to_look(scene.grouping), scene)


def _only_roles(groups: Sequence[Group]) -> bool:
    """Sender and receivers of one rooted collective, entered through the same helper."""
    if len(groups) != 2 or not all(group.waits for group in groups):
        return False
    first, second = groups
    if first.operation != second.operation or not activity.is_marked("rooted", first.operation or ""):
        return False
    caller = _caller(first.frames)
    return caller is not None and caller == _caller(second.frames)


def _caller(frames: Sequence[Frame]) -> stack_frames.Place | None:
    """The frame that called the collective."""
    for frame in frames:
        if not activity.is_marked("collective", frame.function, frame.file) and not stack_frames.is_native(
            frame.function, frame.file
        ):
            return frame.function, stack_frames.short_path(frame.file)
    return None


def _nobody(kind: str, message: str, scene: Scene) -> Verdict:
    return Verdict(kind=kind, message=_sentence(message), evidence=votes.context(scene.grouping))


def _view(scene: Scene) -> str:
    return wording.of_this_node(scene.existing, scene.grouping.ranks_known) if scene.is_part else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
