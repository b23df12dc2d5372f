"""A launcher like that of the demo. At first half of its ranks have no process.

It prints `ready`, starts the second half later and prints `ready` again. Its command line and input are those of
`tests.simulated.launcher`.
"""

import os
import selectors
import threading

from hangwatch.tools.demo.launcher import main, say
from tests.simulated.launcher import Launcher

LATE_SECONDS = 16.0
NO_PROCESS = 0


class LateLauncher(Launcher):
    """A launcher with ranks that start late, as when some pods still pull an image."""

    def start(self) -> None:
        """Start the first half of the ranks and schedule the start of the second half."""
        for local_rank in range(self.ranks // 2):
            self.start_rank(local_rank)
        come, bell = os.pipe()
        self.readers.register(come, selectors.EVENT_READ, self.start_late)
        threading.Timer(LATE_SECONDS, os.write, (bell, b".")).start()
        self.bell = come
        pids = [*self.pids.values(), *(NO_PROCESS for _ in range(self.ranks - self.ranks // 2))]
        say(" ".join(["ready", *map(str, pids)]))

    def start_late(self) -> None:
        """Start the second half of the ranks."""
        self.readers.unregister(self.bell)
        for local_rank in range(self.ranks // 2, self.ranks):
            self.start_rank(local_rank)


if __name__ == "__main__":
    main(LateLauncher)
