"""Choice of the CPU time and bytes that count as motion of a rank. Pure.

During a hang, a side thread that writes metrics still moves bytes. So only a part of the process may count:
* If the main thread is in a call about one object: the bytes of that object, and of workers and children.
* If the main thread is in a collective or waits for its GPU: the bytes of all connections to other ranks.
* In any other wait: everything, because the main thread may wait for any thread of its process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from hangwatch.model import RankDump, Waits
from hangwatch.stacks import activity, rates
from hangwatch.stacks.process_activity import ProcessPlace
from hangwatch.stacks.rates import MainRates, Rates

Awaited = Literal["object", "ranks", "gpu"]
"""The thing for which a main thread is known to wait: the object of its call, other ranks, or its GPU."""


class AwaitedRates(NamedTuple):
    """The rates of CPU time and bytes that count as motion of a rank.

    `process` are the rates of the rank's process or of a part of it. `others` are those of its workers and children.
    `awaited` is None if the motion of every thread counts.
    """

    awaited: Awaited | None
    process: Rates
    others: tuple[Rates, ...]

    @property
    def may_wait_for_workers(self) -> bool:
        """True if the main thread may be waiting for workers or children of the rank."""
        return self.awaited in (None, "object")


def measure_awaited(
    rank: RankDump,
    standings: Sequence[ProcessPlace | None],
    waits: Waits,
    main: MainRates,
    *,
    spins_behind_gpu: bool,
) -> AwaitedRates:
    """Return the rates that count as motion of a rank. `standings` has its place in each round.

    If the counters of the awaited part are missing, the whole process counts.
    """
    process, awaited = rates.measure_process(rank.rounds), _find_awaited(standings, waits)
    if awaited is None and spins_behind_gpu:
        awaited = "gpu"
    carried = rates.measure_object(rank.rounds) if awaited == "object" else rates.measure_ranks(rank.rounds)
    if awaited is None or carried is None or main.cpu_ratio is None:
        awaited = None
    else:
        # A main thread that waits for the GPU may in fact wait for torch's threads, which compute.
        process = Rates(process.cpu_ratio if awaited == "gpu" else main.cpu_ratio, carried)
    if awaited in ("ranks", "gpu"):
        return AwaitedRates(awaited, process, ())
    workers = (rates.measure_process(worker.rounds) for worker in rank.workers)
    return AwaitedRates(awaited, process, (*workers, rates.measure_children(rank.rounds)))


def _find_awaited(standings: Sequence[ProcessPlace | None], waits: Waits) -> Awaited | None:
    """Return the thing for which the main thread waits in every round, by its call and stack; None if unknown."""
    if waits.object is not None:
        return "object"
    doing = [None if stand is None else activity.find_activity(stand.doing.activity) for stand in standings]
    if all(one is not None and one.is_collective for one in doing):
        return "ranks"
    is_sync = all(stand is not None and stand.doing.activity == activity.GPU_SYNC for stand in standings)
    return "gpu" if is_sync or waits.waits_in_torch else None
