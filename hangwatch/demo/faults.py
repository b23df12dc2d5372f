"""Faults that stop the progress of one rank. Standard library only: ranks import it."""

from __future__ import annotations

import os
import signal
import threading


def deadlock(_me: object) -> None:
    """Wait for a lock that a thread holds while it waits forever."""
    lock, held = threading.Lock(), threading.Event()
    threading.Thread(target=upload_metrics, args=(lock, held), name="metrics-uploader", daemon=True).start()
    held.wait()
    log_metrics(lock)


def upload_metrics(lock: threading.Lock, held: threading.Event) -> None:
    """Hold the lock during the wait for an answer that never arrives."""
    answer = threading.Event()
    with lock:
        held.set()
        answer.wait()


def log_metrics(lock: threading.Lock) -> None:
    """Acquire the lock of the metrics."""
    with lock:
        pass


def pack_sequences(_me: object) -> None:
    """Loop forever in Python, with low priority, so that a demo does not slow down the machine it runs on."""
    os.nice(10)
    room, length = 4096, 0
    while length != room:
        length = (length + 3) % (room - 1)


def stop(_me: object) -> None:
    """Stop, as under a debugger or a batch system that suspends jobs."""
    os.kill(os.getpid(), signal.SIGSTOP)
