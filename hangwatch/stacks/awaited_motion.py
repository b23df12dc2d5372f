"""Choice of the CPU time and bytes that count as motion of a rank. Pure.

During a hang, a side thread that writes metrics still moves bytes. So only a part of the process may count:
* If the main thread is in a call about one object: the bytes of that object, and the motion of the workers and of the
  process behind it. Other workers load data ahead, and a child such as `wandb-core` works during a hang, too. If no
  process was found at the other end of a pipe or socket, all workers count.
* If the main thread is in a collective, or waits for its GPU: the bytes of all connections to other ranks.
* In any other wait: everything, because the main thread may wait for any thread of its process.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from hangwatch.model import EnqueuedOperation, RankDump, Waits, WorkerDump
from hangwatch.stacks import activity_table, kernel_facts, rates
from hangwatch.stacks.process_activity import ProcessActivity
from hangwatch.stacks.rates import MainRates, Rates

Awaited = Literal["object", "ranks", "gpu"]
"""The thing for which a main thread is known to wait: the object of its call, other ranks, or its GPU."""


class AwaitedRates(NamedTuple):
    """The rates of CPU time and bytes that count as motion of a rank.

    `process` are the rates of the rank's process or of a part of it. `others` are those of `workers` and children, for
    which the main thread may be waiting. `awaited` is None if the motion of every thread counts.
    """

    awaited: Awaited | None
    process: Rates
    workers: tuple[WorkerDump, ...] = ()
    others: tuple[Rates, ...] = ()


def measure_awaited(rank: RankDump, main: MainRates, awaited: Awaited | None) -> AwaitedRates:
    """Return the rates that count as motion of a rank that waits for `awaited`.

    If the counters of the awaited part are missing, the whole process counts.
    """
    process = rates.measure_process(rank.rounds)
    to_ranks = rates.measure_growth(rank.rounds, lambda dump: dump.traffic.rank_bytes)
    carried = rates.measure_object(rank.rounds) if awaited == "object" else to_ranks
    if awaited is None or carried is None or main.cpu_ratio is None:
        awaited = None
    else:
        # A main thread that waits for the GPU may in fact wait for torch's threads, which compute.
        process = Rates(process.cpu_ratio if awaited == "gpu" else main.cpu_ratio, carried)
    if awaited in ("ranks", "gpu"):
        return AwaitedRates(awaited, process)
    calls = kernel_facts.list_calls(rank.rounds)
    behind = {pid for call in calls for pid in call.workers}
    is_unknown = not behind and all(call.object in ("pipe", "socket") for call in calls)
    may_be_any = awaited is None or (is_unknown and not any(dump.waits.awaited for dump in rank.rounds))
    workers = tuple(worker for worker in rank.workers if may_be_any or worker.pid in behind)
    measured = (rates.measure_process(worker.rounds) for worker in workers)
    return AwaitedRates(awaited, process, workers, (*measured, rates.measure_children(rank.rounds)))


def find_awaited(
    activities: Sequence[ProcessActivity | None], waits: Waits, operations: Sequence[EnqueuedOperation]
) -> Awaited | None:
    """Return the thing for which the main thread waits in every round; None if unknown.

    Its call and its stack show it. So does a collective that it enqueued, or in the backward pass any thread, if that
    stays open: compiled code may call it without a Python frame. `operations` are those in its flight recorders.
    """
    if waits.object is not None:
        return "object"
    names = [None if stand is None else stand.doing.activity for stand in activities]
    doing = [None if name is None else activity_table.find_activity(name) for name in names]
    if all(row is not None and row.is_collective for row in doing):
        return "ranks"
    is_backward = all(row is not None and row.work_is_in == "autograd" for row in doing)
    if any(
        operation.stays_open and not operation.is_p2p and (operation.by_main or is_backward) for operation in operations
    ):
        return "ranks"
    return "gpu" if all(name == activity_table.GPU_SYNC for name in names) or waits.waits_in_torch else None
