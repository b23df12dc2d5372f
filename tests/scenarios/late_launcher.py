"""A launcher like the demo's. At first half of the ranks have no process: it prints `ready` and starts them later.

Its command line and input are those of `hangwatch.demo.launcher`. A second `ready` reports all ranks.
"""

from __future__ import annotations

import os
import selectors
import threading

from hangwatch.demo import launcher
from hangwatch.demo.launcher import Launcher, say

LATE_SECONDS = 16.0
NO_PROCESS = 0


class LateLauncher(Launcher):
    """A launcher with ranks that start late, for example because some pods still pull an image."""

    def start(self) -> None:
        """Start the first half and schedule the second."""
        for local_rank in range(self.ranks // 2):
            self.start_rank(local_rank)
        come, bell = os.pipe()
        self.readers.register(come, selectors.EVENT_READ, self.start_late)
        threading.Timer(LATE_SECONDS, os.write, (bell, b".")).start()
        self.bell = come
        pids = [*self.pids.values(), *(NO_PROCESS for _ in range(self.ranks - self.ranks // 2))]
        say(" ".join(["ready", *map(str, pids)]))

    def start_late(self) -> None:
        """Start the second half."""
        self.readers.unregister(self.bell)
        for local_rank in range(self.ranks // 2, self.ranks):
            self.start_rank(local_rank)


if __name__ == "__main__":
    launcher.Launcher = LateLauncher
    launcher.main()
