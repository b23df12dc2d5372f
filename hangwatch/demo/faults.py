"""Faults that stop the progress of one rank. Standard library only: ranks import it."""

from __future__ import annotations

import os
import signal
import threading


def deadlock(_me: object) -> None:
    """Wait for a lock that another thread never releases."""
    lock, held = threading.Lock(), threading.Event()
    threading.Thread(target=upload_metrics, args=(lock, held), name="metrics-uploader", daemon=True).start()
    held.wait()
    log_metrics(lock)


def upload_metrics(lock: threading.Lock, held: threading.Event) -> None:
    """Hold the lock and wait for a response that never arrives."""
    answer = threading.Event()
    with lock:
        held.set()
        answer.wait()


def log_metrics(lock: threading.Lock) -> None:
    """Acquire the lock of the metrics."""
    with lock:
        pass


def pack_sequences(_me: object) -> None:
    """Loop forever in Python. The low priority keeps the demo from slowing down the machine."""
    os.nice(10)
    room, length = 4096, 0
    while length != room:
        length = (length + 3) % (room - 1)


def stop(_me: object) -> None:
    """Stop this process, as a debugger or a batch system that suspends jobs does."""
    os.kill(os.getpid(), signal.SIGSTOP)
