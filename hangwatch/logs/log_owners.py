"""The rank of each log that has a process id but no rank. Pure.

The prefix of its lines is that of vLLM or Ray (`(Worker_TP2 pid=4122)`), or the beginning of NCCL's own lines. Servers
and drivers write with such prefixes, too.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from hangwatch.formats import process_title
from hangwatch.model import RankId


def find_owners(writers: Sequence[RankId], dumped: Collection[RankId]) -> dict[RankId, RankId | None]:
    """Return the rank of each writer of a log. None if the writer is not a rank.

    If a dump or another line has the same pid and a rank, that is the rank. If not, a process is a rank if its title is
    that of a numbered worker of vLLM or SGLang. If no title is one and no log has a number, a process is a rank if its
    kind of title is the most common one.
    """
    by_pid: dict[tuple[str | None, int | None], RankId] = {
        (rank.node, rank.pid): rank for rank in writers if rank.pid is not None and rank.is_numbered
    }
    of_dumps: dict[int | None, RankId] = {rank.pid: rank for rank in dumped if rank.pid is not None}
    titles = {rank: title for rank in writers if (title := process_title.read(rank.title or "")) is not None}
    families = Counter(title.family for rank, title in titles.items() if not rank.is_numbered or title.is_worker)
    has_workers = any(title.is_worker for title in titles.values())
    are_numbered = any(rank.is_numbered for rank in writers)
    owners: dict[RankId, RankId | None] = {}
    for rank in writers:
        title = titles.get(rank)
        if rank.pid is None or rank.pid in of_dumps or (rank.node, rank.pid) in by_pid:
            of_pid = rank if rank.is_numbered else by_pid.get((rank.node, rank.pid), rank)
            owners[rank] = of_dumps.get(rank.pid) or of_pid
        elif title is None:
            owners[rank] = None if are_numbered or titles else rank
        elif has_workers:
            owners[rank] = rank if title.is_worker else None
        else:
            is_common = families[title.family] == max(families.values())
            owners[rank] = rank if is_common and not are_numbered else None
    return owners
