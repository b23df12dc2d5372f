"""One hangwatch on one node: what runs when, and what follows from it."""

from hangwatch.daemon.wiring import Daemon

__all__ = ["Daemon"]
