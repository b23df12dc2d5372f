"""Pure: ranks, groups and lists in words, for messages that an on-call reader understands at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hangwatch.hang import activity
from hangwatch.model import Group, RankId

_SINGULAR = (("is ", "are "), ("waits ", "wait "), ("stands ", "stand "), ("sleeps", "sleep"))


def fold(numbers: Iterable[int]) -> str:
    """Numbers as ranges: 0, 1, 2, 5 is "0-2,5"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def who(ranks: Sequence[RankId]) -> str:
    """One rank with all that is known of it, several folded with their nodes."""
    if len(ranks) == 1:
        return _one(ranks[0])
    return f"{_folded(ranks)}{_nodes(ranks)}"


def count(number: int, noun: str = "rank") -> str:
    """A number with its noun: "1 rank", "7 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listing(words: Sequence[str]) -> str:
    """Words joined by commas and "and"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def does(group: Group, *, several: bool = False) -> str:
    """What the ranks of a group do, as a clause: "is loading data (DataLoader)"."""
    clause = activity.says(group.activity, group.operation)
    if several:
        for singular, plural in _SINGULAR:
            if clause.startswith(singular):
                return plural + clause[len(singular) :].replace("its GPU", "their GPUs")
    return clause


def operations(groups: Iterable[Group]) -> str:
    """What groups wait in, the largest first: "broadcast (7 ranks) and all_reduce (4 ranks)"."""
    counts: dict[str, int] = {}
    for group in groups:
        name = (group.operation if group.waits else None) or group.activity.replace("_", " ")
        counts[name] = counts.get(name, 0) + len(group.members)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{name} ({count(number)})" for name, number in ordered[:4]]
    if len(ordered) > 4:
        shown.append(f"{count(len(ordered) - 4, 'other operation')}")
    return ordered[0][0] if len(ordered) == 1 else listing(shown)


def top(group: Group, depth: int = 4) -> str:
    """The innermost frames of a group in one line."""
    return " < ".join(str(frame) for frame in group.frames[:depth])


def _one(rank: RankId) -> str:
    if rank.rank is not None:
        name, rest = f"rank {rank.rank}", [] if rank.local_rank is None else [f"local rank {rank.local_rank}"]
    elif rank.local_rank is not None:
        name, rest = f"local rank {rank.local_rank}", []
    else:
        name, rest = ("a rank", []) if rank.pid is None else (f"pid {rank.pid}", [])
    if rank.pid is not None and not name.startswith("pid"):
        rest.append(f"pid {rank.pid}")
    where = f" on {rank.node}" if rank.node else ""
    return f"{name}{where}" + (f" ({', '.join(rest)})" if rest else "")


def _folded(ranks: Sequence[RankId]) -> str:
    if all(rank.rank is not None for rank in ranks):
        return f"ranks {fold(rank.rank for rank in ranks if rank.rank is not None)}"
    if all(rank.local_rank is not None for rank in ranks):
        return f"local ranks {fold(rank.local_rank for rank in ranks if rank.local_rank is not None)}"
    pids = [rank.pid for rank in ranks if rank.pid is not None]
    return f"{count(len(ranks))}" + (f" (pids {fold(pids)})" if pids else "")


def _nodes(ranks: Sequence[RankId]) -> str:
    nodes = sorted({rank.node for rank in ranks if rank.node})
    if not nodes:
        return ""
    return f" on {listing(nodes)}" if len(nodes) <= 3 else f" on {len(nodes)} nodes"
