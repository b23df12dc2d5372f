"""Search for the ranks that block a job. Only this module decides which rank is named. See docs/verdicts.md. Pure."""

from collections.abc import Iterator, Sequence

from hangwatch.collectives.process_groups import process_key
from hangwatch.model import Confidence, Group, Motion, Signature
from hangwatch.stacks import activity_table
from hangwatch.stacks.side_threads import with_thread
from hangwatch.verdict import kinds
from hangwatch.verdict.check_first import CHECK_FIRST
from hangwatch.verdict.findings import Finding, Rule
from hangwatch.verdict.measurements import is_supported, machine_says_the_same
from hangwatch.verdict.rules import RULES
from hangwatch.verdict.scene import (
    Scene,
    count_ranks,
    is_answered_by_process,
    is_collective,
    keep_groups,
    may_be_behind_gpu,
    remove_suspects,
    waits_for,
    waits_in_program,
)
from hangwatch.verdict.sequence_rules import Answer, decide_by_records

_CONFIDENCES = (Confidence.NONE, Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH)


def find(scene: Scene) -> Finding:
    """Return the finding with the strongest evidence. For a job that progresses or is idle, it has no suspects.

    Exception: a rank is named even if no rank is overdue.

    The order of evidence: a rank named by sequence numbers, a rank named by the kernel, other results of sequence
    numbers, the stacks. A rank to which the stacks point is not named if sequence numbers show that it has joined.
    A rank is never named only because it did not respond. Launchers are not ranks.
    """
    if scene.launchers and len(scene.launchers) == len(scene.grouping.members):
        return Finding("NoRanks", scene)
    is_paused = scene.health == "NoHangSeen"
    if scene.health is not None and not is_paused:
        return Finding(scene.health, scene, others=scene.stacked)
    answer = decide_by_records(scene.grouping)
    finding = _decide(scene, answer)._replace(answer=answer)
    if is_paused and not finding.is_named:
        return Finding("NoHangSeen", scene, others=scene.stacked)
    return finding


def _decide(scene: Scene, answer: Answer) -> Finding:
    by_numbers = _by_numbers(scene, answer)
    if by_numbers is not None and by_numbers.is_named:
        return _with_those_behind_gpu(by_numbers, answer) or by_numbers
    suspicion = next(_passing(RULES, scene, decides=True), None)
    named = _name(suspicion) if suspicion is not None and _is_supported_by_half(suspicion) else None
    is_by_stack = named is not None and not kinds.find(named.kind).by_kernel
    if by_numbers is not None and (named is None or (is_by_stack and not answer.is_still_open)):
        return by_numbers
    if named is not None and is_by_stack:
        if all(process_key(member.id) in answer.graph.joined for member in named.members):
            contradicted = named._replace(answer=answer)
            return named._replace(
                kind="Contradiction", confidence=Confidence.NONE, by_numbers=True, contradicted=contradicted
            )
        unnamed = _with_those_behind_gpu(named, answer) or (named if _may_not_wait(named) else None)
        if unnamed is not None:
            return unnamed._replace(kind=_find_unnamed(scene).kind, sentence="differs", confidence=Confidence.NONE)
    if named is not None:
        return named
    return _find_common_cause(scene, answer) or _find_check_first(scene, answer, is_without_suspicion=suspicion is None)


# --- by sequence numbers ---------------------------------------------------------------------------------------------


def _by_numbers(scene: Scene, answer: Answer) -> Finding | None:
    """Return the finding by sequence numbers. None if they show nothing; then the rules on stacks decide."""
    odd = scene.odd_gpu if answer.kind == "AllJoined" and not answer.is_still_open else None
    ranks = {process_key(odd.member.id)} - {None} if odd is not None else set(answer.named or answer.check_first)
    suspects = tuple(
        keep_groups(scene.grouping.groups, lambda member: process_key(member.id) in ranks) if ranks else ()
    )
    suspects = tuple(with_thread(group, answer.find_thread(group)) for group in suspects)
    members = [member for group in suspects for member in group.members]
    is_late = answer.kind == "NotJoined" and 0 < len(members) <= len(answer.graph.waiting)
    if answer.named or (is_late and scene.are_settled_by_kernel(members)):
        is_sure = bool(answer.named) and not answer.graph.is_partial
        is_outside = any(member.signature is Signature.AWAITS_OUTSIDE for member in members)
        confidence = Confidence.HIGH if is_sure and not is_outside else Confidence.MEDIUM
        return Finding(
            kind=answer.kind,
            scene=scene,
            suspects=suspects,
            others=remove_suspects(suspects, scene.stacked),
            confidence=Confidence.LOW if _may_be_innocent(scene, suspects, answer) else confidence,
            by_numbers=True,
        )
    if answer.kind == "Unknown" or (answer.kind == "NotJoined" and not suspects):
        return None
    sentence = "still_open" if answer.is_still_open else ""
    return Finding(answer.kind, scene, suspects, sentence=sentence, by_numbers=True, odd_gpu=odd if suspects else None)


def _may_be_innocent(scene: Scene, suspects: Sequence[Group], answer: Answer) -> bool:
    """True if all suspects only poll, sleep or wait for a lock, and another awaited rank has not joined either.

    That other rank may wait for a hung GPU, and the suspects may wait for that rank.
    """
    others = set(answer.graph.awaited) - set(answer.named or answer.check_first) - answer.graph.busy
    is_outside = any(
        group.waits_for != "ranks" and any(process_key(member.id) in others for member in group.members)
        for group in scene.stacked
    )
    return is_outside and all(map(waits_in_program, suspects))


# --- by rules --------------------------------------------------------------------------------------------------------


def _passing(rules: Sequence[Rule], scene: Scene, *, decides: bool = False) -> Iterator[Finding]:
    """Yield a finding for each rule that has suspects and enough ranks that wait for them.

    With `decides`, the first rule on stacks that has suspects ends the search. Exception: a rule with `gives_way` does
    not end it. Most ranks exiting together is normal; another rank may be blocking them.
    """
    for rule in rules:
        suspects = tuple(rule.suspects(scene))
        if not suspects:
            continue
        finding = Finding(
            kind=rule.kind,
            scene=scene,
            suspects=suspects,
            others=remove_suspects(suspects, scene.stacked),
            sentence=rule.sentence,
            rule=rule,
        )
        if _passes(finding, rule):
            yield finding
        if decides and rule.by_stack and not rule.gives_way:
            return


def _passes(finding: Finding, rule: Rule) -> bool:
    """True if enough other ranks wait as the rule requires, and they outnumber the suspects as the rule requires."""
    scene, suspects, waiting = finding.scene, len(finding.members), finding.waiting(*rule.waiting)
    enough = {
        "as many": waiting >= suspects,
        "more": waiting > suspects or waiting == suspects == 1,
        "twice": waiting >= 2 * suspects,
        "three times": waiting >= 3 * suspects,
    }
    others = count_ranks(finding.others)
    whole = {
        "dumped": others,
        "others": others + count_ranks(remove_suspects(finding.suspects, scene.failed)),
        "answered": scene.answered,
    }
    return enough[rule.outnumber] and waiting * 2 >= whole[rule.half_of]


def _is_supported_by_half(finding: Finding) -> bool:
    """True if the suspects and the ranks that wait for them are at least half of `scene.existing`.

    This test comes after the choice of a rule. So a rank that did not respond never makes another rule apply. For a
    rule of low confidence, all ranks must have responded: the others may wait for a rank that did not respond.
    """
    scene, rule, suspects = finding.scene, finding.rule, len(finding.members)
    assert rule is not None
    waiting = finding.waiting(*rule.waiting)
    if rule.confidence is Confidence.LOW and scene.answered < scene.existing:
        return False
    if rule.outnumber == "more" and waiting == suspects:
        return scene.grouping.expected_rank_count == 2
    return 2 * (waiting + suspects) >= scene.existing


def _name(finding: Finding) -> Finding:
    """Return the finding with a confidence, so that its suspects are named.

    Measurements may raise the confidence of the rule by one step. A verdict on one node has medium confidence at most.
    """
    rule, members = finding.rule, finding.members
    assert rule is not None
    sure = _CONFIDENCES.index(rule.weigh(finding) if rule.weigh is not None else rule.confidence)
    if rule.may_name or is_supported(members, finding.others):
        sure = min(sure + 1, len(_CONFIDENCES) - 1)
    apart = _stand_apart(finding) if rule.by_stack else ()
    is_outside = any(member.signature is Signature.AWAITS_OUTSIDE for member in members)  # the peer may respond later
    if is_outside or finding.scene.is_part or apart:
        sure = min(sure, _CONFIDENCES.index(Confidence.MEDIUM))
    return finding._replace(confidence=_CONFIDENCES[sure], apart=apart)


def _stand_apart(finding: Finding) -> tuple[Group, ...]:
    """Return other groups that may be late and are in no known wait. () if they have more ranks than the suspects."""
    apart = tuple(
        group for group in finding.others if waits_for(group) == "unknown" and finding.scene.may_be_cause(group)
    )
    return apart if count_ranks(apart) <= len(finding.members) else ()


def _with_those_behind_gpu(finding: Finding, answer: Answer) -> Finding | None:
    """Return the finding with its suspects and those that wait for their GPU outside of a collective; none is named.

    Their kernel may never end, and suspects that only poll, rest or want a lock may wait for it. Groups that wait in an
    operation by sequence numbers are left out. None without such groups, or if no other group is left to wait.
    """

    def may_be_cause(group: Group) -> bool:
        is_apart = waits_for(group) == "gpu" and not is_collective(group)
        return is_apart and not any(process_key(member.id) in answer.graph.waiting for member in group.members)

    behind = tuple(filter(may_be_cause, finding.others))
    is_rare = count_ranks(behind) <= len(finding.members) and len(behind) < len(finding.others)
    if not behind or not is_rare or not all(map(waits_in_program, finding.suspects)):
        return None
    suspects = (*finding.suspects, *behind)
    others = remove_suspects(suspects, finding.scene.stacked)
    return finding._replace(suspects=suspects, others=others, confidence=Confidence.NONE)


def _may_not_wait(finding: Finding) -> bool:
    """True if only busy GPUs, or the kernel's part of their stacks, show that the others wait.

    Without the power of these GPUs at work, a GPU with little work looks like a GPU on which a kernel only waits. Only
    a daemon measures that power. A futex in a stack of the kernel may be any wait, or a short one.
    """
    rule = finding.rule
    assert rule is not None
    waiting = [group for group in finding.others if waits_for(group) in rule.waiting]
    in_kernel = {"[kernel]"}
    return bool(waiting) and all(
        _waits_by_use_alone(group) or {frame.file for frame in group.frames} == in_kernel for group in waiting
    )


def _waits_by_use_alone(group: Group) -> bool:
    """True if only the utilization of its GPUs shows that a group waits. Its stack and its GPU power show no wait."""
    by_stack = activity_table.find_activity(group.activity).waits_for
    return by_stack != group.waits_for and all(
        member.signature is Signature.BEHIND_GPU and member.gpu.busy_power_ratio is None for member in group.members
    )


# --- if no rank is named ----------------------------------------------------------------------------------------------


def _find_common_cause(scene: Scene, answer: Answer) -> Finding | None:
    """Return a finding if one thing outside of the ranks holds most of them; else None. It is one of these:

    * A file system with their program, which does not respond, so that at least half of the ranks have no stack. Ranks
      that wait for it in the kernel are named if they are at most half of the ranks without a stack.
    * An address that no other node can reach: all ranks wait, and most of them there.
    * A store that refuses all ranks, except any that serve a store at another address.
    """
    shut, held = len(scene.without_stack), sum(member.kernel.waits_for_mount for member in scene.without_stack)
    if shut and shut * 2 >= len(scene.grouping.members):
        is_named = 0 < held * 2 <= shut
        confidence = Confidence.MEDIUM if is_named else Confidence.NONE
        return Finding("MountSilent", scene, scene.waiting_for_mount if is_named else (), confidence=confidence)
    all_wait = not answer.graph.have_communicated and all(group.waits_for == "ranks" for group in scene.stacked)
    if all_wait and len(scene.at_unreachable_address) * 2 > scene.stacks:
        return Finding("WrongInterface", scene)
    if scene.refused and len(scene.refused) + len(scene.store_servers) >= scene.stacks:
        return Finding("MasterRefused", scene, sentence="refused")
    return None


def _only_waits(finding: Finding, answer: Answer) -> bool:
    """True if the suspects of a rule on stacks wait in operations that others have not joined.

    By the flight recorders, no rank waits for them.
    """
    if not answer.graph.awaited or finding.rule is None or not finding.rule.by_stack:
        return False
    only_wait = answer.graph.waiting - answer.graph.awaited.keys()
    are_in_collective = all(map(is_collective, finding.suspects))
    return are_in_collective and all(process_key(member.id) in only_wait for member in finding.members)


def _find_check_first(scene: Scene, answer: Answer, *, is_without_suspicion: bool) -> Finding:
    """Return the finding on ranks to check first. If there are none, return the finding on where all ranks are.

    Ranks that only wait for ranks which have not joined are never checked first.

    The ranks are named with low confidence if the measurements agree and `is_without_suspicion` is true. It is true if
    no rule on stacks would name a rank, even if more ranks had responded.
    """
    unnamed = _find_unnamed(scene)
    lead = next((finding for finding in _passing(CHECK_FIRST, scene.by_line) if not _only_waits(finding, answer)), None)
    if lead is None or not _is_supported_by_half(lead):
        return _with_odd_gpu(unnamed) or _with_blocked_ranks(unnamed) or _with_stuck_task(unnamed) or unnamed
    may_be_victims = any(member.waits.asks_rank is not None or may_be_behind_gpu(member) for member in lead.members)
    may_name = is_without_suspicion and lead.rule is not None and lead.rule.may_name and not may_be_victims
    if may_name and machine_says_the_same(lead.members, lead.others):
        return _name(lead)
    if is_without_suspicion and not may_be_victims and (named := _name_by_kernel(lead)) is not None:
        return named
    return lead._replace(kind=unnamed.kind)


def _name_by_kernel(lead: Finding) -> Finding | None:
    """Name ranks to check first if the kernel shows that each is blocked in a call which no rank ends.

    Half of the ranks must wait for ranks, GPUs or a lock: if all were blocked like this, none of them would be odd.
    """
    waiting = lead.waiting("ranks", "gpu", "lock")
    if lead.rule is None or waiting < len(lead.members) or waiting * 2 < lead.scene.answered:
        return None
    if not lead.scene.are_settled_by_kernel(lead.members) or _may_not_wait(lead):
        return None
    lead = lead._replace(rule=lead.rule._replace(confidence=Confidence.LOW))
    return _name(lead) if _is_supported_by_half(lead) else None


def _with_odd_gpu(unnamed: Finding) -> Finding | None:
    """Return a finding if all ranks wait in one place and one GPU differs: its kernel may never have begun."""
    grouping, odd = unnamed.scene.grouping, unnamed.scene.odd_gpu
    if unnamed.kind != "AllWaiting" or odd is None or len(grouping.members) < grouping.expected_rank_count:
        return None
    suspects = keep_groups(grouping.groups, lambda member: member is odd.member)
    return unnamed._replace(suspects=tuple(suspects), odd_gpu=odd)


def _with_blocked_ranks(unnamed: Finding) -> Finding | None:
    """Return a finding if at most half of the ranks are blocked in a call that no rank ends; else None.

    The others poll, have ended or are elsewhere, so it is not known if they wait for these ranks. Of each group, the
    call of one rank is known.
    """
    scene = unnamed.scene
    suspects = tuple(
        group for group in scene.stacked if any(scene.are_settled_by_kernel([member]) for member in group.members)
    )
    is_odd = 0 < 2 * count_ranks(suspects) <= scene.grouping.expected_rank_count
    return unnamed._replace(suspects=suspects) if is_odd else None


def _with_stuck_task(unnamed: Finding) -> Finding | None:
    """Return a finding if all ranks are in one place, but a quarter of them or fewer have a stuck task; else None.

    It is a task of a `ThreadPoolExecutor` in the user's code.
    """
    scene = unnamed.scene
    group = scene.stacked[0] if len(scene.stacked) == 1 and not scene.failed else None
    suspects = keep_groups((group,) if group is not None else (), lambda member: member.stack.task is not None)
    odd = count_ranks(suspects)
    if group is None or not odd or 4 * odd > group.size or group.motion is Motion.MOVING:
        return None
    return unnamed._replace(suspects=tuple(suspects))


def _find_unnamed(scene: Scene) -> Finding:
    """Return the finding on where the ranks are, if no rank is named."""
    groups, fine = scene.stacked, scene.by_line
    wait = all(group.waits_for in {"ranks", "gpu"} for group in groups)
    if groups and not scene.failed:
        if fine.are_at_different_lines:
            return Finding(
                "Mismatch" if wait else "CannotTell", scene, others=fine.stacked, sentence="at_different_lines"
            )
        if len(groups) == 1:
            return Finding("AllWaiting" if wait else "AllAlike", scene, others=groups)
        if wait and scene.only_roles:
            return Finding("AllWaiting", scene, others=groups, sentence="roles")
        if all(map(is_answered_by_process, groups)):
            return Finding("CannotTell", scene, others=groups, sentence="servers")
        if wait:
            return Finding("Mismatch", scene, others=groups, sentence="at_different_places")
    return Finding("CannotTell", scene, others=groups)
