"""The program `tests.scenarios.worker` with longer steps, so that many jobs can train on a small machine at once."""

from hangwatch.tools.demo import worker
from tests.scenarios.worker import main

if __name__ == "__main__":
    worker.STEP_SECONDS = 0.3
    main()
