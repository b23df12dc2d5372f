"""The stacks of every rank of a job and of its workers, taken under deadlines."""

from hangwatch.capture.request import CaptureRequest, GpuSources, NodePaths
from hangwatch.capture.rounds import capture, job_of_pids
from hangwatch.probes.process.pyspy import DumpMode

__all__ = ["CaptureRequest", "DumpMode", "GpuSources", "NodePaths", "capture", "job_of_pids"]
