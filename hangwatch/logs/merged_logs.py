"""The logs of many files and prefixes, merged into one log for each rank. Pure."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.formats.log_times import seconds_until
from hangwatch.logs.failures import LIBRARY, Failure, blames_another
from hangwatch.logs.rank_log import Line, Log, Message, latest
from hangwatch.model import RankId, list_by_key

_POD, _POD_LISTED = re.compile(r"([^/]*-)\d{1,5}(?:\.[a-z]{1,9})*$"), re.compile(r"[a-z0-9.-]+ +0/\d|.* pod/")
# Of a job that a failure ends, the last ranks end at the collective timeout of PyTorch
_LONG_SECONDS = 600.0


class RankLog(NamedTuple):
    """The merged logs of one rank. `source` is the name of the longest one.

    `failures` are in the order of reading, and those that the launcher reported are last. `messages` are lines of NCCL,
    keyed by the row of nccl_messages.toml that matches. `is_reported` is true if a launcher reported the end of a rank
    that has failures of its own.
    """

    id: RankId
    source: str
    last: Line | None
    failures: tuple[Failure, ...]
    messages: Mapping[str, Message] = MappingProxyType({})
    is_reported: bool = False


class _Part(NamedTuple):
    """One of the logs of a rank, or its error.json."""

    source: str
    id: RankId
    log: Log


def join(
    parts: Iterable[tuple[str, RankId, Log]], launcher_failures: Iterable[tuple[str, Failure]] = ()
) -> tuple[RankLog, ...]:
    """Return one log for each rank, and one for all parts of unknown ranks.

    A rank is known by its global rank, by local rank and node, or by pid and node. A global rank that torch wrote
    before a line, or a launcher in its report, applies to all logs of that process. A failure in `launcher_failures`
    counts if the log of the rank contains none. If it does, the launcher's report adds a missing time, or the order. An
    exit code 1 of a local rank is the end of an exception, if the same file has one of the rank with this number. In a
    list of pods, those of other applications do not count.
    """
    all_parts = [
        _Part(source, rank if rank.rank is not None else replace(rank, rank=log.told_rank), log)
        for source, rank, log in parts
    ]
    names = (name for part in all_parts for name in (part.id.node, part.source) if name)
    pods = tuple(match.group(1) for match in map(_POD.search, names) if match)  # of the job: `train-worker-`
    reports = [
        (source, failure, failure.rank)
        for source, failure in launcher_failures
        if failure.rank is not None
        and not (pods and _POD_LISTED.match(failure.text) and not (failure.rank.node or "").startswith(pods))
    ]
    ids = [*(part.id for part in all_parts), *(rank for *_, rank in reports)]
    by_place = list_by_key((place, rank.rank) for rank in ids if rank.rank is not None for place in _list_places(rank))
    global_ranks = {place: numbers[0] for place, numbers in by_place.items() if len(set(numbers)) == 1}
    named = (part._replace(id=_add_global_rank(part.id, global_ranks)) for part in all_parts)
    by_rank = list_by_key((_make_key(part.id), part) for part in named)
    logs = {key: _leave_out_survived(_merge_parts(rank_parts)) for key, rank_parts in by_rank.items()}
    is_timed_out = any("timeout" in failure.text for log in logs.values() for failure in log.failures)
    for source, failure, process in reports:
        rank = _add_global_rank(process, global_ranks)
        alike = logs.get((rank.local_rank,)) if rank.rank is None and failure.text == "exit code 1" else None
        if alike is not None and alike.failures and alike.source == source:
            continue
        log = logs.setdefault(_make_key(rank), RankLog(rank, source, None, ()))
        if not log.failures:
            of_others = blames_another(failure, rank.rank, is_timed_out=is_timed_out)
            log = log._replace(failures=(failure._replace(of_others=of_others),))
        else:
            first = log.failures[0]
            first = first._replace(moment=first.moment or failure.moment)
            log = log._replace(failures=(first, *log.failures[1:]), is_reported=True)
        logs[_make_key(rank)] = log
    return tuple(sorted(logs.values(), key=lambda log: log.id.sort_key()))


def _leave_out_survived(log: RankLog) -> RankLog:
    """Leave out the failures that the program has caught: the rank then wrote its next steps, or lines for long."""
    last = log.last.moment if log.last is not None and not LIBRARY.search(log.last.text) else None
    failures = [one for one in log.failures if seconds_until(one.moment, last) < _LONG_SECONDS and not one.has_gone_on]
    return log._replace(failures=tuple(failures))


def _list_places(rank: RankId) -> list[tuple[object, ...]]:
    """Return the node with the local rank, and with the pid, of a process. A pid is not unique without a node."""
    return [
        *([(rank.node, rank.local_rank)] if rank.local_rank is not None else []),
        *([(rank.node, "pid", rank.pid)] if rank.pid and rank.node else []),
    ]


def _add_global_rank(rank: RankId, global_ranks: Mapping[tuple[object, ...], int]) -> RankId:
    numbers = [global_ranks[place] for place in _list_places(rank) if place in global_ranks]
    return replace(rank, rank=numbers[0]) if rank.rank is None and numbers else rank


def is_of_process(rank: RankId) -> bool:
    """True if the log is of one known process: it has a rank, a local rank or a pid."""
    return rank.is_numbered or rank.pid is not None


def _make_key(rank: RankId) -> tuple[object, ...]:
    if rank.rank is not None:
        return (rank.rank,)
    return (rank.node, rank.local_rank) if rank.local_rank is not None else (rank.node, None, rank.pid)


def _merge_parts(parts: list[_Part]) -> RankLog:
    most = max(parts, key=lambda part: part.log.lines)
    lines = [part.log.last for part in (most, *parts) if part.log.last is not None]
    own_failures = (failure for part in parts for failure in part.log.failures if failure.rank is None)
    failures = tuple(failure._replace(of_others=blames_another(failure, most.id.rank)) for failure in own_failures)
    messages = {name: message for part in reversed(parts) for name, message in part.log.messages.items()}
    return RankLog(most.id, most.source, latest(lines), failures, messages)
