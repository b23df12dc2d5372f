"""Evidence that only a comparison of nodes shows. It is added to a verdict, but never adds a suspect. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from hangwatch import words
from hangwatch.formats.sighting import SWITCH_ADDRESS
from hangwatch.model import Evidence, Grouping, RankId, Value, Verdict
from hangwatch.tools.fleet.merge import LONGEST_LIST
from hangwatch.verdict import judge as culprit

_CHANCE = 0.01
"""Highest probability that the suspects share a node, switch or group by chance. Above it, there is no evidence."""
_NAME_SHOWN = 48


class ClockOffset(Value, frozen=True):
    """A difference between two clocks: of a node, and of the node that ran the command.

    The clock of `node` is at least `seconds` ahead; behind if `seconds` is negative.
    """

    node: str
    seconds: float


def judge(
    grouping: Grouping,
    ranks_here: int | None = None,
    unanswered: Sequence[str] = (),
    clocks: Sequence[ClockOffset] = (),
    leaves: Mapping[str, str] = MappingProxyType({}),
) -> Verdict:
    """Return the verdict on the groups of many nodes, with evidence from the comparison of nodes.

    `ranks_here` is passed to `verdict.judge.judge`. `unanswered` are the nodes that did not respond. `leaves` has the
    leaf switch of each node.
    """
    verdict = culprit.judge(grouping, ranks_here)
    shared = (*_shared_node(verdict, grouping), *_shared(verdict, grouping, leaves))
    node_evidence = (*_silent(unanswered), *shared, *_clocks(clocks))
    return replace(verdict, evidence=(*verdict.evidence, *node_evidence)) if node_evidence else verdict


def _silent(nodes: Sequence[str]) -> Iterator[Evidence]:
    if nodes:
        told = f"{words.count(len(nodes), 'node')} ({words.elided(words.fold_nodes(nodes), LONGEST_LIST)})"
        message = f"no response from {told}: check it first; its ranks may block the others"
        yield Evidence(kind="unanswered_nodes", message=message)


def _shared_node(verdict: Verdict, grouping: Grouping) -> Iterator[Evidence]:
    """Yield evidence if all suspects are on one node. Its text has the number of other ranks on that node."""
    ranks: Sequence[RankId] = verdict.named or verdict.check_first
    nodes = {rank.node for rank in ranks}
    node = next(iter(nodes), None)
    on_nodes = Counter(member.id.node for member in grouping.members)
    if len(ranks) < 2 or len(nodes) > 1 or node is None or len(on_nodes) < 2:
        return
    others = on_nodes[node] - len(ranks)
    other_ranks = f"its {words.count(others, 'other rank')} {'is' if others == 1 else 'are'} not suspects"
    more = f"; {other_ranks}" if others else ", and they are all of its ranks: check the node"
    yield Evidence(kind="shared_node", message=f"all {len(ranks)} suspects are on {words.printable(node)}{more}")


class _Part(NamedTuple):
    """The ranks of one part of the cluster or job: a node, rail, leaf switch or process group.

    `name` is the text for the message. `ranks` are indexes into `Grouping.members`.
    """

    kind: str
    name: str
    ranks: frozenset[int]


def _shared(verdict: Verdict, grouping: Grouping, leaves: Mapping[str, str]) -> tuple[Evidence, ...]:
    """Return evidence for each rail, leaf switch or process group that contains all suspects, unless by chance.

    If one of these parts contains another, only the smaller one is evidence: ranks on one node are also on one
    switch. `_shared_node` returns the evidence for a node.
    """
    odd_ids = {_key(rank) for rank in verdict.named or verdict.check_first}
    odd = frozenset(place for place, member in enumerate(grouping.members) if _key(member.id) in odd_ids)
    if len(odd) < 2:
        return ()
    everybody = len(grouping.members)
    holding = []
    ids = [member.id for member in grouping.members]
    switches = {node: f"{leaf} (by {SWITCH_ADDRESS})" for node, leaf in leaves.items()}
    for parts, count in (
        _by_name("node", "are on ", [rank.node for rank in ids], odd),
        # The ranks with the same local rank on all nodes often share a network rail.
        _by_name("rail", "are on one rail, local rank ", [rank.local_rank for rank in ids], odd),
        _by_name("leaf_switch", "are on leaf switch ", [switches.get(rank.node or "") for rank in ids], odd),
        _process_groups(grouping, odd),
    ):
        holding += [part for part in parts if _chance(part, odd, everybody, count) <= _CHANCE]
    smallest_parts = [
        part for part in holding if part.kind != "node" and not any(_says_more(other, part) for other in holding)
    ]
    return tuple(_evidence(part, odd, everybody) for part in sorted(smallest_parts))


def _says_more(other_part: _Part, part: _Part) -> bool:
    """True if `other_part` is better evidence than `part`: it has fewer ranks, and all are in `part`.

    If both have the same ranks, a node is better. Of two parts of the same kind, the first by name is better.
    """
    same = other_part.ranks == part.ranks and (
        other_part.kind == "node" or (other_part.kind == part.kind and other_part.name < part.name)
    )
    return other_part.ranks < part.ranks or same


def _key(rank: RankId) -> tuple[object, ...]:
    """Return the identity of a rank, to compare ranks: those in `check_first` have more fields than a RankId."""
    return rank.node, rank.rank, rank.local_rank, rank.pid


def _chance(part: _Part, odd: frozenset[int], everybody: int, parts: int) -> float:
    """Return an upper bound of the chance that drawn suspects `odd` are all in one of `parts` (hypergeometric)."""
    return min(1.0, parts * prod((len(part.ranks) - drawn) / (everybody - drawn) for drawn in range(len(odd))))


def _evidence(part: _Part, odd: frozenset[int], everybody: int) -> Evidence:
    beside = len(part.ranks) - len(odd)
    others = f"its {words.count(beside, 'other rank')} {'is' if beside == 1 else 'are'} not suspects" if beside else ""
    message = f"all {len(odd)} suspects {part.name}, which has {len(part.ranks):,} of the {everybody:,} ranks"
    return Evidence(kind=f"shared_{part.kind}", message=message + (f"; {others}" if others else ""))


_Parts: TypeAlias = tuple[list[_Part], int]
"""The parts of one kind that contain all suspects, and the number of all parts of this kind."""


def _by_name(kind: str, prefix: str, names: Sequence[str | int | None], odd: frozenset[int]) -> _Parts:
    """Return the parts of one kind. `names` has the name of the part of each rank, None if it is unknown."""
    count = len(set(names) - {None})
    name, *others = {names[place] for place in odd}
    if others or name is None:
        return [], count
    ranks = frozenset(place for place, its_name in enumerate(names) if its_name == name)
    return [_Part(kind, prefix + words.printable(str(name)), ranks)], count


def _process_groups(grouping: Grouping, odd: frozenset[int]) -> _Parts:
    """Return the process groups in the flight recorders. A rank with a record of a group is in this group."""
    ranks: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for place, member in enumerate(grouping.members):
        for recorder in member.recorder.libraries:
            for one in recorder.groups:
                ranks[one.library, one.name, one.description].add(place)
    parts = set()
    for (_, name, description), places in ranks.items():
        called = words.elided(words.printable(f"{description} {name}".strip()), _NAME_SHOWN)
        parts.add(_Part("process_group", f"are in process group {called}", frozenset(places)))
    return [part for part in parts if odd <= part.ranks], len(parts)


def _clocks(clocks: Sequence[ClockOffset]) -> Iterator[Evidence]:
    if not clocks:
        return
    worst = max(clocks, key=lambda one: abs(one.seconds))
    ahead = "ahead of" if worst.seconds > 0 else "behind"
    nodes = words.elided(words.fold_nodes(one.node for one in clocks), LONGEST_LIST)
    yield Evidence(
        kind="clocks",
        message=f"the clocks of {nodes} differ from the clock of the node that collected the dumps: the clock of "
        f"{words.printable(worst.node)} is at least {words.duration(abs(worst.seconds))} {ahead} it, so times of "
        "different nodes cannot be compared",
    )
