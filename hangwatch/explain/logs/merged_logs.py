"""Pure: the logs of many files and prefixes -> one for each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.explain.logs.rank_log import Failure, Line, Log, Message, blames_another, latest
from hangwatch.model import RankId


class RankLog(NamedTuple):
    """What is known of one rank by its logs; `source` is the name of the one that told most.

    `failures` are in the order in which they were read, those that its launcher tells last;
    `messages` are what NCCL says.
    """

    id: RankId
    source: str
    last: Line | None
    failures: tuple[Failure, ...]
    messages: Mapping[str, Message] = MappingProxyType({})


class _Part(NamedTuple):
    """One log of a rank, or what its error.json holds."""

    source: str
    id: RankId
    log: Log


def join(parts: Iterable[tuple[str, RankId, Log]], told: Iterable[tuple[str, Failure]] = ()) -> tuple[RankLog, ...]:
    """One log for each rank, by global rank, else by local rank and node; logs of no known rank are left out.

    A global rank that torch wrote before a line holds for all logs of that local rank. `told` are failures that
    launchers tell of ranks: they count where the rank itself says nothing, and else give the time where it says none.
    """
    known = [_Part(*part) for part in parts]
    global_ranks = _global_ranks(known)
    by_rank: dict[tuple[object, ...], list[_Part]] = defaultdict(list)
    for part in known:
        rank = _numbered(part.id, global_ranks)
        if rank.rank is not None or rank.local_rank is not None:
            by_rank[_key(rank)].append(part._replace(id=rank))
    logs = {key: _joined(found) for key, found in by_rank.items()}
    for source, failure in told:
        if failure.rank is None:
            continue
        log = logs.setdefault(_key(failure.rank), RankLog(failure.rank, source, None, ()))
        if not log.failures:
            log = log._replace(failures=(failure._replace(of_others=blames_another(failure, failure.rank.rank)),))
        elif log.failures[0].moment is None:
            log = log._replace(failures=(log.failures[0]._replace(moment=failure.moment), *log.failures[1:]))
        logs[_key(failure.rank)] = log
    return tuple(sorted(logs.values(), key=lambda log: log.id.sort_key()))


def _global_ranks(parts: Iterable[_Part]) -> dict[tuple[str | None, int | None], int]:
    """The global ranks that lines tell, by node and local rank; none where two lines contradict each other."""
    told: dict[tuple[str | None, int | None], set[int]] = defaultdict(set)
    for part in parts:
        if part.log.told_rank is not None:
            told[part.id.node, part.id.local_rank].add(part.log.told_rank)
    return {place: min(ranks) for place, ranks in told.items() if len(ranks) == 1}


def _numbered(rank: RankId, global_ranks: dict[tuple[str | None, int | None], int]) -> RankId:
    if rank.rank is not None or rank.local_rank is None:
        return rank
    return replace(rank, rank=global_ranks.get((rank.node, rank.local_rank)))


def _key(rank: RankId) -> tuple[object, ...]:
    return (rank.rank,) if rank.rank is not None else (rank.node, rank.local_rank)


def _joined(parts: list[_Part]) -> RankLog:
    most = max(parts, key=lambda part: part.log.lines)
    lines = [part.log.last for part in (most, *parts) if part.log.last is not None]
    own = (failure for part in parts for failure in part.log.failures if failure.rank is None)
    failures = tuple(one._replace(of_others=blames_another(one, most.id.rank)) for one in own)
    messages = {name: said for part in reversed(parts) for name, said in part.log.messages.items()}
    return RankLog(most.id, most.source, latest(lines), failures, messages)
