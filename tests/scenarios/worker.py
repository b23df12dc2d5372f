"""A rank of the simulated job that can do more than the demo's: slow but honest work. Standard library only."""

from __future__ import annotations

import hashlib
import os
import socket
import time

from hangwatch.demo import loader, troubles, worker
from hangwatch.demo.collectives import barrier
from hangwatch.demo.phases import Phase
from hangwatch.demo.process import become
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


def stop_all(me: Rank) -> None:
    """All ranks stop, as when a batch system suspends the job, and go on together once they are continued."""
    me.begins(Phase.IDLE)
    troubles.stop(me)
    barrier(me.peers)


def linger(me: Rank, seconds: str) -> None:
    """Training is over, and no rank ends."""
    me.begins(Phase.IDLE)
    time.sleep(float(seconds))


def serve_requests(me: Rank, seconds: str) -> None:
    """Rank 0 waits for requests, the others for rank 0; for so long none comes."""
    me.begins(Phase.IDLE)
    if me.rank == 0:
        serve_forever(float(seconds))
    barrier(me.peers)


def behind_gpu(me: Rank, odd: str) -> None:
    """One rank waits for a lock; the others stand behind their GPUs, as in `.item()` behind NCCL."""
    if me.rank == int(odd):
        troubles.deadlock(me)
    me.begins(Phase.COLLECTIVE)
    item()


def item() -> None:
    """Spins in one call into C without the GIL, as CUDA does; gives way to others on a small machine."""
    os.nice(19)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", (1 << 31) - 1)


def log_behind_gpu(me: Rank, odd: str, port: str) -> None:
    """One rank asks a server; rank 0 stands behind its GPU in a call that logs, the others in the collective."""
    if me.rank == int(odd):
        ask(port)
    me.begins(Phase.COLLECTIVE)
    if me.rank == 0:
        add_scalar()
    barrier(me.peers)


def add_scalar() -> None:
    """Needs a number that is on the GPU."""
    item()


def ask(port: str) -> bytes:
    """A request without a time-out."""
    with socket.create_connection(("127.0.0.1", int(port))) as server:
        return server.recv(1)


def wait_for_server(me: Rank, port: str) -> None:
    """Rank 0 asks a server, the others wait for it."""
    if me.rank == 0:
        me.begins(Phase.LOADING)
        ask(port)
    me.begins(Phase.COLLECTIVE)
    barrier(me.peers)


def wait_for_child(me: Rank, port: str) -> None:
    """Rank 0 waits for a child that asks a server, as ssh and srun do; the others wait for rank 0."""
    if me.rank == 0:
        me.begins(Phase.LOADING)
        rank, child = os.getpid(), os.fork()
        if child == 0:
            become("ssh", rank, me.folder)
            ask(port)
            os._exit(0)
        os.waitpid(child, 0)
    me.begins(Phase.COLLECTIVE)
    barrier(me.peers)


def ask_again(me: Rank, seconds: str) -> None:
    """Rank 0 looks again and again whether something is there, the others wait for it."""
    if me.rank == 0:
        me.begins(Phase.LOADING)
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            time.sleep(0.4)
    me.begins(Phase.COLLECTIVE)
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
        "stop-all": stop_all,
        "linger": linger,
        "join-late": join_late,
        "behind-gpu": behind_gpu,
        "log-behind-gpu": log_behind_gpu,
        "wait-for-server": wait_for_server,
        "wait-for-child": wait_for_child,
        "ask-again": ask_again,
    }
    worker.main()
