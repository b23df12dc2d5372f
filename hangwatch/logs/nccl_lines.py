"""The lines of NCCL, and of PyTorch about NCCL, in the logs of all ranks: problems, and settings that differ. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.logs.log_ends import SHOWN, TIMES_AS_MANY
from hangwatch.logs.merged_logs import RankLog
from hangwatch.logs.rank_log import Message
from hangwatch.model import INTERFACES_OF_ONE_NODE, Evidence, RankId, list_by_key
from hangwatch.tables import nccl_messages

_QUOTED_CHARACTERS = 300  # the peer, adapter and status of NCCL's lines are at their end
_NO_DEVICE = "No device"  # nccl_messages.toml, no_ib_device


class Trouble(NamedTuple):
    """A line about a problem, its row in the table, and the log that contains it."""

    row: nccl_messages.Message
    log: RankLog
    message: Message


def find_lone_trouble(logs: Sequence[RankLog], about: Collection[str]) -> Trouble | None:
    """Return the first line of the only rank that has a line about such a problem.

    None unless there are enough other ranks, or each of the others complains of a peer.
    """
    troubles = list(_list_troubles(logs, about))
    ids = {log.id for _, log, _ in troubles}
    complainers = {log.id for _, log, _ in _list_troubles(logs, ("peer", "timeout"))} - ids
    if len(ids) != 1 or (len(logs) <= TIMES_AS_MANY and len(complainers) < max(len(logs) - 1, 1)):
        return None
    return min(troubles, key=lambda trouble: trouble.message.number)


def find_troubles(logs: Sequence[RankLog], about: Collection[str]) -> dict[RankId, nccl_messages.Message]:
    """Return the meaning of the first line about such a problem, for each rank with such a line.

    A line about a timeout counts only if no rank has another line.
    """
    by_rank = list_by_key((trouble.log.id, trouble) for trouble in _list_troubles(logs, about))
    firsts = {
        rank: min(troubles, key=lambda trouble: (trouble.row.about in ("other", "timeout"), trouble.message.number)).row
        for rank, troubles in by_rank.items()
    }
    return {rank: row for rank, row in firsts.items() if row.about != "timeout"} or firsts


def _list_troubles(logs: Sequence[RankLog], about: Collection[str]) -> Iterator[Trouble]:
    """Yield the lines about such a problem.

    A complaint of a peer after a timeout of the rank itself is left out: ranks that end break their connections.
    """
    rows = nccl_messages.load()
    for log in logs:
        timeouts = [message.number for name, message in log.messages.items() if rows[name].about == "timeout"]
        for name, message in log.messages.items():
            is_late = rows[name].about == "peer" and message.number > min(timeouts, default=message.number)
            if rows[name].about in about and not is_late:
                yield Trouble(rows[name], log, message)


def describe_lines(logs: Sequence[RankLog]) -> Iterator[Evidence]:
    """Yield the meanings of the lines as evidence.

    A line about a setting counts only if the setting differs between ranks, or cannot reach another node.
    """
    by_name = list_by_key((name, (message.value, log)) for log in logs for name, message in log.messages.items())
    for name, row in nccl_messages.load().items():
        by_value = list_by_key(by_name.get(name, ()))
        if row.about == "setup":
            yield from _describe_setup(row, by_value)
        elif by_value:
            alike = sorted((log for same in by_value.values() for log in same), key=lambda log: log.id.sort_key())
            ranks = tuple(log.id for log in alike)
            text = f"{words.name_ranks(ranks)}: {row.meaning} ({quote(alike[0].messages[name])}); {row.remedy}"
            yield Evidence(kind="nccl_message", message=text, ranks=ranks)


def quote(message: Message) -> str:
    """Return a line of NCCL without host, process, thread and source file."""
    return words.elided(message.text.partition("NCCL WARN ")[2] or message.text, _QUOTED_CHARACTERS)


def _describe_setup(row: nccl_messages.Message, by_value: Mapping[str, Sequence[RankLog]]) -> Iterator[Evidence]:
    if len(by_value) < 2 and not by_value.keys() & (INTERFACES_OF_ONE_NODE | {_NO_DEVICE}):
        return
    rarest = sorted(by_value.items(), key=lambda entry: (len(entry[1]), entry[0]))
    told = [
        f"{words.printable(value)} on {words.name_ranks([log.id for log in found])}" for value, found in rarest[:SHOWN]
    ]
    more = words.count(len(rarest) - SHOWN, "other") if len(rarest) > SHOWN else ""
    text = f"{row.meaning}: {', '.join([*told, more] if more else told)}; {row.remedy}"
    yield Evidence(kind="nccl_message", message=text, ranks=tuple(log.id for log in rarest[0][1]))
