"""One rank of the simulated job. It repeats load, compute and all_reduce until it receives another order.

It uses only the standard library and is started with `python -SE`, so it starts in about 30 ms.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hangwatch.tools.demo import loader
from hangwatch.tools.demo.phases import Phase, Phases
from hangwatch.tools.demo.process_setup import set_identity
from hangwatch.tools.demo.unix_collectives import all_reduce, join

STEP_SECONDS = 0.06
STEP_CPU_SECONDS = 0.001


class Rank(NamedTuple):
    """The state of a rank: its numbers, its connections to the launcher and the loader, and its phase."""

    rank: int
    local_rank: int
    folder: Path
    peers: socket.socket
    phases: Phases
    loader: loader.Loader

    def begins(self, phase: Phase) -> None:
        """Record that this rank now enters a phase."""
        self.phases.enter(self.local_rank, phase)


def compute(batch: bytes, cpu_seconds: float = STEP_CPU_SECONDS) -> float:
    """Simulate a GPU kernel: use the CPU as its launch does, sleep for one step, and return a number."""
    loss, end = 0.0, time.thread_time() + cpu_seconds
    while time.thread_time() < end:
        loss += sum(batch[::64])
    time.sleep(STEP_SECONDS)
    return loss


def train(me: Rank) -> None:
    """Train forever. Between two steps, obey the launcher's order."""
    order = join(me.peers)
    while True:
        name, *words = order.split()
        if name != "go":
            ORDERS[name](me, *words)
        order = train_step(me)


def train_step(me: Rank) -> str:
    """Train one step and return the launcher's next order."""
    me.begins(Phase.LOADING)
    batch = loader.next_batch(me.loader)
    me.begins(Phase.COMPUTE)
    loss = compute(batch)
    me.begins(Phase.COLLECTIVE)
    order = all_reduce(me.peers, loss).order
    me.begins(Phase.COMPUTE)
    return order


def train_from_stuck_storage(me: Rank) -> None:
    """Request a shard from the loader that can never be read."""
    me.begins(Phase.LOADING)
    loader.next_batch(me.loader, shard=str(me.folder / "stuck-shard"))


ORDERS: dict[str, Callable[..., None]] = {"loader": train_from_stuck_storage}


def main() -> None:
    """Run as `worker FOLDER SOCKET_FD`, with the environment that torchrun gives to a rank."""
    folder, connection = Path(sys.argv[1]), int(sys.argv[2])
    set_identity(Path("/proc/self/comm").read_text().strip(), os.getppid(), folder)
    me = Rank(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        folder=folder,
        peers=socket.socket(fileno=connection),
        phases=Phases(folder / "phases"),
        loader=loader.start(folder),
    )
    train(me)


if __name__ == "__main__":
    main()
