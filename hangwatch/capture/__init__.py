"""The stacks of every rank of a job and of its workers, taken under deadlines."""

from hangwatch.capture.request import CaptureRequest, GpuSources, NodePaths
from hangwatch.capture.rounds import capture, job_of_pids

__all__ = ["CaptureRequest", "GpuSources", "NodePaths", "capture", "job_of_pids"]
