"""Pure: what the kernel showed of a rank in every round of a look; what one round shows may be chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import structs

from hangwatch.model import BLOCKED_STATES, AsksRank, Awaited, FileLock, ProcessDump, RankDump, Store, WorkerDump


def frozen_cgroup(rounds: Sequence[ProcessDump]) -> str | None:
    """The control group whose freezer held a process in every round."""
    found = [dump.frozen_cgroup for dump in rounds]
    return found[-1] if found and None not in found else None


def peers(rank: RankDump) -> int | None:
    """How many ways lead from a rank and its workers to other ranks, at most; None where a round did not see it."""
    rounds = [*rank.rounds, *(dump for worker in rank.workers for dump in worker.rounds)]
    found = [dump.peers for dump in rounds]
    known = [count for count in found if count is not None]
    return max(known) if known and len(known) == len(found) else None


def server(rank: RankDump) -> int | None:
    """The process that waits for clients and for which a rank waits, itself maybe: the same in every round."""
    found = {dump.server for dump in rank.rounds}
    return found.pop() if len(found) == 1 else None


def file_lock(rank: RankDump | WorkerDump) -> FileLock | None:
    """The lock of a file for which a process waits, by the same holder in every round."""
    found = {dump.file_lock for dump in rank.rounds}
    return found.pop() if len(found) == 1 else None


def asks_rank(rank: RankDump | WorkerDump) -> AsksRank | None:
    """Who of a process receives from another rank."""
    found = {dump.asks_rank for dump in rank.rounds}
    return found.pop() if len(found) == 1 else None


def shares_lock(rank: RankDump) -> bool:
    """Whether it waits for a lock in memory that another rank maps, too."""
    return bool(rank.rounds) and all(dump.shares_lock for dump in rank.rounds)


def waits_in_torch(rank: RankDump) -> bool | None:
    """Whether its main thread slept in code of torch, NCCL or CUDA; None where rounds differ, or one did not see it."""
    found = {dump.waits_in_torch for dump in rank.rounds}
    return found.pop() if len(found) == 1 else None


def awaits_store(rank: RankDump) -> Literal["main", "thread"] | None:
    """Which of its threads waits for an answer of the store."""
    found = {dump.awaits_store for dump in rank.rounds}
    return found.pop() if len(found) == 1 else None


def stuck_on(rank: RankDump) -> str | None:
    """The file or pipe of nobody else in its job at which a rank stands: the same in each of several rounds."""
    found = {dump.stuck_on for dump in rank.rounds}
    return found.pop() if len(found) == 1 and len(rank.rounds) > 1 else None


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


def is_held_outside(rank: RankDump) -> bool:
    """Whether its main thread stood, in every round, in one call that no other thread of its process ends.

    It waits for a child that receives from no other rank, a file or pipe of nobody else in its job, the lock of another
    process, somebody outside, or in `D`. What it only receives, or a lock between threads, another thread may give; a
    sleep may be one of many.
    """
    if len(rank.rounds) < 2 or asks_rank(rank) is not None:
        return False
    if all(dump.state in BLOCKED_STATES for dump in rank.rounds) or stuck_on(rank) is not None:
        return True
    lock = file_lock(rank)
    if awaited(rank.rounds) is not None or (lock is not None and lock.holder_pid not in (None, rank.id.pid)):
        return True
    return all(dump.call is not None and dump.call.kind == "awaits_child" for dump in rank.rounds)


def awaited(rounds: Sequence[ProcessDump]) -> Awaited | None:
    """Whom outside of the job it waits for, in every round."""
    found = [dump.awaited for dump in rounds]
    return found[-1] if found and None not in found else None
