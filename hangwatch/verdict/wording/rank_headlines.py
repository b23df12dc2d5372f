"""The headlines of findings that name ranks, and hints that are added to them. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from hangwatch import words
from hangwatch.model import Group, Grouping, Member, Motion
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.wording import clauses
from hangwatch.verdict.wording.group_text import (
    SHOWN,
    describe,
    describe_each,
    describe_rank,
    name_ranks,
    others_wait,
    rank_ids,
)


def gone(finding: Finding) -> str:
    """Return the headline for ended ranks. It adds the other ended ranks without a known cause."""
    ids, all_gone = rank_ids(finding.suspects), finding.scene.gone
    why = why_gone(finding.members)
    told = {member.id for group in all_gone for member in group.members if member.died is not None}
    silent = [rank for rank in rank_ids(all_gone) if rank not in ids and rank not in told]
    also = f"{words.sentence(words.name_ranks(silent))} {words.agree(silent, 'has', 'have')}" if silent else ""
    rest = f" {also} ended, too; the cause is unknown." if silent else ""
    return f"{words.name_ranks(ids)} {words.agree(ids, 'has', 'have')} ended{why}. {_describe_others(finding)}.{rest}"


def why_gone(members: Sequence[Member]) -> str:
    """Return the cause of death in parentheses, by crash artifacts or else by the kernel log; "" if it is unknown."""
    died = [member for member in members if member.died is not None and not member.died.of_others]
    first = min(died, key=lambda member: member.died.unix_seconds if member.died else 0.0, default=None)
    if first is not None and first.died is not None:
        which = f"{words.name_ranks([first.id])} " if len(members) > 1 else ""
        return f" ({which}died first, at {words.utc(first.died.unix_seconds)}: {first.died.text})"
    ends = sorted({end for member in members if (end := clauses.ended_by(member))})
    return f" (kernel log: {words.join_words(ends[:SHOWN])})" if ends else ""


def blocked(finding: Finding) -> str:
    """Return the headline for ranks that are blocked in the kernel."""
    mounts = {member.kernel.silent_mount for member in finding.members if member.kernel.waits_for_mount}
    mount = next(iter(mounts)) if len(mounts) == 1 else None
    how = f"blocked in the kernel by {mount}, which does not respond" if mount else "blocked in the kernel (state D)"
    return _describe_blocked(finding, how)


def stopped(finding: Finding) -> str:
    """Return the headline for stopped and frozen ranks."""
    return _describe_blocked(finding, clauses.describe_stop(finding.members))


def held_up(finding: Finding) -> str:
    """Return the headline for ranks that wait for a process which is stopped."""
    awaited = dict.fromkeys(member.waits.awaited for member in finding.members)
    names = words.join_words([peer.name for peer in awaited if peer])
    verb = words.agree(finding.members, "is", "are")
    return f"{name_ranks(finding.suspects)} {verb} blocked by {names}. {_describe_others(finding)}."


def _describe_blocked(finding: Finding, how: str) -> str:
    ids = rank_ids(finding.suspects)
    where = next((f", in {member.kernel.wchan}" for member in finding.members if member.kernel.wchan), "")
    suspects = finding.suspects if len(ids) == 1 else ()
    doing = next((describe_rank(group).removeprefix(f"is {how}") for group in suspects if group.frames), "")
    if doing and not doing.startswith(" at "):  # of a stopped rank only the line is left
        doing = f"; according to its stack it {doing}"
    return f"{words.name_ranks(ids)} {words.agree(ids, 'is', 'are')} {how}{where}{doing}. {_describe_others(finding)}."


def master_not_listening(finding: Finding) -> str:
    """Return the headline for a rank 0 that does not serve the store."""
    ranks, members = finding.suspects, finding.members
    return (
        f"{name_ranks(ranks)} does not listen at {store_endpoint(members)}: "
        f"it {'; '.join(describe(group) + clauses.describe_line(group) for group in ranks)}. "
        f"{_describe_others(finding)}, and that address refuses their connections.{clauses.hint_at_progress(members)}"
    )


def undumpable(finding: Finding) -> str:
    """Return the headline for ranks that could not be dumped, with the number of dumped ranks on the same node."""
    neighbours = finding.fewest_neighbours
    also = f", but {words.count(neighbours, 'other rank')} of its node could" if neighbours else ""
    return f"{name_ranks(finding.suspects)} could not be dumped{also}. {_describe_others(finding)}."


def outside(finding: Finding) -> str:
    """Return the headline for ranks that do not wait in the collective in which the other ranks wait."""
    ranks = finding.suspects
    if not any(group.motion is Motion.MOVING for group in ranks):
        hint = clauses.hint_at_progress(finding.members)
        return f"{words.join_words(describe_each(ranks))}. {_describe_others(finding)}.{hint}"
    ids = rank_ids(ranks)
    alone = len(ids) == 1
    doing = words.join_words([describe(group, several=not alone) for group in ranks[:SHOWN]])
    return (
        f"the job waits for {words.name_ranks(ids)}: {'it' if alone else 'they'} {doing} and still "
        f"{'progresses' if alone else 'progress'}. {_describe_others(finding)}."
    )


def named(ranks: Sequence[Group], why: str) -> str:
    """Return the headline for ranks that differ by stack and by measurements. `why` is the reason, as a clause."""
    subject, _, clause = why.partition(" ")
    joined = f" {clause}" if len(ranks) == 1 and subject in {"it", "they"} else f": {why}"
    return f"{name_ranks(ranks)}{joined}."


def whole_nodes(named: Sequence[Member], grouping: Grouping) -> str:
    """Return a hint to check the nodes if the named ranks are all ranks of some nodes, but not of all nodes; else "".

    A node with a single rank gives no hint.
    """
    odd = Counter(member.id.node for member in named)
    if None in odd or min(odd.values(), default=0) < 2:
        return ""
    ranks = Counter(member.id.node for member in grouping.members)
    nodes = sorted(words.printable(node) for node in odd if node is not None)
    if len(odd) == len(ranks) or any(odd[node] < ranks[node] for node in odd):
        return ""
    if len(nodes) > SHOWN:
        return f" These are all ranks of {words.count(len(nodes), 'node')}: check the nodes."
    return f" These are all ranks of {words.join_words(nodes)}: check the node{'s' if len(nodes) > 1 else ''}."


def _describe_others(finding: Finding) -> str:
    """Return a sentence on the wait of the other ranks, without the full stop."""
    return words.sentence(others_wait(finding.others, awaited=words.agree(finding.members, " for it", " for them")))


def store_endpoint(members: Iterable[Member]) -> str:
    """Return the address of the store from the first rank that shows it; "the store" if no rank shows it."""
    return next(
        (f"MASTER_ADDR:MASTER_PORT ({one.waits.store.endpoint})" for one in members if one.waits.store), "the store"
    )
