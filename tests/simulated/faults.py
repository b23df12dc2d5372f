"""Faults with which one rank stops making progress. Standard library only, because ranks import it."""

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
    """Hold the lock forever: wait for a response that never arrives."""
    answer = threading.Event()
    with lock:
        held.set()
        answer.wait()


def log_metrics(lock: threading.Lock) -> None:
    """Wait for the lock that `upload_metrics` holds."""
    with lock:
        pass


def pack_sequences(_me: object) -> None:
    """Loop forever in Python, with a low priority so that the demo does not slow down the machine."""
    os.nice(10)
    room, length = 4096, 0
    while length != room:
        length = (length + 3) % (room - 1)


def stop(_me: object) -> None:
    """Stop this process with SIGSTOP, as a debugger or a batch system that suspends jobs does."""
    os.kill(os.getpid(), signal.SIGSTOP)
