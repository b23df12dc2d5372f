"""As `tests.scenarios.worker`, but its steps take longer: many jobs train on a small machine at once."""

from __future__ import annotations

from hangwatch.demo import worker
from tests.scenarios.worker import main

if __name__ == "__main__":
    worker.STEP_SECONDS = 0.3
    main()
