"""From a finding to a verdict: `render` makes the text from the sentences of the other modules. Pure."""

from collections.abc import Sequence

from hangwatch import words
from hangwatch.model import CheckFirst, Evidence, Member, RankId, Verdict
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.wording import (
    check_first_reasons,
    clauses,
    guidance,
    job_headlines,
    rank_headlines,
    sentences,
    stuck_on,
)
from hangwatch.verdict.wording.group_text import describe_each, name_ranks

_MOST_CHARACTERS = 1000  # of the reason, which each rank to check first has


def render(finding: Finding, evidence: Sequence[Evidence]) -> Verdict:
    """Return the verdict of a finding, with its text and the evidence."""
    row = sentences.find_row(finding)
    text, settle = row.headline(finding), row.settle if isinstance(row.settle, str) else row.settle(finding)
    ids = sorted((member.id for member in finding.members), key=RankId.sort_key)
    why = words.elided(text.removesuffix("."), _MOST_CHARACTERS)
    whys = {} if finding.is_named else {member.id: _explain_check(finding, member, why) for member in finding.members}
    return Verdict(
        kind=finding.kind,
        message=_write_message(finding, text, settle)
        + _describe_call(finding, evidence)
        + sentences.CAVEATS[finding.caveat],
        named=tuple(ids) if finding.is_named else (),
        confidence=finding.confidence,
        evidence=tuple(evidence),
        check_first=tuple(CheckFirst.copy_from(rank, why=whys[rank], settle=settle) for rank in ids if whys),
        stuck_on=stuck_on.stuck_on(finding),
        next_step=stuck_on.next_step(finding, settle),
    )


def _write_message(finding: Finding, text: str, settle: str) -> str:
    """Return the text of the verdict: its headline, the ranks to check first, other ranks that differ, and hints."""
    grouping, limit = finding.scene.grouping, job_headlines.limit_to_node(finding.scene)
    hint = clauses.hint_at_progress(finding.members)
    if finding.contradicted is not None:
        return f"No rank can be named: {text}. According to the stacks: {render(finding.contradicted, ()).message}"
    if finding.by_numbers and finding.is_named:
        return text + hint + limit
    if finding.by_numbers:
        look = f" Check {name_ranks(finding.suspects)} first. To decide: {settle}." if finding.suspects else ""
        return f"{text} No rank can be named.{look}{hint}{limit}"
    if finding.rule is None:
        is_named = finding.is_named or not finding.suspects
        look = "" if is_named else f" {_check_first(finding, text, settle)}"
        return f"{text if finding.kind == 'NoRanks' else words.sentence(text)}{look}"
    if finding.is_named:
        text = rank_headlines.named(finding.suspects, text) if settle else text
        apart = f" Check these, too: {'; '.join(describe_each(finding.apart))}." if finding.apart else ""
        return words.sentence(text) + apart + rank_headlines.whole_nodes(finding.members, grouping) + limit
    where_to_look = guidance.where_to_look(grouping) if grouping.unanswered else ""
    return f"No rank can be named. {_check_first(finding, text, settle)}{hint}{limit}{where_to_look}"


def _check_first(finding: Finding, text: str, settle: str) -> str:
    """Return the sentences with the ranks to check first, the reason, and the check that would decide."""
    why, stop = _explain_check(finding, finding.members[0], text.removesuffix(".")), "" if settle.endswith("?") else "."
    return f"Check {name_ranks(finding.suspects)} first: {why}. To decide: {settle}{stop}"


def _explain_check(finding: Finding, member: Member, text: str) -> str:
    """Return the reason to check a rank first: `text` unless ranks differ only by a GPU, a stuck task or a call."""
    if finding.by_numbers or finding.rule is not None:
        return text
    if finding.odd_gpu is not None:
        return check_first_reasons.odd_gpu(finding.odd_gpu)
    if member.stack.task is None:
        why = f"{words.agree(finding.members, 'it is', 'they are')} blocked in a call that no rank ends"
        return f"all other ranks have ended, and {why}" if finding.scene.stacks == 1 else why
    rounds = words.count(member.rounds, "round")
    return f"a task of its ThreadPoolExecutor is in {member.stack.task}, in the user's code, in each of {rounds}"


def _describe_call(finding: Finding, evidence: Sequence[Evidence]) -> str:
    """Return a sentence on the system call of the only suspect; "" if only the name of the call is known."""
    calls = [one.message for one in evidence if one.kind == "system_call"]
    is_one = len(calls) == len(finding.members) == 1 and finding.members[0].kernel.tells_object
    return f" In the kernel it{calls[0].removeprefix(words.name_ranks([finding.members[0].id]))}." if is_one else ""
