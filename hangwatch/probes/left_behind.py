"""Children that SIGKILL does not end: remembered, bounded, and reaped when the kernel lets them go."""

from __future__ import annotations

import subprocess
import threading
from collections import Counter
from typing import NamedTuple

from hangwatch.model import ProcessId

MOST = 32
MOST_OF_ONE_USER = 8
"""Any user can mount a file system that does not answer, and must not use up what all share."""


class _Stuck(NamedTuple):
    child: subprocess.Popen[bytes]
    user_id: int | None


class LeftBehind:
    """The children that hang in the kernel, by the process that they were started for."""

    def __init__(self) -> None:
        self._freed = threading.Condition()
        self._stuck: dict[ProcessId, _Stuck] = {}
        self._running: Counter[int | None] = Counter()

    def begin(self, user_id: int | None, patience_seconds: float) -> bool:
        """Take a place for a child that is started for a process of this user; false when too many hang.

        Waits for a place, at most so long, while others that were started a moment ago may still end well.
        """
        with self._freed:
            self._freed.wait_for(lambda: self._has_room(user_id) or self._is_full(user_id), patience_seconds)
            if not self._has_room(user_id):
                return False
            self._running[user_id] += 1
            return True

    def end(self, user_id: int | None, target: ProcessId, child: subprocess.Popen[bytes] | None) -> None:
        """Give the place back; `child` is what could not be ended, and keeps it."""
        with self._freed:
            self._running[user_id] -= 1
            if child is not None:
                self._stuck[target] = _Stuck(child, user_id)
            self._freed.notify_all()

    def of(self, target: ProcessId) -> int | None:
        """The pid of the child that still hangs for this process."""
        with self._freed:
            self._reap()
            return self._stuck[target].child.pid if target in self._stuck else None

    def count(self) -> int:
        """How many hang now."""
        with self._freed:
            self._reap()
            return len(self._stuck)

    def _reap(self) -> None:
        self._stuck = {target: one for target, one in self._stuck.items() if one.child.poll() is None}

    def _hanging(self, user_id: int | None) -> tuple[int, int]:
        self._reap()
        return len(self._stuck), sum(one.user_id == user_id for one in self._stuck.values())

    def _is_full(self, user_id: int | None) -> bool:
        everybody, own = self._hanging(user_id)
        return everybody >= MOST or own >= MOST_OF_ONE_USER

    def _has_room(self, user_id: int | None) -> bool:
        everybody, own = self._hanging(user_id)
        running = sum(self._running.values())
        return everybody + running < MOST and own + self._running[user_id] < MOST_OF_ONE_USER
