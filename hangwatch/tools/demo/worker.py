"""One rank of the simulated job. It repeats load, compute and all_reduce until it receives another order.

It uses only the standard library and is started with `python -SE`, so it starts in about 30 ms.
"""

import os
import socket
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hangwatch.tools.demo import faults, loader
from hangwatch.tools.demo.phases import Phase, Phases
from hangwatch.tools.demo.process_setup import set_identity
from hangwatch.tools.demo.unix_collectives import all_reduce, barrier, join

STEP_SECONDS = 0.06
STEP_CPU_SECONDS = 0.001
EVALUATION_CPU_SECONDS = 0.006
CHUNK_BYTES = 1 << 18


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


def compute(batch: bytes, cpu_seconds: float) -> float:
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
    loss = compute(batch, STEP_CPU_SECONDS)
    me.begins(Phase.COLLECTIVE)
    order = all_reduce(me.peers, loss).order
    me.begins(Phase.COMPUTE)
    return order


def save_checkpoint(folder: Path, seconds: float) -> None:
    """Write real data to a real file for `seconds`, as slowly as to a busy file system."""
    path = folder / "checkpoint.pt"
    end = time.monotonic() + seconds
    with path.open("wb") as file:
        while time.monotonic() < end:
            chunk = os.urandom(CHUNK_BYTES)
            file.write(chunk + zlib.crc32(chunk).to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.05)
    path.unlink()


def checkpoint(me: Rank, seconds: str) -> None:
    """Write a checkpoint if this is rank 0. The other ranks wait for rank 0."""
    if me.rank == 0:
        me.begins(Phase.CHECKPOINT)
        save_checkpoint(me.folder, float(seconds))
    me.begins(Phase.COLLECTIVE)
    barrier(me.peers)


def evaluate(me: Rank, seconds: float) -> None:
    """Simulate an evaluation: much work for the CPU, little for the GPU, and a changing stack."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        questions = loader.next_batch(me.loader)
        compute(questions, EVALUATION_CPU_SECONDS)
        answers = questions[::2]
        for part in (answers[::2], answers[1::2]):
            compute(part, EVALUATION_CPU_SECONDS)
        score(answers)


def score(answers: bytes) -> float:
    """Simulate the scoring of answers."""
    precision = compute(answers, EVALUATION_CPU_SECONDS)
    recall = compute(answers[::2], EVALUATION_CPU_SECONDS)
    return precision + recall


def evaluation(me: Rank, seconds: str) -> None:
    """Evaluate, then wait for the other ranks, which evaluate, too."""
    me.begins(Phase.EVALUATION)
    evaluate(me, float(seconds))
    me.begins(Phase.COLLECTIVE)
    barrier(me.peers)


def leave(_me: Rank) -> None:
    """End this rank without an error, as a rank without more data does. The launcher lets the other ranks continue."""
    sys.exit(0)


def train_from_stuck_storage(me: Rank) -> None:
    """Request a shard from the loader that can never be read."""
    me.begins(Phase.LOADING)
    loader.next_batch(me.loader, shard=str(me.folder / "stuck-shard"))


ORDERS: dict[str, Callable[..., None]] = {
    "checkpoint": checkpoint,
    "evaluation": evaluation,
    "loader": train_from_stuck_storage,
    "lock": faults.deadlock,
    "spin": faults.pack_sequences,
    "stopped": faults.stop,
    "exited": leave,
}


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
