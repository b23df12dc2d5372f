"""Pure: the headlines of findings that name ranks, and hints added to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hangwatch import words
from hangwatch.model import Group, Grouping, Member, Motion
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.wording import clauses
from hangwatch.verdict.wording.group_text import describe, describe_each, name_ranks, others_wait, rank_ids

_SHOWN = 4


def gone_first(finding: Finding) -> str:
    """Return the headline for ranks without a process that died first, and for others that are gone."""
    return gone(finding, finding.scene.gone)


def gone(finding: Finding, all_gone: Sequence[Group] = ()) -> str:
    """Return the headline for ranks without a process; `all_gone` are these and all others that are gone."""
    ids = rank_ids(finding.suspects)
    verb = "has no process any more" if len(ids) == 1 else "have no process any more"
    why = why_gone(finding.members)
    told = {member.id for group in all_gone for member in group.members if member.died is not None}
    silent = [rank for rank in rank_ids(all_gone) if rank not in ids and rank not in told]
    too = f"; {words.name_ranks(silent)} {'has' if len(silent) == 1 else 'have'} none either, and nothing says why"
    return f"{words.name_ranks(ids)} {verb}{why}, while {others_wait(finding.others)}{too if silent else ''}."


def why_gone(members: Sequence[Member]) -> str:
    """Return the reason in parentheses: by crash artifacts, else by the kernel's log; "" if neither has one."""
    died = [member for member in members if member.died is not None and not member.died.of_others]
    first = min(died, key=lambda member: member.died.unix_seconds if member.died else 0.0, default=None)
    if first is not None and first.died is not None:
        which = f"{words.name_ranks([first.id])} " if len(members) > 1 else ""
        return f" ({which}died first, at {words.utc(first.died.unix_seconds)}: {first.died.text})"
    ends = sorted({end for member in members if (end := clauses.ended_by(member))})
    return f" (by the kernel's log: {words.join_words(ends[:_SHOWN])})" if ends else ""


def blocked(finding: Finding) -> str:
    """Return the headline for ranks in a system call that does not return."""
    mounts = {member.kernel.silent_mount for member in finding.members if member.kernel.waits_for_mount}
    mount = next(iter(mounts)) if len(mounts) == 1 else None
    how = f"waiting in the kernel for {mount}, which gives no answer" if mount else "blocked in the kernel (state D)"
    return _describe_blocked(finding, how)


def stopped(finding: Finding) -> str:
    """Return the headline for stopped and frozen ranks."""
    frozen = {member.waits.frozen_cgroup for member in finding.members}
    if None not in frozen:
        return _describe_blocked(finding, f"frozen (control group {words.join_words(sorted(map(str, frozen)))})")
    return _describe_blocked(finding, "stopped (state T: a debugger, a tracer or SIGSTOP holds it)")


def _describe_blocked(finding: Finding, how: str) -> str:
    ids = rank_ids(finding.suspects)
    where = next((f", in {member.kernel.wchan}" for member in finding.members if member.kernel.wchan), "")
    stacks = [describe(group) for group in finding.suspects if group.frames]
    doing = f"; by its stack it {stacks[0]}" if len(ids) == 1 and stacks else ""
    verb = "is" if len(ids) == 1 else "are"
    return f"{words.name_ranks(ids)} {verb} {how}{where}{doing}; {others_wait(finding.others)}."


def master_not_listening(finding: Finding) -> str:
    """Return the headline for a rank 0 that does not serve the store."""
    ranks, others, members = finding.suspects, finding.others, finding.members
    return (
        f"{name_ranks(ranks)} does not listen at {store_endpoint(members)}, where the others look for it: "
        f"it {'; '.join(describe(group) + clauses.describe_line(group) for group in ranks)}; "
        f"{others_wait(others)}, refused there."
        f"{clauses.hint_at_progress(members)}"
    )


def undumpable(finding: Finding) -> str:
    """Return the headline for ranks without a stack, and how many ranks on the same node have one."""
    neighbours = finding.fewest_neighbours
    also = f", although {words.count(neighbours, 'other rank')} of its node could" if neighbours else ""
    return f"{name_ranks(finding.suspects)} cannot be dumped{also}, while {others_wait(finding.others)}."


def outside(finding: Finding) -> str:
    """Return the headline for ranks that are not where the others wait."""
    ranks, others = finding.suspects, finding.others
    if not any(group.motion is Motion.MOVING for group in ranks):
        return f"{words.join_words(describe_each(ranks))}, while {others_wait(others)}."
    ids = rank_ids(ranks)
    alone = len(ids) == 1
    doing = words.join_words([describe(group, several=not alone) for group in ranks[:_SHOWN]])
    return (
        f"the job waits for {words.name_ranks(ids)}: {'it' if alone else 'they'} {doing} and still "
        f"{'moves' if alone else 'move'}; {others_wait(others)}."
    )


def named(ranks: Sequence[Group], why: str) -> str:
    """Return the headline for ranks that differ by stack and by measurements."""
    return f"{name_ranks(ranks)}: {why}"


def also_differing(groups: Sequence[Group]) -> str:
    """Return a hint at other ranks that differ, though no rule names them."""
    return f" Look at others that stand apart, too: {'; '.join(describe_each(groups))}." if groups else ""


def whole_nodes(named: Sequence[Member], grouping: Grouping) -> str:
    """Return a hint if the named ranks are all ranks of some nodes with several, and other nodes have none of them."""
    odd = Counter(member.id.node for member in named)
    ranks = Counter(member.id.node for member in grouping.members)
    nodes = sorted(words.printable(node) for node in odd if node is not None)
    if len(nodes) < len(odd) or len(odd) == len(ranks) or any(odd[node] < max(2, ranks[node]) for node in odd):
        return ""
    if len(nodes) > _SHOWN:
        return f" These are all ranks of {words.count(len(nodes), 'node')}: look at the nodes."
    return f" These are all ranks of {words.join_words(nodes)}: look at the node{'s' if len(nodes) > 1 else ''}."


def store_endpoint(members: Iterable[Member]) -> str:
    """Return the address at which the ranks of the job meet, as far as these ranks show it."""
    return next(
        (f"MASTER_ADDR:MASTER_PORT ({one.waits.store.endpoint})" for one in members if one.waits.store), "the store"
    )
