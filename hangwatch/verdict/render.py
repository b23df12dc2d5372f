"""Pure: a finding -> its verdict. The one function that makes the text of a verdict, out of sentences by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

from msgspec import structs

from hangwatch import words
from hangwatch.model import Evidence, FirstLook, Group, Member, RankId, Verdict
from hangwatch.verdict import clauses, guidance, sentences, sequence_numbers
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.scene import count_ranks


def render(finding: Finding, evidence: Sequence[Evidence]) -> Verdict:
    """The verdict that a finding is, in words, with its evidence."""
    text = TEXTS[finding.says](finding)
    settle = SETTLES[finding.settle](finding) if finding.settle else ""
    ids = sorted((member.id for member in finding.members), key=RankId.sort_key)
    whys = {} if finding.is_named else {member.id: _why(finding, member, text) for member in finding.members}
    return Verdict(
        kind=finding.kind,
        message=_message(finding, text, settle) + _in_kernel(finding, evidence),
        named=tuple(ids) if finding.is_named else (),
        confidence=finding.confidence,
        evidence=tuple(evidence),
        first_look=tuple(FirstLook(**structs.asdict(rank), why=whys[rank], settle=settle) for rank in ids if whys),
    )


def _message(finding: Finding, text: str, settle: str) -> str:
    """The headline, and where it needs more: which ranks to check first, which stand apart, too, where to look."""
    grouping = finding.scene.grouping
    if finding.rule is None and not finding.by_numbers:
        if not finding.is_named and finding.suspects:
            why = _why(finding, finding.members[0], text)
            text = f"{text} {_sentence(sentences.look_first(finding.suspects, why, settle))}"
        return text if finding.says == "no_ranks" else _sentence(text)
    if finding.contradicted is not None:
        return f"Nobody is accused: {text}. By the stacks: {render(finding.contradicted, ()).message}"
    if finding.by_numbers:
        return _by_numbers(finding, text, settle) + _view(finding)
    if finding.is_named:
        text = sentences.named(finding.suspects, text) if settle else text
        more = sentences.apart_too(finding.apart) + sentences.whole_nodes(finding.members, grouping)
        return _sentence(text) + more + _view(finding)
    where_to_look = guidance.where_to_look(grouping) if grouping.unanswered else ""
    return _sentence(sentences.look_first(finding.suspects, text, settle)) + _view(finding) + where_to_look


def _by_numbers(finding: Finding, text: str, settle: str) -> str:
    if finding.is_named:
        return text + clauses.may_come(finding.members)
    ids = [member.id for member in finding.members]
    look = f" Look first at {words.who(ids)}. What would settle it: {settle}." if ids else ""
    return f"{text}{look} Nobody is accused."


def _why(finding: Finding, member: Member, text: str) -> str:
    """Why to check a rank first: the headline tells it, except where all ranks stand alike."""
    if finding.by_numbers or finding.rule is not None:
        return text
    return sentences.odd_gpu(finding.odd_gpu) if finding.odd_gpu is not None else sentences.stuck_task(member)


def _in_kernel(finding: Finding, evidence: Sequence[Evidence]) -> str:
    """The call in which the only suspect is, where more than its name is known."""
    calls = [one.message for one in evidence if one.kind == "system_call"]
    is_one = len(calls) == len(finding.members) == 1 and clauses.tells_call(finding.members[0])
    return f" In the kernel, {calls[0]}." if is_one else ""


def _view(finding: Finding) -> str:
    scene = finding.scene
    return sentences.of_this_node(scene.existing, scene.grouping.ranks_known) if scene.is_part else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- the texts by their names ----------------------------------------------------------------------------------------

Text = Callable[[Finding], str]


def _of_both(say: Callable[[Sequence[Group], Sequence[Group]], str]) -> Text:
    """A sentence on the suspects and the others."""
    return lambda finding: say(finding.suspects, finding.others)


def _gone_first(finding: Finding) -> str:
    return sentences.gone(finding.suspects, finding.others, finding.scene.gone)


def _undumpable(finding: Finding) -> str:
    return sentences.undumpable(finding.suspects, finding.others, finding.fewest_neighbours)


def _moving(finding: Finding) -> str:
    return sentences.moving(finding.others, finding.scene.moving, count_ranks(finding.others))


def _mount_silent(finding: Finding) -> str:
    shut = [member for group in finding.scene.shut for member in group.members]
    return sentences.mount_silent(shut, [member for member in shut if member.waits_for_mount])


def _enclosed(finding: Finding) -> str:
    members = [member for group in finding.scene.stacked for member in group.members]
    enclosed = [member for member in members if member.enclosed_at is not None]
    return sentences.enclosed(enclosed, len(members)) + _view(finding)


def _refused(finding: Finding) -> str:
    serving = [member for group in finding.others for member in group.members]
    return sentences.refused(finding.scene.refused, serving) + _view(finding)


def _together(finding: Finding) -> str:
    scene = finding.scene
    alike = sentences.together(finding.others[0], scene.answered, scene.grouping.world_size)
    return alike + guidance.where_to_look(scene.grouping)


def _roles(finding: Finding) -> str:
    return sentences.roles(finding.others, finding.scene.answered) + guidance.where_to_look(finding.scene.grouping)


def _cannot_tell(finding: Finding) -> str:
    scene, waiting = finding.scene, count_ranks(group for group in finding.others if group.waits)
    told = sentences.cannot_tell(finding.others, scene.answered, waiting, scene.existing)
    return told + guidance.where_to_look(scene.grouping)


TEXTS: MappingProxyType[str, Text] = MappingProxyType(
    {
        "no_ranks": lambda finding: sentences.no_ranks(finding.scene.launchers, finding.scene.grouping.groups),
        "Moving": _moving,
        "Serving": lambda finding: sentences.serving(finding.others),
        "Suspended": lambda finding: sentences.suspended(finding.scene.grouping),
        "Over": lambda finding: sentences.over(finding.others),
        "not_come": sequence_numbers.not_come,
        "may_not_come": sequence_numbers.may_not_come,
        "circle_by_number": sequence_numbers.circle,
        "still_open_by_number": sequence_numbers.still_open,
        "not_reached_by_number": sequence_numbers.not_reached,
        "mismatch_by_number": sequence_numbers.mismatch,
        "everybody": sequence_numbers.everybody,
        "contradiction": sequence_numbers.contradiction,
        "gone_first": _gone_first,
        "gone": _of_both(sentences.gone),
        "blocked": _of_both(sentences.blocked),
        "stopped": _of_both(sentences.stopped),
        "undumpable": _undumpable,
        "deaf_master": _of_both(sentences.deaf_master),
        "outside": _of_both(sentences.outside),
        "mount_silent": _mount_silent,
        "enclosed": _enclosed,
        "refused": _refused,
        "died": _of_both(sentences.died),
        "hung_task": _of_both(sentences.hung_task),
        "lost_worker": _of_both(sentences.lost_worker),
        "holds_lock": _of_both(sentences.holds_lock),
        "stands_apart": _of_both(sentences.stands_apart),
        "without_a_thread": _of_both(sentences.without_a_thread),
        "other_line": _of_both(sentences.other_line),
        "awaits_orders": _of_both(sentences.awaits_orders),
        "has_not_joined": _of_both(sentences.has_not_joined),
        "other_call": _of_both(sentences.other_call),
        "low_power": _of_both(sentences.low_power),
        "parted": lambda finding: sentences.apart(finding.others),
        "together": _together,
        "roles": _roles,
        "mismatch": lambda finding: sentences.mismatch(finding.others, has_numbers=finding.scene.has_numbers),
        "cannot_tell": _cannot_tell,
    }
)
"""The headline of a finding by what it `says`; of ranks to check first, why."""

SETTLES: MappingProxyType[str, Text] = MappingProxyType(
    {
        "died": lambda _: sentences.DIED,
        "hung_task": lambda _: sentences.HUNG_TASK,
        "whether_it_waits": lambda finding: sentences.whether_it_waits(finding.members),
        "lock": lambda _: sentences.LOCK,
        "what_holds": lambda finding: sentences.what_holds(finding.members),
        "thread": lambda _: sentences.THREAD,
        "numbers": lambda f: sentences.NUMBERS_BELOW if f.scene.has_numbers else sentences.SEQUENCE_NUMBERS,
        "orders": lambda _: sentences.ORDERS,
        "loop": lambda _: sentences.LOOP,
        "look_at": lambda finding: sentences.look_at(finding.suspects[0]),
        "native_frames": lambda finding: sentences.native_frames(finding.members),
        "its_gpu": lambda _: guidance.ITS_GPU,
        "own_code": lambda _: sequence_numbers.OWN_CODE,
        "branch": lambda _: sequence_numbers.BRANCH,
        "its_network": lambda _: sequence_numbers.ITS_NETWORK,
    }
)
"""What would settle whether ranks to check first hold the job up."""
