"""The stacks of every rank of a job and of its workers, taken under deadlines."""

from hangwatch.capture.process_dump import ObserveDump
from hangwatch.capture.rounds import capture, job_of_pids

__all__ = ["ObserveDump", "capture", "job_of_pids"]
