"""A request for one capture: what to read of a job's ranks, the limits, and the paths of this node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec import field

from hangwatch import config
from hangwatch.capture import stack_limits
from hangwatch.detector.power_level import GpuLevels
from hangwatch.model import Fault, GpuSweep, RankDump, TrafficSweep, Value
from hangwatch.probes.process import procfs
from hangwatch.probes.process.pyspy import DumpMode

ObserveDump: TypeAlias = Callable[[float, Fault | None], None]
"""Called after each dump with its duration in seconds and its fault, if any."""


class NodePaths(Value, frozen=True):
    """Paths from which this node is read; `pyspy_path` is a py-spy to run instead of the installed one."""

    proc_root: Path = procfs.PROC
    sys_root: Path = Path("/sys")
    kernel_log: Path = Path("/dev/kmsg")
    pyspy_path: Path | None = None


class GpuSources(Value, frozen=True):
    """Sources of the GPU numbers of a capture.

    `read_sweep` is called after each round; a rank's numbers are the mean of its results. `read_traffic` is called in
    each round, in a thread parallel to the dumps, until it returns None. `levels` are those of the job's GPUs, by uuid.
    """

    read_sweep: Callable[[], GpuSweep | None] | None = None
    read_traffic: Callable[[], TrafficSweep | None] | None = None
    levels: Mapping[str, GpuLevels] = field(default_factory=dict)


class CaptureRequest(Value, frozen=True):
    """Settings of one capture of a job, and the resources that it shares with other captures.

    * `rounds`: number of rounds; None for the number in the settings. `needs_second_round` is called after a single
      round, with the dumps of that round.
    * `mode`: the content of each dump, and whether it may pause its process.
    * `ask_nccl`: with more than one round, ask NCCL during the later ones if the first round read no flight recorder
      of NCCL.
    * `kept_stacks_bytes`: approximate limit of the stacks that are kept, see `stack_limits`.
    * `stop`: once it is set, the capture returns within a second with the dumps so far. `slots` limits the simultaneous
      dumps of all captures that share it.
    """

    node: str
    settings: config.Capture
    rounds: int | None = None
    needs_second_round: Callable[[Sequence[RankDump]], bool] | None = None
    mode: DumpMode = DumpMode()
    ask_nccl: bool = False
    kept_stacks_bytes: int = stack_limits.OF_OWNER_BYTES
    stop: threading.Event = field(default_factory=threading.Event)
    slots: threading.Semaphore | None = None
    observe_dump: ObserveDump | None = None
    gpus: GpuSources = GpuSources()
    paths: NodePaths = NodePaths()
