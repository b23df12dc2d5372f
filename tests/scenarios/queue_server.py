"""A home-made inference server without requests.

Two workers wait at one queue, the others poll shared memory. Its command line and input are those of
`tests.simulated.launcher`.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path

from hangwatch.tools.demo.phases import Phase, Phases
from hangwatch.tools.demo.process_setup import set_identity
from tests.scenarios import own_server

QUEUE_WORKERS = 2


def await_turn(
    requests: Queue[int], index: int, folder: str, parent: int, _questions: Connection, ready: Connection
) -> None:
    """Run a worker. One receives from the pipe of the queue, the other waits for its turn."""
    set_identity("python", parent, Path(folder))
    Phases(Path(folder) / "phases").enter(index, Phase.STARTING)
    ready.send(index)
    if index < QUEUE_WORKERS:
        requests.get()
    run_batch()


def run_batch() -> None:
    """Poll for a request in a function with a name that models have."""
    while True:
        time.sleep(0.2)


if __name__ == "__main__":
    own_server.main(await_turn, multiprocessing.get_context("spawn").Queue())
