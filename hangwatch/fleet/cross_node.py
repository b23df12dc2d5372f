"""Pure: evidence that only the view over all nodes shows, added to a verdict. It never adds a suspect."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import exp, lgamma
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import words
from hangwatch.fleet.topology import Leaf
from hangwatch.model import Evidence, Grouping, RankId, Value, Verdict
from hangwatch.verdict import judge as culprit

_SHOWN = 200
_CHANCE = 0.01
"""Highest probability that as many randomly drawn ranks share what the suspects share."""
_MOST_GROUPS = 1 << 12
_NAME_SHOWN = 48


class ClockOffset(Value, frozen=True):
    """Minimum by which the clock of a node is ahead of ours, in seconds (negative: behind)."""

    node: str
    seconds: float


def judge(
    grouping: Grouping,
    ranks_here: int | None = None,
    unanswered: Sequence[str] = (),
    clocks: Sequence[ClockOffset] = (),
    leaves: Mapping[str, Leaf] = MappingProxyType({}),
) -> Verdict:
    """Return the verdict on groups of many nodes (`ranks_here` as in `judge.judge`), with evidence from the nodes.

    `unanswered` are the nodes that were asked and did not answer, `leaves` the leaf switches of nodes.
    """
    verdict = culprit.judge(grouping, ranks_here)
    shared = (*_shared_node(verdict, grouping), *_shared(verdict, grouping, leaves))
    beside = (*_silent(unanswered), *shared, *_clocks(clocks))
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
    """Return evidence if all suspects are on one node, with the number of other ranks on it."""
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


class _Part(NamedTuple):
    """Ranks of one node, rail, leaf switch or process group: its name, and its ranks, by place in the grouping."""

    kind: str
    name: str
    ranks: frozenset[int]


def _shared(verdict: Verdict, grouping: Grouping, leaves: Mapping[str, Leaf]) -> tuple[Evidence, ...]:
    """Return what all suspects share, except a node, if as many randomly drawn ranks of the job hardly would share it.

    If one such part contains another, the smaller is returned: ranks on one node are also on one switch.
    """
    odd_ids = {_key(rank) for rank in verdict.named or verdict.first_look}
    odd = frozenset(place for place, member in enumerate(grouping.members) if _key(member.id) in odd_ids)
    if len(odd) < 2:
        return ()
    everybody = len(grouping.members)
    holding = []
    for parts in (_nodes(grouping), _rails(grouping), _switches(grouping, leaves), _groups(grouping)):
        found = set(parts)
        holding += [
            part for part in found if odd <= part.ranks and _chance(part, odd, everybody, len(found)) <= _CHANCE
        ]
    told = [part for part in holding if part.kind != "node" and not any(_says_more(one, part) for one in holding)]
    return tuple(_evidence(part, odd, everybody) for part in sorted(told))


def _says_more(other_part: _Part, part: _Part) -> bool:
    """True if `other_part` is smaller; for equal ranks, if it is the node, or the first of its kind by name."""
    same = other_part.ranks == part.ranks and (
        other_part.kind == "node" or (other_part.kind == part.kind and other_part.name < part.name)
    )
    return other_part.ranks < part.ranks or same


def _key(rank: RankId) -> tuple[object, ...]:
    """Return the identity of a rank; a rank to check first is a RankId with more fields."""
    return rank.node, rank.rank, rank.local_rank, rank.pid


def _chance(part: _Part, odd: frozenset[int], everybody: int, parts: int) -> float:
    """Return an upper bound (hypergeometric) of the probability that one part holds all randomly drawn ranks."""
    logarithm = _ways_logarithm(len(part.ranks), len(odd)) - _ways_logarithm(everybody, len(odd))
    return min(1.0, parts * exp(min(0.0, logarithm)))


def _ways_logarithm(size: int, drawn: int) -> float:
    """Return the logarithm of the number of ways to draw: for half of 100,000 the number has 30,000 digits."""
    return lgamma(size + 1) - lgamma(drawn + 1) - lgamma(size - drawn + 1)


def _evidence(part: _Part, odd: frozenset[int], everybody: int) -> Evidence:
    beside = len(part.ranks) - len(odd)
    others = (
        f"{words.count(beside, 'other rank')} of it {'is' if beside == 1 else 'are'} not among them" if beside else ""
    )
    message = f"all {len(odd)} odd ranks {part.name}, which has {len(part.ranks):,} of the {everybody:,} ranks"
    return Evidence(kind=f"shared_{part.kind}", message=message + (f"; {others}" if others else ""))


def _nodes(grouping: Grouping) -> Iterator[_Part]:
    yield from _by("node", "are on ", ((place, one.id.node) for place, one in enumerate(grouping.members)))


def _rails(grouping: Grouping) -> Iterator[_Part]:
    """Yield the GPUs, and usually network adapters, of one number on all nodes."""
    places = enumerate(grouping.members)
    numbers = ((place, None if one.id.local_rank is None else str(one.id.local_rank)) for place, one in places)
    yield from _by("rail", "are on one rail, local rank ", numbers)


def _switches(grouping: Grouping, leaves: Mapping[str, Leaf]) -> Iterator[_Part]:
    found = ((place, leaves.get(one.id.node or "")) for place, one in enumerate(grouping.members))
    named = ((place, None if leaf is None else f"{leaf.switch} (by {leaf.source})") for place, leaf in found)
    yield from _by("leaf_switch", "are on leaf switch ", named)


def _by(kind: str, prefix: str, names: Iterator[tuple[int, str | None]]) -> Iterator[_Part]:
    ranks: dict[str, set[int]] = defaultdict(set)
    for place, name in names:
        if name is not None:
            ranks[name].add(place)
    for name, places in ranks.items():
        yield _Part(kind, prefix + words.printable(name), frozenset(places))


def _groups(grouping: Grouping) -> Iterator[_Part]:
    """Yield process groups of the flight recorders, except those of the whole job; a rank with a record is a member."""
    ranks: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for place, member in enumerate(grouping.members):
        for recorder in member.recorder.libraries:
            for one in recorder.groups:
                key = (f"{one.library}", one.name, one.description)
                if key in ranks or len(ranks) < _MOST_GROUPS:
                    ranks[key].add(place)
    for (_, name, description), places in ranks.items():
        called = words.elided(words.printable(f"{description} {name}".strip()), _NAME_SHOWN)
        yield _Part("process_group", f"are in process group {called}", frozenset(places))


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
