"""The kernel's facts about a rank, combined over all rounds of a capture. A single round may be chance. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from msgspec import structs

from hangwatch.model import BLOCKED_STATES, Awaited, CallObject, ProcessDump, RankDump, Rests, Store, SystemCall, Waits

_NOTHING = Waits()
_OF_ALL_ROUNDS = ("awaited", "file_lock", "store", "peers", "active_peers", "enclosed_at", "object", "shares_lock")
_SIGNAL_WAITS = frozenset({"pause", "rt_sigsuspend", "rt_sigtimedwait"})
_FIELDS = tuple(name for name in Waits.__struct_fields__ if name not in _OF_ALL_ROUNDS)
_of_round: attrgetter[tuple[Any, ...]] = attrgetter(*_FIELDS)
_DEFAULTS = _of_round(_NOTHING)


def read_waits(rank: RankDump) -> Waits:
    """Return the waits that all rounds of a rank have in common. A value that changed is left at its default.

    Exception: `frozen_cgroup` and `awaited` may change between rounds. If every round has a value, the last one is
    returned. Rounds in which the connections could not be read, or in which the awaited process was not found, say
    nothing about `awaited` if two other rounds do. Rounds in which the main thread ran say nothing about `file_lock`,
    because it may try to take the lock at that moment. `object` is set if the call of the main thread did not change.
    `shares_lock` is set if any round shows it, because its memory may not be read in time on a busy node.
    `peers` and `active_peers` are those of the rank or of one of its workers, whichever is higher: `peers` in any
    round, `active_peers` in the last round. `store` and `enclosed_at` are from the last round.
    """
    rounds, processes = rank.rounds, (rank.rounds, *[worker.rounds for worker in rank.workers])
    read = [_of_round(dump.waits) for dump in rounds]
    shown: dict[str, Any] = {}
    if read.count(_DEFAULTS) < len(read):
        shown = {
            name: values[-1]
            for name, *values in zip(_FIELDS, *read, strict=True)
            if (None not in values if name == "frozen_cgroup" else all(value == values[0] for value in values))
        }
    locks = {dump.waits.file_lock for dump in rounds if dump.waits.file_lock or dump.main.call}
    if len(rounds) < 2:
        shown.pop("stuck_on", None)
    return structs.replace(
        _NOTHING,
        **shown,
        awaited=_merge_awaited(rounds),
        file_lock=locks.pop() if len(locks) == 1 else None,
        store=_merge_store(rounds),
        peers=_find_highest([dump.waits.peers for each in processes for dump in each]),
        active_peers=_find_highest([each[-1].waits.active_peers for each in processes if each]),
        enclosed_at=rounds[-1].waits.enclosed_at if rounds else None,
        object=_find_object(rounds),
        shares_lock=any(dump.waits.shares_lock for dump in rounds),
    )


def _merge_awaited(rounds: Sequence[ProcessDump]) -> Awaited | None:
    awaited = [
        dump.waits.awaited
        for dump in rounds
        if dump.waits.awaited or dump.main.call is None or dump.waits.peers is not None
    ]
    unknown = [peer for peer in awaited if peer is not None and peer.end == "unknown"]
    peers = [peer for peer in awaited if peer not in unknown]
    if unknown and len(peers) < 2:
        return unknown[-1]
    if not peers or None in peers:
        return None
    return ([peer for peer in peers if peer is not None and peer.end != "held"] or peers)[-1]


def _find_object(rounds: Sequence[ProcessDump]) -> CallObject | None:
    """Return the kind of object that the call is about, if the call was the same in at least two rounds; else None."""
    if len(rounds) < 2:
        return None
    calls = [dump.main.call for dump in rounds]
    known = {(call.number, call.descriptors[:1], call.child, call.object) for call in calls if call is not None}
    return known.pop()[-1] if None not in calls and len(known) == 1 else None


def list_calls(rounds: Sequence[ProcessDump]) -> list[SystemCall]:
    """Return the call of the main thread in each round in which it was in a call."""
    return [dump.main.call for dump in rounds if dump.main.call is not None]


def awaits_child(rounds: Sequence[ProcessDump]) -> bool:
    """True if the main thread waited for a child in every round."""
    return all(dump.main.call is not None and dump.main.call.kind == "awaits_child" for dump in rounds)


def awaits_object(waits: Waits) -> bool:
    """True if the main thread waits for an object such as a file or pipe, and no other rank is behind that object."""
    return waits.object is not None and waits.asks_rank is None and waits.awaits_store is None


def _find_highest(counts: Sequence[int | None]) -> int | None:
    """Return the highest of these counts. None if there are none, or if one is unknown."""
    if None in counts:
        return None
    return max((count for count in counts if count is not None), default=None)


def find_rest(rounds: Sequence[ProcessDump]) -> Rests | None:
    """Return the wait of a main thread that needs no other rank, else None. Rounds in which it ran are ignored."""
    calls = list_calls(rounds)
    if len(calls) < 2:
        return None
    if all(call.kind == "sleeps" or call.name in _SIGNAL_WAITS for call in calls):
        return "sleep"
    is_thread = all(call.name == "futex" for call in calls) and not any(dump.main.thread_in_file for dump in rounds)
    return "thread" if is_thread else None


def _merge_store(rounds: Sequence[ProcessDump]) -> Store | None:
    """Return the store of a rank, with the state of its sockets in the last round. None if no round shows a store.

    The state is "retries" only if no round showed a connection. It stays "retries" if the rank did not sleep in one
    round, because it was about to try again.
    """
    found = [dump.waits.store for dump in rounds if dump.waits.store is not None]
    if not found or found[-1].has_connection:
        return found[-1] if found else None
    retries = any(one.socket == "retries" for one in found) and not any(one.has_connection for one in found)
    return structs.replace(found[-1], socket="retries" if retries else "none")


def is_held_outside(rank: RankDump, waits: Waits) -> bool:
    """True if in every round the main thread was in a call that no other thread of its process can end.

    One of these is true:
    * The process is in state `D`.
    * It waits for one object (see `_find_object`), or for a child that receives from no other rank.
    * It waits for a file or pipe that no other process of its job has open.
    * It waits for a lock that another process holds, or for a peer outside the job.

    Receiving from other peers and waiting for a lock of the same process do not count: another thread may end them. Nor
    does a sleep.
    """
    if len(rank.rounds) < 2 or waits.asks_rank is not None:
        return False
    lock = waits.file_lock
    return (
        all(dump.state in BLOCKED_STATES for dump in rank.rounds)
        or waits.stuck_on is not None
        or waits.awaited is not None
        or awaits_object(waits)
        or (lock is not None and lock.holder_pid not in (None, rank.id.pid))
        or awaits_child(rank.rounds)
    )
