"""A home-made inference server without requests.

It accepts connections, and each of its workers holds a GPU. Its command line and input are those of
`tests.simulated.launcher`.
"""

import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from hangwatch.tools.demo.launcher import say
from hangwatch.tools.demo.phases import Phase, Phases
from hangwatch.tools.demo.process_setup import set_identity


def answer(index: int, folder: str, parent: int, questions: Connection, ready: Connection) -> None:
    """Run a worker: wait for requests, which never come."""
    set_identity("python", parent, Path(folder))
    Phases(Path(folder) / "phases").enter(index, Phase.STARTING)
    ready.send(index)
    questions.recv()


def end_with_input(workers: Iterable[BaseProcess]) -> None:
    """End the workers when the parent process has ended or has closed standard input."""
    sys.stdin.readline()
    for one in workers:
        one.kill()
        one.join()
    os._exit(0)


def main(serve_requests: Callable[..., None] = answer, *arguments: object) -> None:
    """Start the workers, which run `serve_requests` with these first arguments. Wait for clients."""
    folder, run_id, ranks, *_ = sys.argv[1:]
    set_identity("python", os.getppid(), Path(folder))
    context = multiprocessing.get_context("spawn")
    told, tell = context.Pipe(duplex=False)
    pipes, workers = [], []
    for index in range(int(ranks)):
        ours, theirs = context.Pipe()
        numbers = {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {**numbers, "TORCHELASTIC_RUN_ID": run_id}
        worker = context.Process(target=serve_requests, args=(*arguments, index, folder, os.getpid(), theirs, tell))
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    for _ in workers:
        told.recv()
    threading.Thread(target=end_with_input, args=(workers,)).start()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        say(" ".join(["ready", *(str(one.pid) for one in workers)]))
        listening.accept()


if __name__ == "__main__":
    main()
