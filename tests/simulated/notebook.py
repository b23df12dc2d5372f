"""A notebook that holds a GPU. It has computed for a while and now runs no cell. It is not a rank of any job.

`simulated.node` starts and controls it like a launcher. The order `idle` ends the running cell. Standard library
only.
"""

import os
import select
import sys
import time
from pathlib import Path

from hangwatch.tools.demo.launcher import say
from hangwatch.tools.demo.phases import Phase, Phases
from hangwatch.tools.demo.process_setup import set_identity

STEP_SECONDS = 0.1


def run_cell(phases: Phases) -> None:
    """Compute until the order `idle` arrives on standard input."""
    while not select.select([sys.stdin], [], [], 0)[0]:
        phases.enter(0, Phase.COMPUTE)
        time.sleep(STEP_SECONDS)
    sys.stdin.readline()


def wait_for_cell(phases: Phases) -> None:
    """Wait for the next cell, as an idle notebook kernel does. The demo ends the wait by closing standard input."""
    phases.enter(0, Phase.STARTING)
    sys.stdin.readline()


def main() -> None:
    """Run as `notebook FOLDER`. The further arguments of a launcher are ignored."""
    folder = Path(sys.argv[1])
    set_identity("python", os.getppid(), folder)
    phases = Phases(folder / "phases")
    say(f"ready {os.getpid()}")
    run_cell(phases)
    say("given")
    wait_for_cell(phases)


if __name__ == "__main__":
    main()
