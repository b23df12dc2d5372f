"""Pure: the sentences of a verdict, written for somebody who was woken by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hangwatch import words
from hangwatch.hang import clauses, votes
from hangwatch.model import Group, Grouping, Member

_SHOWN = 4


def who(members: Sequence[Member]) -> str:
    """The ranks of these members, folded."""
    return words.who([member.id for member in members])


def members_of(groups: Iterable[Group]) -> list[Member]:
    """All members of all groups."""
    return [member for group in groups for member in group.members]


def size(groups: Iterable[Group]) -> int:
    """How many ranks the groups hold."""
    return sum(len(group.members) for group in groups)


def holds_gil(group: Group) -> bool:
    """Whether at least half of the ranks of a group hold the GIL."""
    owners = sum(member.owns_gil is True for member in group.members)
    return owners > 0 and owners * 2 >= len(group.members)


def busy(group: Group, *, several: bool | None = None) -> str:
    """What a group does, as a clause."""
    plural = len(group.members) > 1 if several is None else several
    doing = clauses.does(group, several=plural)
    if group.waits_for == "unknown" and holds_gil(group):
        where = str(group.frames[0]) if group.frames else "its code"
        doing = f"{'are' if plural else 'is'} running Python code in {where}"
    return f"{doing}, holding the GIL" if group.waits_for in {"unknown", "gpu"} and holds_gil(group) else doing


def each(groups: Sequence[Group], shown: int = _SHOWN) -> list[str]:
    """One clause per group, largest first, the rest counted."""
    parts = [f"{who(group.members)} {busy(group)}" for group in groups[:shown]]
    if len(groups) > shown:
        parts.append(f"{words.count(size(groups[shown:]))} in {len(groups) - shown} other places")
    return parts


def others_wait(others: Sequence[Group]) -> str:
    """What the ranks that are not accused do: "all 15 other ranks wait in broadcast"."""
    kinds = (
        ("wait in", [group for group in others if group.waits]),
        ("wait for their GPUs:", [group for group in others if group.waits_for == "gpu"]),
        ("wait for something else:", [group for group in others if group.waits_for in {"lock", "thread"}]),
    )
    verb, waiting = next(((verb, groups) for verb, groups in kinds if groups), ("are in", list(others)))
    total, rest = size(waiting), size(others)
    if rest == 1:
        return f"the other rank {clauses.does(waiting[0])}"
    share = f"all {rest:,}" if total == rest else f"{total:,} of the {rest:,}"
    return f"{share} other ranks {verb} {clauses.operations(waiting)}{_during(waiting)}"


def _during(groups: Sequence[Group]) -> str:
    phases = {group.phase for group in groups}
    around = {"evaluation": " during evaluation", "checkpoint": " around a checkpoint"}
    return around.get(phases.pop() or "", "") if len(phases) == 1 else ""


def outside(named: Sequence[Group], others: Sequence[Group], *, moving: bool) -> str:
    """The headline for ranks that are not where the others wait."""
    ranks = members_of(named)
    if not moving:
        return f"{words.listing(each(named))}, while {others_wait(others)}."
    one = len(ranks) == 1
    doing = words.listing([busy(group, several=not one) for group in named[:_SHOWN]])
    return (
        f"the job waits for {who(ranks)}: {'it' if one else 'they'} {doing} and still {'moves' if one else 'move'}; "
        f"{others_wait(others)}."
    )


def mismatch(groups: Sequence[Group]) -> str:
    """The headline for ranks that wait in different places."""
    return (
        f"the ranks wait in {len(groups)} different places: {'; '.join(each(groups))}. "
        "Stacks alone cannot tell who is ahead and who is behind: sequence numbers (flight recorder, NCCL RAS) can."
    )


def together(group: Group, answered: int, world_size: int | None) -> str:
    """The headline for ranks that all stand at one place."""
    if answered == 1 and world_size == 1:
        return f"the only rank of the job, {who(group.members)}, {busy(group, several=False)}{_during([group])}."
    if answered == 1:
        return (
            f"only {who(group.members)} gave a stack; it {busy(group, several=False)}. "
            "One rank alone tells nothing of the others."
        )
    return (
        f"all {words.count(answered)} that answered stand at the same place, no odd rank among them: "
        f"each {busy(group, several=False)}{_during([group])}."
    )


def roles(groups: Sequence[Group], answered: int) -> str:
    """The headline for the sender and the receivers of one collective."""
    root = min(groups, key=lambda group: len(group.members))
    return (
        f"all {words.count(answered)} that answered wait in {clauses.operations(groups)}; "
        f"{who(root.members)} differs only by its role in it."
    )


def cannot_tell(groups: Sequence[Group], answered: int, waiting: int) -> str:
    """The headline where the groups allow no answer."""
    if not groups:
        return "no rank gave a stack that tells anything."
    few = f"only {waiting:,} of {answered:,} ranks wait for other ranks" if waiting else "no rank waits for another one"
    return f"{few}, which is too little to accuse anybody: {'; '.join(each(groups))}."


def where_to_look(grouping: Grouping) -> str:
    """What to do next when nobody can be named."""
    silent, elsewhere = votes.split_absent(grouping)
    failed = size(group for group in grouping.groups if group.fault)
    if failed:
        return f" {words.count(failed).capitalize()} could not be dumped, see the evidence: start there."
    if silent:
        nodes = _silent_nodes(grouping, silent)
        whole = f", as many as {words.count(nodes, 'whole node')} would hold" if nodes else ""
        return f" No answer from {words.count(len(silent))} ({words.fold(silent)}{whole}): look there first."
    if elsewhere:
        return " Look at the other nodes, then at XIDs and NVLink."
    return " Look for XIDs, NVLink and network errors."


def _silent_nodes(grouping: Grouping, silent: Sequence[int]) -> int:
    """How many nodes would be silent as a whole, if all nodes hold as many ranks as those that answered."""
    per_node = Counter(member.id.node for member in members_of(grouping.groups) if member.id.rank is not None)
    ranks = max(per_node.values(), default=0)
    if ranks < 2 or None in per_node:
        return 0
    missing = Counter(rank // ranks for rank in silent)
    return sum(count == ranks for count in missing.values())
