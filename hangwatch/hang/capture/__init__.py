"""The stacks of every rank of a job and of its workers, taken under deadlines."""

from hangwatch.hang.capture.process_dump import ObserveDump
from hangwatch.hang.capture.rounds import capture, job_of_pids

__all__ = ["ObserveDump", "capture", "job_of_pids"]
