"""Captures: stacks of all ranks of a job and of their workers, taken under deadlines."""

from hangwatch.capture.request import CaptureRequest, GpuSources, NodePaths
from hangwatch.capture.rounds import capture, job_of_pids
from hangwatch.probes.process.pyspy import DumpMode

__all__ = ["CaptureRequest", "DumpMode", "GpuSources", "NodePaths", "capture", "job_of_pids"]
