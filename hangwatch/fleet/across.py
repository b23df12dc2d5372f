"""Pure: what only the view over nodes tells, as evidence beside a verdict. It accuses nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from hangwatch import words
from hangwatch.hang import culprit
from hangwatch.model import Evidence, Grouping, RankId, Value, Verdict

_SHOWN = 200


class ClockOffset(Value, frozen=True):
    """By how much the clock of a node is at least ahead of ours (negative: behind)."""

    node: str
    seconds: float


def judge(
    grouping: Grouping,
    ranks_here: int | None = None,
    unanswered: Sequence[str] = (),
    clocks: Sequence[ClockOffset] = (),
) -> Verdict:
    """The verdict on groups of many nodes (`ranks_here` as in `culprit.judge`), with what the nodes tell beside it.

    `unanswered` are the nodes that were asked and did not answer.
    """
    verdict = culprit.judge(grouping, ranks_here)
    beside = (*_silent(unanswered), *_shared_node(verdict, grouping), *_clocks(clocks))
    return replace(verdict, evidence=(*verdict.evidence, *beside)) if beside else verdict


def _silent(nodes: Sequence[str]) -> tuple[Evidence, ...]:
    if not nodes:
        return ()
    told = f"{words.count(len(nodes), 'node')} ({words.elided(words.fold_nodes(nodes), _SHOWN)})"
    return (
        Evidence(
            kind="unanswered_nodes",
            message=f"no answer from {told}: not accused, a node is silent for many reasons, but look there first",
        ),
    )


def _shared_node(verdict: Verdict, grouping: Grouping) -> tuple[Evidence, ...]:
    """Whether several ranks that the verdict points at are on one node, and whether others are there, too."""
    ranks: Sequence[RankId] = verdict.named or verdict.first_look
    nodes = {rank.node for rank in ranks}
    node = next(iter(nodes), None)
    on_nodes = Counter(member.id.node for member in grouping.members)
    if len(ranks) < 2 or len(nodes) > 1 or node is None or len(on_nodes) < 2:
        return ()
    others = on_nodes[node] - len(ranks)
    beside = f"{words.count(others, 'other rank')} of it {'is' if others == 1 else 'are'} not among them"
    return (
        Evidence(
            kind="shared_node",
            message=f"all {len(ranks)} odd ranks are on {words.printable(node)}"
            + (f"; {beside}" if others else ", and they are all of its ranks: look at the node"),
        ),
    )


def _clocks(clocks: Sequence[ClockOffset]) -> tuple[Evidence, ...]:
    if not clocks:
        return ()
    worst = max(clocks, key=lambda one: abs(one.seconds))
    ahead = "ahead of" if worst.seconds > 0 else "behind"
    nodes = words.elided(words.fold_nodes(one.node for one in clocks), _SHOWN)
    return (
        Evidence(
            kind="clocks",
            message=f"clocks differ from the asking node's: {nodes}; that of {words.printable(worst.node)} is at least "
            f"{words.duration(abs(worst.seconds))} {ahead} it: times of nodes are not comparable",
        ),
    )
