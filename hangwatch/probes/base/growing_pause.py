"""Pauses that grow from one attempt to the next, for facts that appear some time after the start of a process."""

from __future__ import annotations

from typing import NamedTuple

FIRST_SECONDS, LAST_SECONDS, GROWTH = 5.0, 15.0, 1.5


class GrowingPause(NamedTuple):
    """The time of the next attempt, and the length of the pause after it."""

    due_monotonic_seconds: float = 0.0
    seconds: float = FIRST_SECONDS

    def begin(self, now: float) -> GrowingPause:
        """Return the pause after an attempt at the time `now`."""
        return GrowingPause(now + self.seconds, min(self.seconds * GROWTH, LAST_SECONDS))
