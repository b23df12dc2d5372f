"""A server without requests that looks like vLLM: a parent, and spawned workers that hold a GPU each.

Its command line and input are those of `tests.simulated.launcher`.
"""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from hangwatch.tools.demo.launcher import say
from hangwatch.tools.demo.phases import Phase, Phases
from hangwatch.tools.demo.process_setup import set_identity
from tests.scenarios import own_server


def worker_busy_loop(index: int, folder: str, parent: int, requests: Connection, ready: Connection) -> None:
    """Run a worker: wait for requests, which never come."""
    set_identity(f"VLLM::Worker_{index}", parent, Path(folder))
    Phases(Path(folder) / "phases").enter(index, Phase.STARTING)
    ready.send(index)
    requests.recv()


def main() -> None:
    folder, _run_id, ranks, *_ = sys.argv[1:]
    set_identity("python", os.getppid(), Path(folder))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    context = multiprocessing.get_context("spawn")
    requests = [context.Pipe() for _ in range(int(ranks))]
    told, tell = context.Pipe(duplex=False)
    workers = [
        context.Process(target=worker_busy_loop, args=(index, folder, os.getpid(), receiver, tell))
        for index, (receiver, _) in enumerate(requests)
    ]
    for one in workers:
        one.start()
    for _ in workers:
        told.recv()
    say(" ".join(["ready", *(str(one.pid) for one in workers)]))
    own_server.end_with_input(workers)


if __name__ == "__main__":
    main()
