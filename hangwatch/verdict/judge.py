"""Pure: groups -> verdict: who is the odd one and how sure, or why nobody can be named. The rules: docs/verdicts.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import structs

from hangwatch import words
from hangwatch.collectives import nccl_counts, wait_graph
from hangwatch.model import Confidence, FirstLook, Group, Grouping, JobState, Motion, RankId, Signature, Verdict
from hangwatch.stacks.idle_reasons import is_refused, is_serving, resting_state
from hangwatch.verdict import clauses, guidance, sentences, sequence_numbers
from hangwatch.verdict import evidence as votes
from hangwatch.verdict.check_first import FIRST_LOOKS, by_line, have_parted
from hangwatch.verdict.rules import (
    RULES,
    Rule,
    Scene,
    Suspicion,
    count_ranks,
    may_be_behind_gpu,
    may_be_late,
    only_roles,
    survey,
    waits_for,
    without,
)

_CONFIDENCES = (Confidence.NONE, Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH)


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
        message = sentences.no_ranks(launchers, grouping.groups)
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
    """The verdict on ranks, with what the kernel says of those at whom it points."""
    scene = survey(grouping, ranks_here)
    verdict = _moving(scene) or _resting(scene) or _by_number(scene)
    pointed = {_key(rank) for rank in (*verdict.named, *verdict.first_look)}
    members = [member for member in grouping.members if _key(member.id) in pointed]
    calls = votes.in_kernel(members, grouping.members)
    is_one = len(calls) == len(pointed) == 1 and clauses.tells_call(members[0])
    said = f" In the kernel, {calls[0].message}." if is_one else ""
    dead = (*votes.died(grouping.members, verdict.named), *votes.kernel_log(grouping.members, verdict.named))
    machine = (*dead, *votes.machine(grouping.members))
    evidence = (*verdict.evidence, *calls, *nccl_counts.evidence(grouping.members), *machine)
    return structs.replace(verdict, message=verdict.message + said, evidence=evidence)


def _key(rank: RankId) -> tuple[object, ...]:
    return rank.node, rank.rank, rank.local_rank, rank.pid


def _by_number(scene: Scene) -> Verdict:
    """Who is accused by sequence numbers and stacks together, else how the ranks stand, with what the numbers show.

    Where numbers name somebody they decide, then what the kernel says of a rank, then what else the numbers tell; where
    they tell nothing the stacks stand, unless the numbers show that whom these accuse has come. NCCL's own counts are
    weaker: who is not named by them is told only where stacks accuse nobody.
    """
    found = sequence_numbers.answer(scene)
    by_numbers = sequence_numbers.verdict(found, scene)
    if by_numbers is not None and by_numbers.named:
        return _at_most_here(by_numbers, scene)
    accused = _accused(scene)
    if by_numbers is not None and (accused is None or (_is_by_stack(accused) and _decides(found))):
        return _at_most_here(by_numbers, scene)
    both = sequence_numbers.contradicts(found, accused) if accused is not None and _is_by_stack(accused) else None
    if both is not None:
        return both
    enclosed = None if sequence_numbers.have_met(found) else _enclosed(scene)
    verdict = accused or _mount_silent(scene) or enclosed or _refused(scene) or _open(scene)
    beside = () if verdict is enclosed or sequence_numbers.have_met(found) else votes.enclosed(scene.grouping)
    return structs.replace(verdict, evidence=(*verdict.evidence, *sequence_numbers.evidence(found), *beside))


def _decides(found: wait_graph.Answer) -> bool:
    """Whether it stands above an accusation by stacks: not NCCL's own counts, nor that ranks are still in something."""
    return not found.by_counts and found.kind != "still_open"


def _is_by_stack(accused: Verdict) -> bool:
    return accused.kind not in {"RankGone", "RankBlocked", "RankStopped"}


def _at_most_here(verdict: Verdict, scene: Scene) -> Verdict:
    return structs.replace(verdict, message=verdict.message + _view(scene))


def _open(scene: Scene) -> Verdict:
    """Nobody is accused by stacks alone: whom to look at first, else how the ranks stand.

    Those to look at first are named, with low confidence, where the machine says the same of them.
    """
    fine = by_line(scene)
    kind, message = _standing(scene, fine)
    lead = next(_passing(FIRST_LOOKS, fine), None)
    if lead is None or not _covers(lead):
        return _odd_gpu(kind, message, scene) or _stuck_task(kind, message, scene) or _nobody(kind, message, scene)
    silent_rule = next(_passing(RULES, scene, decides=True), None)  # one that would speak if more had answered
    may_be_victims = any(member.asks_rank is not None or may_be_behind_gpu(member) for member in lead.members)
    may_name = lead.rule.may_name and not may_be_victims
    if silent_rule is None and may_name and votes.machine_says_the_same(lead.members, lead.others):
        return _accuse(lead)
    return _look_first(lead, kind)


# --- who is accused ------------------------------------------------------------------------------------------------


def _accused(scene: Scene) -> Verdict | None:
    """The first rule with suspects that passes the gate. Of the rules on stacks the first with suspects decides.

    But for rules that give way: who leaves together with most others is no news, and another may hold them all.
    """
    suspicion = next(_passing(RULES, scene, decides=True), None)
    return _accuse(suspicion) if suspicion is not None and _covers(suspicion) else None


def _passing(rules: Sequence[Rule], scene: Scene, *, decides: bool = False) -> Iterator[Suspicion]:
    """What rules find that passes the gate; with `decides` up to the first rule on stacks that finds anybody."""
    for rule in rules:
        suspects = tuple(rule.suspects(scene))
        if not suspects:
            continue
        others = without(suspects, scene.stacked)
        rest = count_ranks(others) + count_ranks(without(suspects, scene.failed))
        suspicion = Suspicion(rule, scene, suspects, others, rest)
        if _passes(suspicion):
            yield suspicion
        if decides and rule.by_stack and not rule.gives_way:
            return


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

    Asked of the rule that was chosen, so that who did not answer never makes another one speak. A weak suspicion speaks
    only where all answered: whom the others wait for may be the one that did not.
    """
    scene, waiting, suspects = suspicion.scene, suspicion.waiting(*suspicion.rule.waiting), len(suspicion.members)
    if suspicion.rule.confidence is Confidence.LOW and scene.answered < scene.existing:
        return False
    if suspicion.rule.outnumber == "more" and waiting == suspects:
        return scene.grouping.ranks_known == 2
    return 2 * (waiting + suspects) >= scene.existing


def _accuse(suspicion: Suspicion) -> Verdict:
    """A verdict on all suspects. A vote of the machine raises the confidence; one node alone allows medium at most."""
    grouping = suspicion.scene.grouping
    evidence = votes.on_accused(suspicion.suspects, suspicion.members, suspicion.others)
    sure = _CONFIDENCES.index(suspicion.rule.weigh(suspicion))
    if suspicion.rule.may_name or any(vote.supports and vote.kind in votes.MACHINE for vote in evidence):
        sure = min(sure + 1, len(_CONFIDENCES) - 1)
    if any(member.signature is Signature.AWAITS_OUTSIDE for member in suspicion.members):
        sure = min(sure, _CONFIDENCES.index(Confidence.MEDIUM))  # whether that one answers is not seen from here
    apart = _apart(suspicion) if suspicion.rule.by_stack else []
    if suspicion.scene.is_part or apart:
        sure = min(sure, _CONFIDENCES.index(Confidence.MEDIUM))
    said = suspicion.rule.words(suspicion)
    if suspicion.rule.settle is not None:  # why to look at them first, which says "it"
        said = sentences.named(suspicion.suspects, said)
    return Verdict(
        kind=suspicion.rule.kind,
        message=_sentence(said)
        + sentences.apart_too(apart)
        + sentences.whole_nodes(suspicion.members, grouping)
        + _view(suspicion.scene),
        named=tuple(sorted((member.id for member in suspicion.members), key=RankId.sort_key)),
        confidence=_CONFIDENCES[sure],
        evidence=(*evidence, *votes.absence(grouping)),
    )


def _apart(suspicion: Suspicion) -> list[Group]:
    """Few ranks beside the suspects that may be late, too, in no wait that is known: one of them may hold up all."""
    may_be = may_be_late(suspicion.scene)
    found = [
        group
        for group in suspicion.others
        if waits_for(group) == "unknown" and group.motion is not Motion.MOVING and all(map(may_be, group.members))
    ]
    return found if count_ranks(found) <= len(suspicion.members) else []


# --- where nobody is accused ---------------------------------------------------------------------------------------


def _moving(scene: Scene) -> Verdict | None:
    members = [member for group in scene.stacked for member in group.members]
    moving = sum(member.motion is Motion.MOVING for member in members)
    if moving * 2 <= len(members):
        return None
    return _nobody("Moving", sentences.moving(scene.stacked, moving, len(members)), scene)


def _resting(scene: Scene) -> Verdict | None:
    if is_serving(scene.grouping):
        return _nobody("Serving", sentences.serving(scene.stacked), scene)
    match resting_state(scene.grouping):
        case JobState.SUSPENDED:
            return _nobody("Suspended", sentences.suspended(scene.grouping), scene)
        case JobState.OVER:
            return _nobody("Over", sentences.over(scene.stacked), scene)
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
        message=_sentence(sentences.mount_silent(shut, held)),
        named=tuple(sorted((member.id for member in named), key=RankId.sort_key)),
        confidence=Confidence.MEDIUM if named else Confidence.NONE,
        evidence=votes.context(scene.grouping),
    )


def _enclosed(scene: Scene) -> Verdict | None:
    """All wait for ranks, and most where no other node can reach them, while the job has ranks there."""
    members = [member for group in scene.stacked for member in group.members]
    enclosed = [member for member in members if member.enclosed_at is not None]
    all_wait = all(group.waits_for == "ranks" for group in scene.stacked)
    if not enclosed or not all_wait or len(enclosed) * 2 <= len(members):
        return None
    return _nobody("WrongInterface", sentences.enclosed(enclosed, len(members)) + _view(scene), scene)


def _refused(scene: Scene) -> Verdict | None:
    """All want to meet at the store and are refused there, but for a rank that serves it itself, at another address."""
    members = [(group, member) for group in scene.stacked for member in group.members]
    refused = [member for group, member in members if is_refused(group, member)]
    serving = [member for _, member in members if member.store is not None and member.store.socket == "serving"]
    if not refused or len(refused) + len(serving) < len(members):
        return None
    return _nobody("MasterRefused", sentences.refused(refused, serving) + _view(scene), scene)


def _odd_gpu(kind: str, message: str, scene: Scene) -> Verdict | None:
    """All ranks of the job wait alike, and of one the GPU stands out: only that one's kernel may never have begun."""
    members = scene.grouping.members
    odd = votes.odd_gpu(members)
    if kind != "AllWaiting" or odd is None or len(members) < scene.grouping.ranks_known:
        return None
    rank, why = odd[0].id, odd[1]
    where = f" Look first at {words.who([rank])}: {why}. What would settle it: {guidance.ITS_GPU}. Nobody is accused."
    first = FirstLook(**structs.asdict(rank), why=why, settle=guidance.ITS_GPU)
    return structs.replace(_nobody(kind, message + where, scene), first_look=(first,))


def _stuck_task(kind: str, message: str, scene: Scene) -> Verdict | None:
    """All ranks stand alike, still, but for a task of an executor that few have, stuck in the program's own code."""
    members = scene.stacked[0].members if len(scene.stacked) == 1 and not scene.failed else ()
    odd = [member for member in members if member.task is not None]
    if not odd or 4 * len(odd) > len(members) or any(member.motion is Motion.MOVING for member in members):
        return None
    settle = sentences.native_frames(odd)
    looks = tuple(
        FirstLook(**structs.asdict(member.id), why=sentences.stuck_task(member), settle=settle) for member in odd
    )
    found = f"{message} {_sentence(sentences.look_at_tasks(odd, settle))}"
    return structs.replace(_nobody(kind, found, scene), first_look=looks)


def _look_first(lead: Suspicion, kind: str) -> Verdict:
    """Nobody is accused; these stand apart for a reason that holds in general."""
    assert lead.rule.settle is not None
    grouping = lead.scene.grouping
    why, settle = lead.rule.words(lead), lead.rule.settle(lead)
    ids = sorted((member.id for member in lead.members), key=RankId.sort_key)
    numbers = votes.on_accused(lead.suspects, lead.members, lead.others)
    message = _sentence(sentences.look_first(lead.suspects, why, settle)) + _view(lead.scene)
    return Verdict(
        kind=kind,
        message=message + (guidance.where_to_look(grouping) if grouping.unanswered else ""),
        evidence=(*(structs.replace(vote, supports=None) for vote in numbers), *votes.context(grouping)),
        first_look=tuple(FirstLook(**structs.asdict(rank), why=why, settle=settle) for rank in ids),
    )


def _standing(scene: Scene, fine: Scene) -> tuple[str, str]:
    """How ranks stand of whom none is accused, as a kind and a sentence. `fine` is the scene, apart by lines, too."""
    groups, where_to_look = scene.stacked, guidance.where_to_look(scene.grouping)
    wait = all(group.waits_for in {"ranks", "gpu"} for group in groups)
    if groups and not scene.failed:
        if have_parted(fine):
            return "Mismatch" if wait else "CannotTell", sentences.apart(fine.stacked)
        if len(groups) == 1:
            message = sentences.together(groups[0], scene.answered, scene.grouping.world_size)
            return "AllWaiting" if wait else "AllAlike", message + where_to_look
        if wait and only_roles(groups):
            return "AllWaiting", sentences.roles(groups, scene.answered) + where_to_look
        if wait:
            return "Mismatch", sentences.mismatch(groups, has_numbers=scene.has_numbers)
    waiting = count_ranks(group for group in groups if group.waits)
    return "CannotTell", sentences.cannot_tell(groups, scene.answered, waiting, scene.existing) + where_to_look


def _nobody(kind: str, message: str, scene: Scene) -> Verdict:
    return Verdict(kind=kind, message=_sentence(message), evidence=votes.context(scene.grouping))


def _view(scene: Scene) -> str:
    return sentences.of_this_node(scene.existing, scene.grouping.ranks_known) if scene.is_part else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
