"""Children that SIGKILL does not end: remembered, bounded, and reaped when the kernel lets them go."""

from __future__ import annotations

import subprocess
import threading
from collections import Counter
from typing import NamedTuple

from hangwatch.model import ProcessId

MOST = 32
MOST_OF_ONE_SHARE = 8
"""Of one user or pod: any can mount a file system that does not answer, and must not use up what all share."""


class _Stuck(NamedTuple):
    child: subprocess.Popen[bytes]
    share: str


class LeftBehind:
    """The children that hang in the kernel, by the process that they were started for."""

    def __init__(self) -> None:
        self._freed = threading.Condition()
        self._stuck: dict[ProcessId, _Stuck] = {}
        self._running: Counter[str] = Counter()

    def begin(self, share: str, patience_seconds: float) -> bool:
        """Take a place for a child that is started for a process of this share; false when too many hang.

        Waits for a place, at most so long, while others that were started a moment ago may still end well.
        """
        with self._freed:
            self._freed.wait_for(lambda: self._has_room(share) or self._is_full(share), patience_seconds)
            if not self._has_room(share):
                return False
            self._running[share] += 1
            return True

    def end(self, share: str, target: ProcessId, child: subprocess.Popen[bytes] | None) -> None:
        """Give the place back; `child` is what could not be ended, and keeps it."""
        with self._freed:
            self._running[share] -= 1
            if child is not None:
                self._stuck[target] = _Stuck(child, share)
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

    def _hanging(self, share: str) -> tuple[int, int]:
        self._reap()
        return len(self._stuck), sum(one.share == share for one in self._stuck.values())

    def _is_full(self, share: str) -> bool:
        everybody, own = self._hanging(share)
        return everybody >= MOST or own >= MOST_OF_ONE_SHARE

    def _has_room(self, share: str) -> bool:
        everybody, own = self._hanging(share)
        running = sum(self._running.values())
        return everybody + running < MOST and own + self._running[share] < MOST_OF_ONE_SHARE
