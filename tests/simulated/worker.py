"""A rank of the simulated job, with more orders than the demo's. Standard library only."""

import os
import sys
import time
import zlib
from pathlib import Path

from hangwatch.tools.demo import loader, worker
from hangwatch.tools.demo.phases import Phase
from hangwatch.tools.demo.worker import Rank, compute
from tests.simulated import faults
from tests.simulated.barriers import barrier

EVALUATION_CPU_SECONDS = 0.006
CHUNK_BYTES = 1 << 18


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
        me.begins(Phase.LOADING)
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


worker.ORDERS |= {
    "checkpoint": checkpoint,
    "evaluation": evaluation,
    "lock": faults.deadlock,
    "spin": faults.pack_sequences,
    "stopped": faults.stop,
    "exited": leave,
}

if __name__ == "__main__":
    worker.main()
