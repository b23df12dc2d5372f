"""Pure: a finding -> its verdict. The one function that makes the text of a verdict, out of `sentences`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from hangwatch import words
from hangwatch.model import Evidence, FirstLook, Member, RankId, Verdict
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.wording import clauses, guidance, sentences


def render(finding: Finding, evidence: Sequence[Evidence]) -> Verdict:
    """The verdict that a finding is, in words, with its evidence."""
    text = finding.says(finding)
    settle = finding.settle if isinstance(finding.settle, str) else finding.settle(finding)
    ids = sorted((member.id for member in finding.members), key=RankId.sort_key)
    whys = {} if finding.is_named else {member.id: _why(finding, member, text) for member in finding.members}
    caveat = f" {finding.caveat}" if finding.caveat else ""
    return Verdict(
        kind=finding.kind,
        message=_message(finding, text, settle) + _in_kernel(finding, evidence) + caveat,
        named=tuple(ids) if finding.is_named else (),
        confidence=finding.confidence,
        evidence=tuple(evidence),
        first_look=tuple(FirstLook(**structs.asdict(rank), why=whys[rank], settle=settle) for rank in ids if whys),
    )


def _message(finding: Finding, text: str, settle: str) -> str:
    """The headline, and where it needs more: which ranks to check first, which stand apart, too, where to look."""
    grouping, here = finding.scene.grouping, sentences.of_this_node(finding.scene)
    if finding.contradicted is not None:
        return f"Nobody is accused: {text}. By the stacks: {render(finding.contradicted, ()).message}"
    if finding.by_numbers and finding.is_named:
        return text + clauses.may_come(finding.members) + here
    if finding.by_numbers:
        who = words.who([member.id for member in finding.members]) if finding.suspects else ""
        look = f" Look first at {who}. What would settle it: {settle}." if who else ""
        return f"{text}{look} Nobody is accused.{here}"
    if finding.rule is None and finding.suspects and not finding.is_named:
        why = _why(finding, finding.members[0], text)
        return f"{_sentence(text)} {_sentence(sentences.look_first(finding.suspects, why, settle))}"
    if finding.rule is None:
        return text if finding.kind == "NoRanks" else _sentence(text)
    if finding.is_named:
        text = sentences.named(finding.suspects, text) if settle else text
        more = sentences.apart_too(finding.apart) + sentences.whole_nodes(finding.members, grouping)
        return _sentence(text) + more + here
    where_to_look = guidance.where_to_look(grouping) if grouping.unanswered else ""
    return _sentence(sentences.look_first(finding.suspects, text, settle)) + here + where_to_look


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


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
