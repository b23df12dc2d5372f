"""Calls in daemon threads, which may block for ever and do not keep the process alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(call: Callable[[], T], name: str) -> Future[T]:
    """Start a call in a thread of this name, and return its future. Raises RuntimeError if no thread can start."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
