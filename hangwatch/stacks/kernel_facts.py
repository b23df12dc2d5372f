"""Pure: what the kernel showed of a rank in every round of a look; what one round shows may be chance."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from msgspec import structs

from hangwatch.model import BLOCKED_STATES, AsksRank, Awaited, FileLock, ProcessDump, RankDump, Store


class Facts(NamedTuple):
    """Facts of a process that all of its rounds show; where rounds differ, the default.

    `frozen_cgroup` is the control group whose freezer held it in every round, `awaited` whom outside of the job it
    waited for in every round, each as in the last one. `server` is the process that waits for clients and for which
    this one waits, itself maybe. `file_lock` is the lock of a file for which it waits, by the same holder. `asks_rank`:
    who of it receives from another rank. `shares_lock`: it waits for a lock in memory that another rank maps, too.
    `waits_in_torch`: its main thread slept in code of torch, NCCL or CUDA; None where a round did not see it.
    `awaits_store`: which of its threads waits for an answer of the store. `stuck_on`: the file or pipe of nobody else
    in its job at which it stands, the same in each of several rounds.
    """

    frozen_cgroup: str | None = None
    awaited: Awaited | None = None
    server: int | None = None
    file_lock: FileLock | None = None
    asks_rank: AsksRank | None = None
    shares_lock: bool = False
    waits_in_torch: bool | None = None
    awaits_store: Literal["main", "thread"] | None = None
    stuck_on: str | None = None


_NOTHING = Facts()
_facts_of_round: attrgetter[tuple[Any, ...]] = attrgetter(*Facts._fields)


def read_facts(rounds: Sequence[ProcessDump]) -> Facts:
    """Return the facts of a process, in one pass over its rounds."""
    read = [_facts_of_round(dump) for dump in rounds]
    if all(facts == _NOTHING for facts in read):
        return _NOTHING
    columns: list[tuple[Any, ...]] = list(zip(*read, strict=True))
    same = Facts._make(column[0] if all(value == column[0] for value in column) else None for column in columns)
    always = Facts._make(column[-1] if None not in column else None for column in columns)
    return same._replace(
        frozen_cgroup=always.frozen_cgroup,
        awaited=always.awaited,
        shares_lock=same.shares_lock is True,
        stuck_on=same.stuck_on if len(rounds) > 1 else None,
    )


def peers(rank: RankDump) -> int | None:
    """How many ways lead from a rank and its workers to other ranks, at most; None where a round did not see it."""
    rounds = [*rank.rounds, *(dump for worker in rank.workers for dump in worker.rounds)]
    found = [dump.peers for dump in rounds]
    known = [count for count in found if count is not None]
    return max(known) if known and len(known) == len(found) else None


def store(rank: RankDump) -> Store | None:
    """What the sockets of a rank showed of its store at last; that it retries only where no round showed a connection.

    One round without a sleep does not speak against it: then it was about to try again.
    """
    found = [dump.store for dump in rank.rounds if dump.store is not None]
    if not found or found[-1].has_connection:
        return found[-1] if found else None
    slept = any(one.socket == "retries" for one in found)
    retries = slept and not any(one.has_connection for one in found)
    return structs.replace(found[-1], socket="retries" if retries else "none")


def is_held_outside(rank: RankDump, facts: Facts) -> bool:
    """Whether its main thread stood, in every round, in one call that no other thread of its process ends.

    It waits for a child that receives from no other rank, a file or pipe of nobody else in its job, the lock of another
    process, somebody outside, or in `D`. What it only receives, or a lock between threads, another thread may give; a
    sleep may be one of many.
    """
    if len(rank.rounds) < 2 or facts.asks_rank is not None:
        return False
    if all(dump.state in BLOCKED_STATES for dump in rank.rounds) or facts.stuck_on is not None:
        return True
    lock = facts.file_lock
    if facts.awaited is not None or (lock is not None and lock.holder_pid not in (None, rank.id.pid)):
        return True
    return all(dump.call is not None and dump.call.kind == "awaits_child" for dump in rank.rounds)
