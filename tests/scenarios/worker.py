"""A rank of the simulated job that can do more than the demo's: slow but honest work. Standard library only."""

from __future__ import annotations

import time

from hangwatch.demo import loader, troubles, worker
from hangwatch.demo.collectives import barrier
from hangwatch.demo.phases import Phase
from hangwatch.demo.worker import Rank, evaluate

SLOW_SHARD = "slow"
SLOW_READS = 100

_read_shard = loader.read_shard


def read_shard(shard: str) -> bytes:
    """As the demo's, but the slow shard comes in small pieces over six seconds."""
    if shard != SLOW_SHARD:
        return _read_shard(shard)
    batch = b""
    for _ in range(SLOW_READS):
        batch = _read_shard(loader.GOOD_SHARD)
        time.sleep(6.0 / SLOW_READS)
    return batch


def starve(me: Rank, steps: str) -> None:
    """Steps whose batches come slowly."""
    for _ in range(int(steps)):
        me.begins(Phase.LOADING)
        batch = loader.next_batch(me.loader, SLOW_SHARD)
        me.begins(Phase.COMPUTE)
        worker.compute(batch, worker.STEP_CPU_SECONDS)
        me.begins(Phase.COLLECTIVE)
        barrier(me.peers)


def compile_model(me: Rank, seconds: str) -> None:
    """Work of the CPU only, before the first step."""
    me.begins(Phase.STARTING)
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        lower(sum(range(2000)))
        optimise(sum(range(2000)))
    barrier(me.peers)


def lower(graph: int) -> None:
    """One pass of the compiler."""
    time.sleep(0.02 + graph % 2 * 0.001)


def optimise(graph: int) -> None:
    """Another pass."""
    time.sleep(0.03 + graph % 2 * 0.001)


def join_late(me: Rank, late: str) -> None:
    """One rank waits for a lock before the first step, and the others for that rank."""
    me.begins(Phase.STARTING)
    if me.rank == int(late):
        troubles.deadlock(me)
    barrier(me.peers)


def evaluate_on_one(me: Rank, seconds: str) -> None:
    """Rank 0 evaluates, the others wait for it."""
    if me.rank == 0:
        me.begins(Phase.EVALUATION)
        evaluate(me, float(seconds))
    me.begins(Phase.COLLECTIVE)
    barrier(me.peers)


def serve_requests(me: Rank, seconds: str) -> None:
    """Rank 0 waits for requests, the others for rank 0; for so long none comes."""
    me.begins(Phase.IDLE)
    if me.rank == 0:
        serve_forever(float(seconds))
    barrier(me.peers)


def serve_forever(seconds: float) -> None:
    """Stands for the loop of an HTTP server."""
    time.sleep(seconds)


if __name__ == "__main__":
    loader.read_shard = read_shard
    worker.ORDERS |= {
        "starve": starve,
        "compile": compile_model,
        "evaluate-on-one": evaluate_on_one,
        "serve": serve_requests,
        "join-late": join_late,
    }
    worker.main()
